"""Ollama's dialect: `/api/chat`, `/api/generate`, and what its client asks around them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from muster import __version__
from muster.api.backend import Backend, ServedModel, Stream
from muster.api.bodies import read_body
from muster.api.errors import ApiError, in_words_of, invalid
from muster.api.gather import Collected, first, gather, rest
from muster.api.http import NDJSON, ApiRoute, EventStream, Handler, Operation, endpoint, json_response
from muster.api.ollama_bodies import ChatBody, GenerateBody, ShowBody
from muster.api.ollama_prompt import NAMES, of_chat, of_prompt
from muster.api.ollama_shape import (
    DIALECT,
    ChatReply,
    GenerateReply,
    Kind,
    Listed,
    ModelList,
    Replies,
    Shown,
    Version,
    encode,
)
from muster.protocol import Generate
from muster.replies import Chunk, Done
from muster.state import State

#: What Ollama's clients append to a name that has no tag.
_TAG = ":latest"


class _Ollama:
    """The handlers of the dialect."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, ChatBody)
        model = self._name(body.model)
        wanted = of_chat(body, model)
        if not body.messages:
            return self._loaded("chat", body.model)
        return await self._answer(wanted, Replies("chat", body.model), streamed=body.stream is not False)

    async def generate(self, request: Request) -> Response:
        body = await read_body(request, GenerateBody)
        model = self._name(body.model)
        wanted = of_prompt(body, model)
        if not body.prompt:
            return self._loaded("generate", body.model)
        return await self._answer(wanted, Replies("generate", body.model), streamed=body.stream is not False)

    async def tags(self, request: Request) -> Response:
        del request
        return json_response(ModelList(tuple(self._listed(model) for model in self._backend.models())))

    async def running(self, request: Request) -> Response:
        del request
        return json_response(ModelList(tuple(self._listed(model) for model in self._backend.models() if model.ready)))

    async def show(self, request: Request) -> Response:
        body = await read_body(request, ShowBody)
        name = body.model or body.name
        if not name:
            raise invalid("model is missing", "model")
        model = self._known(name)
        listed = self._listed(model)
        return json_response(
            Shown(
                modified_at=listed.modified_at,
                capabilities=("completion", "tools"),
                model_info={"general.basename": model.name, "muster.weights_bytes": listed.size},
            )
        )

    async def version(self, request: Request) -> Response:
        del request
        return json_response(Version(__version__))

    async def _answer(self, wanted: Generate, replies: Replies, *, streamed: bool) -> Response:
        stream = self._backend.generate(wanted)
        with in_words_of(NAMES):
            if not streamed:
                collected = await gather(stream)
                return json_response(replies.end(collected.done, _whole(collected)))
            await first(stream)
        return EventStream(DIALECT, _lines(stream, replies), streams=[stream], media_type=NDJSON)

    def _loaded(self, kind: Kind, name: str) -> Response:
        self._known(name)
        return json_response(Replies(kind, name).loaded())

    def _names(self) -> dict[str, ServedModel]:
        return {model.name: model for model in self._backend.models()}

    def _name(self, wanted: str) -> str:
        """The name as it is served: the tag that Ollama's clients add is left out."""
        names = self._names()
        bare = wanted.removesuffix(_TAG)
        return bare if wanted not in names and bare in names else wanted

    def _known(self, wanted: str) -> ServedModel:
        names = self._names()
        name = self._name(wanted)
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise ApiError("model-unknown", f"there is no model {wanted!r}; the models are: {known}", field="model")
        return names[name]

    def _listed(self, model: ServedModel) -> Listed:
        size = _weights_bytes(self._backend.state(), model)
        created = datetime.fromtimestamp(model.created_ns / 1e9, UTC).isoformat(timespec="microseconds")
        return Listed(
            name=model.name,
            model=model.name,
            modified_at=created.replace("+00:00", "Z"),
            size=size,
            size_vram=size,
        )


def _weights_bytes(state: State, model: ServedModel) -> int:
    """What the ranks of one of the model's instances hold, the one that holds most."""
    instances = [state.instances[name] for name in model.instances if name in state.instances]
    return max((sum(rank.weights_bytes for rank in instance.ranks) for instance in instances), default=0)


def _whole(collected: Collected) -> Chunk:
    return Chunk(
        text=collected.text,
        reasoning=collected.reasoning,
        tool_calls=collected.tool_calls,
        logprobs=collected.logprobs,
    )


async def _lines(stream: Stream, replies: Replies) -> AsyncGenerator[bytes]:
    async for piece in rest(stream):
        match piece:
            case Chunk():
                reply = replies.part(piece)
                if reply is not None:
                    yield encode(reply) + b"\n"
            case Done():
                yield encode(replies.end(piece)) + b"\n"
            case _:
                continue


def routes(backend: Backend) -> list[ApiRoute]:
    """The routes of the dialect."""
    ollama = _Ollama(backend)

    def route(method: str, path: str, handler: Handler, summary: str, **types: Any) -> ApiRoute:
        operation = Operation(method=method, path=path, summary=summary, stream=NDJSON, **types)
        return ApiRoute(operation, endpoint(DIALECT, handler))

    return [
        route(
            "POST",
            "/api/chat",
            ollama.chat,
            "Answer a chat, in Ollama's dialect.",
            body=ChatBody,
            reply=ChatReply,
            events=ChatReply,
        ),
        route(
            "POST",
            "/api/generate",
            ollama.generate,
            "Answer a prompt, in Ollama's dialect.",
            body=GenerateBody,
            reply=GenerateReply,
            events=GenerateReply,
        ),
        route("GET", "/api/tags", ollama.tags, "Every model, in Ollama's dialect.", reply=ModelList),
        route("GET", "/api/ps", ollama.running, "The models that are ready, in Ollama's dialect.", reply=ModelList),
        route("POST", "/api/show", ollama.show, "One model, in Ollama's dialect.", body=ShowBody, reply=Shown),
        route("GET", "/api/version", ollama.version, "Muster's version, in Ollama's dialect.", reply=Version),
    ]
