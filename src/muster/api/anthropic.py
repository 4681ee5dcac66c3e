"""Anthropic's dialect: `/v1/messages`, its `count_tokens`, and how its client lists models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from muster.api.anthropic_bodies import CountTokensBody, MessagesBody
from muster.api.anthropic_calling import called_pieces, called_whole
from muster.api.anthropic_prompt import count_of, generate_of
from muster.api.anthropic_shape import DIALECT, EventWriter, Reply, StreamEvent, TokenCount, reply_of
from muster.api.backend import Backend, ServedModel
from muster.api.bodies import read_body
from muster.api.errors import ApiError, in_words_of, invalid
from muster.api.gather import first, gather, rest
from muster.api.http import ApiRoute, EventStream, Operation, endpoint, json_response
from muster.replies import Chunk, Done, Prefilled, Started

#: What every request of Anthropic's clients carries, whatever its path.
VERSION_HEADER = "anthropic-version"
_MOST_MODELS = 1000


def routes(backend: Backend) -> list[ApiRoute]:
    """The routes of the dialect; `/v1/models` is OpenAI's too, which asks `wants_models`."""

    async def messages(request: Request) -> Response:
        body = await read_body(request, MessagesBody)
        asked = generate_of(body)
        stream = backend.generate(asked.request)
        with in_words_of(asked.names):
            if not body.stream:
                answer = called_whole(asked.choice, await gather(stream))
                return json_response(reply_of(answer, body.model))
            started = await first(stream)
        pieces = called_pieces(asked.choice, rest(stream)) if asked.choice.changes else rest(stream)
        return EventStream(DIALECT, _events(pieces, started, body.model), streams=[stream])

    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountTokensBody)
        asked = count_of(body)
        with in_words_of(asked.names):
            collected = await gather(backend.generate(asked.request))
        return json_response(TokenCount(collected.started.prompt_tokens))

    return [
        ApiRoute(
            Operation(
                method="POST",
                path="/v1/messages",
                summary="Answer a chat, in Anthropic's dialect.",
                body=MessagesBody,
                reply=Reply,
                events=StreamEvent,
            ),
            endpoint(DIALECT, messages),
        ),
        ApiRoute(
            Operation(
                method="POST",
                path="/v1/messages/count_tokens",
                summary="Count the tokens of a prompt, in Anthropic's dialect.",
                body=CountTokensBody,
                reply=TokenCount,
            ),
            endpoint(DIALECT, count_tokens),
        ),
    ]


async def _events(
    pieces: AsyncIterator[Prefilled | Chunk | Done], started: Started, model: str
) -> AsyncGenerator[bytes]:
    writer = EventWriter(model)
    yield writer.start(started)
    async for piece in pieces:
        data = writer.piece(piece)
        if data:
            yield data


# --- models -------------------------------------------------------------------------------------------------


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as Anthropic's client reads it."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of models."""

    data: tuple[ModelInfo, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


def wants_models(request: Request) -> bool:
    """Whether a request for `/v1/models` comes from Anthropic's client."""
    return VERSION_HEADER in request.headers


def list_models(backend: Backend, request: Request) -> Response:
    """Answer `GET /v1/models` for Anthropic's client, with its `limit`, `after_id` and `before_id`.

    Raises:
        ApiError: 400, the limit is no number from 1 to 1000.
    """
    query = request.query_params
    try:
        limit = int(query.get("limit", "20"))
    except ValueError:
        limit = 0
    if not 1 <= limit <= _MOST_MODELS:
        raise invalid(f"limit is {query['limit']!r}; it must be a number from 1 to {_MOST_MODELS}", "limit")
    found = [_info(model) for model in sorted(backend.models(), key=lambda model: model.name)]
    names = [model.id for model in found]
    if query.get("after_id") in names:
        found = found[names.index(query["after_id"]) + 1 :]
    page, more = found[:limit], len(found) > limit
    if query.get("before_id") in names:
        end = names.index(query["before_id"])
        page, more = found[max(0, end - limit) : end], end > limit
    first_id, last_id = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(ModelPage(data=tuple(page), first_id=first_id, last_id=last_id, has_more=more))


def show_model(backend: Backend, name: str) -> Response:
    """Answer `GET /v1/models/NAME` for Anthropic's client.

    Raises:
        ApiError: 404, no instance serves it.
    """
    known = {model.name: model for model in backend.models()}
    if name not in known:
        raise unknown_model(name, known)
    return json_response(_info(known[name]))


def unknown_model(name: str, known: dict[str, ServedModel]) -> ApiError:
    """The 404 that lists the names that exist."""
    names = ", ".join(sorted(known)) or "none"
    return ApiError("model-unknown", f"there is no model {name!r}; the models are: {names}", field="model")


def _info(model: ServedModel) -> ModelInfo:
    created = datetime.fromtimestamp(model.created_ns / 1e9, UTC).isoformat(timespec="seconds")
    return ModelInfo(id=model.name, display_name=model.name, created_at=created.replace("+00:00", "Z"))
