"""The request vocabulary, under the name that this package uses."""

from __future__ import annotations

from muster.sampling import FinishReason, Message, Role, SamplingParams

__all__ = ["FinishReason", "Message", "Role", "SamplingParams"]
