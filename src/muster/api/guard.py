"""Who may use the API: a key where one is set, and no page of another site in somebody's browser.

Whoever can create an instance can run code. So a browser must not be talked into it: by a form or a script of
another page (which sends its `Origin`), or by a name that is made to point here (which stands in `Host`).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket

from starlette.requests import Request

from muster.api.errors import ApiError
from muster.api.settings import ApiSettings


class SiteGuard:
    """Carries out `muster.api.http.Guard`."""

    def __init__(self, settings: ApiSettings) -> None:
        own = socket.gethostname().lower()
        self._names = frozenset(
            name.lower() for name in ("localhost", settings.host, own, f"{own.split('.')[0]}.local", *settings.names)
        )
        self._key = settings.api_key.encode() if settings.api_key is not None else None

    def check(self, request: Request, *, mutates: bool) -> None:
        """See `muster.api.http.Guard`."""
        host = request.headers.get("host", "")
        if not self._known(host_name(host)):
            raise ApiError(
                "forbidden",
                f"this server is not known as {host_name(host)!r}; ask it by its address, or start the coordinator with"
                " --http-name for every other name that it has",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}".lower(), f"https://{host}".lower()}:
            raise ApiError("forbidden", f"a page of {origin} may not use this server")
        if self._key is not None:
            self._check_key(request)
        if mutates and request.method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError("media-type-unsupported", f"the Content-Type is {kind!r}; it must be 'application/json'")

    def _known(self, name: str) -> bool:
        # An address is no name that somebody could make point here, and a browser always says what it asked for.
        return not name or name in self._names or name.endswith(".localhost") or _is_address(name)

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("x-api-key", "")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = given or token.strip()
        if self._key is None or hmac.compare_digest(given.encode(), self._key):
            return
        what = "the API key is wrong" if given else "there is no API key"
        raise ApiError("unauthorized", f"{what}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")


def host_name(host: str) -> str:
    """The name or address in a Host header, without its port, in lower case."""
    name = host.strip().lower()
    if name.startswith("["):
        address, _, rest = name[1:].partition("]")
        return address if not rest or rest.startswith(":") else name
    return name.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
