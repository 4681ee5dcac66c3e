"""The request vocabulary, under the name that this package uses."""

from __future__ import annotations

from muster.sampling import FinishReason, Message, Piece, Role, SamplingParams

__all__ = ["FinishReason", "Message", "Piece", "Role", "SamplingParams"]
