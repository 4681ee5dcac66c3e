"""Between Starlette and the dialects: endpoints that answer errors in shape, and event streams."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import anyio
import msgspec
from loguru import logger
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from muster.api.backend import Stream
from muster.api.bodies import ClientLeftError, receive_body
from muster.api.errors import ApiError, of_error
from muster.errors import MusterError

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"

_encode = msgspec.json.Encoder().encode


class Dialect(Protocol):
    """How one API says that something went wrong."""

    def error_body(self, error: ApiError) -> bytes:
        """The body of a response with the error's status."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks off; b"" where the dialect has none."""
        ...


class Guard(Protocol):
    """Who may ask."""

    def check(self, request: Request, *, mutates: bool) -> None:
        """Raises `ApiError` 401, 403 or 415. `mutates`: the request changes the cluster."""
        ...


class Closing:
    """The end of the server, for the requests that are under way then."""

    def __init__(self) -> None:
        self.begun = False
        self._scopes: set[anyio.CancelScope] = set()

    def begin(self) -> None:
        """End every request under way; each says so to its client."""
        self.begun = True
        for scope in tuple(self._scopes):
            scope.cancel()

    @contextmanager
    def cancels(self) -> Generator[anyio.CancelScope]:
        """A scope that ends with the server."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                if self.begun:
                    scope.cancel()
                yield scope
            finally:
                self._scopes.discard(scope)


class Frame(msgspec.Struct, frozen=True):
    """What every endpoint of an app shares."""

    guard: Guard
    closing: Closing


def stopping() -> ApiError:
    """The 503 of a server that ends."""
    return ApiError("stopping", "the coordinator is stopping; ask again once it is back")


Handler = Callable[[Request], Awaitable[Response]]


class Endpoint:
    """An ASGI application around a handler: reads the body, answers errors in shape, and stops with its client."""

    def __init__(self, dialect: Dialect, handler: Handler, *, mutates: bool = False, public: bool = False) -> None:
        self.dialect = dialect
        self.mutates = mutates
        self.public = public  #: answers without a key
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope)
        frame: Frame = request.app.state.frame
        try:
            if not self.public:
                frame.guard.check(request, mutates=self.mutates)
            await receive_body(scope, receive)
        except ClientLeftError:
            return
        except ApiError as error:
            response = error_response(self.dialect, error)
            if error.status in {401, 403, 408, 413, 415}:
                # What is left of the body is not read.
                response.headers["connection"] = "close"
            await named(response)(scope, receive, send)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_with_client, receive, group.cancel_scope)
            response = await self._respond(request, frame.closing)
            await named(response)(scope, receive, send)
            group.cancel_scope.cancel()

    async def _respond(self, request: Request, closing: Closing) -> Response:
        try:
            with closing.cancels():
                return await self._handler(request)
            raise stopping()
        except ApiError as error:
            return error_response(self.dialect, error)
        except MusterError as error:
            return error_response(self.dialect, of_error(error))
        except Exception:
            return error_response(self.dialect, _internal(f"{request.method} {request.url.path}"))


def endpoint(dialect: Dialect, handler: Handler, *, mutates: bool = False, public: bool = False) -> Endpoint:
    """The endpoint of a route. `mutates`: it changes the cluster, so a browser's other pages may not call it."""
    return Endpoint(dialect, handler, mutates=mutates, public=public)


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A query parameter or a header of an operation, for the OpenAPI document."""

    name: str
    summary: str
    kind: type = str
    place: Literal["query", "header"] = "query"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What the OpenAPI document says of a route.

    `body` and `reply` are Structs, or unions of them; `events` is what each item of its `stream` carries as data.
    Where every field has a default, the body itself may be left out: not `body_required`.
    """

    method: str
    path: str
    summary: str
    body: Any = None
    body_required: bool = True
    reply: Any = None
    events: Any = None
    stream: str = EVENT_STREAM
    status: int = 200
    parameters: tuple[Parameter, ...] = ()


class ApiRoute(Route):
    """A route that describes itself."""

    def __init__(self, operation: Operation, endpoint: Endpoint) -> None:
        super().__init__(operation.path, endpoint, methods=[operation.method])
        self.operation = operation
        self.served_by = endpoint


async def _cancel_with_client(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def named(response: Response) -> Response:
    """Give the response an id of its own, under the names that the dialects have for it."""
    name = f"req_{secrets.token_hex(12)}"
    response.headers.setdefault("request-id", name)
    response.headers.setdefault("x-request-id", name)
    return response


def _internal(what: str) -> ApiError:
    logger.exception("{} failed", what)
    return ApiError("internal", "the request failed in the coordinator; see its log")


def error_response(dialect: Dialect, error: ApiError) -> Response:
    """A response that carries an error."""
    headers: dict[str, str] = {}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(error.retry_after_seconds)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(dialect.error_body(error), error.status, headers, JSON)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a Struct, or anything else that msgspec encodes, as JSON."""
    return Response(_encode(body), status, headers, JSON)


def event(data: bytes, name: str | None = None, identity: str | None = None) -> bytes:
    """One server-sent event; `data` is JSON, which has no line breaks."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    if identity is not None:
        head = b"id: " + identity.encode() + b"\n" + head
    return head + b"data: " + data + b"\n\n"


def progress_comment(done: int, total: int) -> bytes:
    """A comment in an event stream, which every reader skips and a person sees."""
    return b": prefill %d/%d\n\n" % (done, total)


class EventStream(Response):
    """A response that goes on. Each item of `body` is one write.

    When it ends, and when the client leaves, `body` is closed and the generations in `streams` are cancelled. An
    `ApiError` that `body` raises becomes the dialect's last event. A stream of server-sent events with
    `idle_seconds` carries a comment whenever nothing was sent for so long, so that nobody takes it for dead.
    """

    def __init__(
        self,
        dialect: Dialect,
        body: AsyncIterator[bytes],
        *,
        streams: Iterable[Stream] = (),
        media_type: str = EVENT_STREAM,
        idle_seconds: float | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.body = b""
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        # The base class has measured the empty body.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._dialect = dialect
        self._items = body
        self._streams = tuple(streams)
        self._idle_seconds = idle_seconds
        self._sent = 0  #: items so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then each item as it comes."""
        del receive
        last = b""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._idle_seconds is None:
                last = await self._pump(scope, send)
            else:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._comment, send, self._idle_seconds)
                    last = await self._pump(scope, send)
                    group.cancel_scope.cancel()
        finally:
            # A generator that was never begun runs no `finally`.
            for stream in self._streams:
                stream.cancel()
            await _close(self._items)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pump(self, scope: Scope, send: Send) -> bytes:
        """Send the items; answers the event that says why they broke off, b"" where they did not."""
        closing: Closing = scope["app"].state.frame.closing
        try:
            with closing.cancels():
                async for data in self._items:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._sent += 1
                return b""
            return self._dialect.error_event(stopping())
        except ApiError as error:
            return self._dialect.error_event(error)
        except MusterError as error:
            return self._dialect.error_event(of_error(error))
        except Exception:
            return self._dialect.error_event(_internal(f"{scope['method']} {scope['path']}"))

    async def _comment(self, send: Send, idle_seconds: float) -> None:
        while True:
            before = self._sent
            await anyio.sleep(idle_seconds)
            if self._sent == before:
                await send({"type": "http.response.body", "body": b": idle\n\n", "more_body": True})


async def _close(items: Any) -> None:
    """Let an async generator run its `finally` now and not when it is collected."""
    close = getattr(items, "aclose", None)
    if close is not None:
        with anyio.CancelScope(shield=True):
            await close()
