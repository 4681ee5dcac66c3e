"""What clients are told about the models that they can name."""

from __future__ import annotations

import msgspec

from muster.spec import InstanceId


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that clients can name. `ready` of its `instances` are ready now; `created_ns` is the oldest one's."""

    name: str
    instances: tuple[InstanceId, ...]
    ready: int
    created_ns: int
    waiting_requests: int = 0
    running_requests: int = 0


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a model decodes, from a token that it decoded, and the reason where it does not."""

    model: str
    ready: bool
    reason: str = ""
    seconds_since_token: float | None = None
