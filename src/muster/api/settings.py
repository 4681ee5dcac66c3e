"""How the HTTP API is served; apart from what serves it, so that the command line can say it without."""

from __future__ import annotations

import msgspec


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the API is served. `names` are further names that clients reach it by, such as that of a proxy."""

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("the API key must be printable ASCII, and not empty")
