"""How muster's own API says that something went wrong."""

from __future__ import annotations

import msgspec

from muster.api.errors import ApiError
from muster.api.http import event
from muster.spec import Shortfall


class OwnError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong: a kind that stays, a sentence, and the field of the body that it is about.

    `shortfalls` is what each node was short of, where something was to be placed.
    """

    kind: str
    message: str
    field: str | None = None
    shortfalls: tuple[Shortfall, ...] = ()


class OwnErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not 2xx."""

    error: OwnError


class OwnDialect:
    """Errors of muster's own API, as `muster.api.http.Dialect` asks for."""

    def error_body(self, error: ApiError) -> bytes:
        """`OwnErrorReply` as JSON."""
        own = OwnError(kind=error.kind, message=error.message, field=error.field, shortfalls=error.shortfalls)
        return msgspec.json.encode(OwnErrorReply(error=own))

    def error_event(self, error: ApiError) -> bytes:
        """The same as an event named "error"."""
        return event(self.error_body(error), "error")
