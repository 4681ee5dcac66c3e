"""`GET /v1/models`, for OpenAI's clients and for Anthropic's, which ask the same path."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from muster.api import anthropic_shape
from muster.api.anthropic import list_models, show_model, unknown_model, wants_models
from muster.api.backend import Backend, ServedModel
from muster.api.errors import ApiError
from muster.api.http import ApiRoute, Operation, endpoint, error_response, json_response
from muster.api.openai_shape import DIALECT


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model. `created` is when its oldest instance was created, in seconds of the epoch."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "muster"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Every model that an instance serves or will serve."""

    object: str = "list"
    data: tuple[ModelInfo, ...]


def _info(model: ServedModel) -> ModelInfo:
    return ModelInfo(id=model.name, created=model.created_ns // 10**9)


def _for_anthropic(answer: Callable[[], Response]) -> Response:
    """An answer to Anthropic's client, with errors in its own shape."""
    try:
        return answer()
    except ApiError as error:
        return error_response(anthropic_shape.DIALECT, error)


def routes(backend: Backend) -> list[ApiRoute]:
    """The routes of models."""

    async def every(request: Request) -> Response:
        if wants_models(request):
            return _for_anthropic(lambda: list_models(backend, request))
        return json_response(ModelList(data=tuple(map(_info, backend.models()))))

    async def one(request: Request) -> Response:
        name: str = request.path_params["name"]
        if wants_models(request):
            return _for_anthropic(lambda: show_model(backend, name))
        known = {model.name: model for model in backend.models()}
        if name not in known:
            raise unknown_model(name, known)
        return json_response(_info(known[name]))

    return [
        ApiRoute(
            Operation(method="GET", path="/v1/models", summary="List the models", reply=ModelList),
            endpoint(DIALECT, every),
        ),
        ApiRoute(
            Operation(method="GET", path="/v1/models/{name:path}", summary="Show a model", reply=ModelInfo),
            endpoint(DIALECT, one),
        ),
    ]
