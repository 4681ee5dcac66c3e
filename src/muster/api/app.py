"""The HTTP API as one Starlette application."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from muster.api import (
    anthropic,
    health,
    ollama,
    openai_chat,
    openai_completions,
    openai_models,
    openai_responses,
    own,
    own_operations,
    own_surveys,
)
from muster.api.anthropic_shape import AnthropicDialect
from muster.api.backend import Backend
from muster.api.errors import ApiError
from muster.api.guard import SiteGuard
from muster.api.http import JSON, ApiRoute, Closing, Dialect, Frame, Operation, endpoint, error_response, named
from muster.api.ollama_shape import OllamaDialect
from muster.api.openai_shape import OpenAiDialect
from muster.api.openapi import document
from muster.api.own_errors import OwnDialect
from muster.api.settings import ApiSettings

_OWN = OwnDialect()
_MODULES = (
    health,
    own,
    own_operations,
    own_surveys,
    openai_models,
    openai_chat,
    openai_completions,
    openai_responses,
    anthropic,
    ollama,
)
#: Paths below which a request that has no route gets muster's own error; the rest of `/api` is Ollama's.
_OWN_PATHS = ("/api/instances", "/api/nodes", "/api/models", "/api/state", "/api/events")


def build_app(backend: Backend, settings: ApiSettings) -> Starlette:
    """All dialects over one backend."""
    routes = [route for module in _MODULES for route in module.routes(backend)]
    routes.append(_openapi(routes))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_routed})
    app.router.redirect_slashes = False
    app.state.frame = Frame(SiteGuard(settings), Closing())
    return app


def frame_of(app: Starlette) -> Frame:
    """What the endpoints of the app share."""
    return cast("Frame", app.state.frame)


def _openapi(routes: list[ApiRoute]) -> ApiRoute:
    """The route of the document about `routes` and itself."""
    written: list[bytes] = []

    async def openapi(request: Request) -> Response:
        del request
        if not written:
            written.append(msgspec.json.encode(document(routes)))
        return Response(written[0], media_type=JSON)

    operation = Operation(method="GET", path="/openapi.json", summary="This document.", reply=dict[str, Any])
    return ApiRoute(operation, endpoint(_OWN, openapi))


async def _not_routed(request: Request, error: Exception) -> Response:
    """No route, or none of that method, in the shape that the caller's client reads."""
    assert isinstance(error, HTTPException)
    dialect = dialect_of(request)
    try:
        frame_of(request.app).guard.check(request, mutates=False)
    except ApiError as refusal:
        return named(error_response(dialect, refusal))
    kind = "method-not-allowed" if error.status_code == 405 else "not-found"
    allowed = f"; it takes {error.headers['Allow']}" if error.headers and "Allow" in error.headers else ""
    message = f"there is no {request.method} {request.url.path}{allowed}. GET /openapi.json lists every path."
    response = error_response(dialect, ApiError(kind, message, status=error.status_code))
    if error.headers is not None:
        response.headers.update(error.headers)
    return named(response)


def dialect_of(request: Request) -> Dialect:
    """The dialect that a request speaks, from its path and headers alone."""
    path = request.url.path
    if path.startswith("/v1"):
        return AnthropicDialect() if anthropic.wants_models(request) or "/messages" in path else OpenAiDialect()
    if path.startswith("/api/") and not path.startswith(_OWN_PATHS):
        return OllamaDialect()
    return _OWN
