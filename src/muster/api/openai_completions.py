"""`POST /v1/completions`: OpenAI's older endpoint, that goes on with a plain prompt."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from muster.api.backend import Backend
from muster.api.bodies import Limit, read_body, refuse
from muster.api.errors import invalid, unsupported
from muster.api.gather import Collected
from muster.api.http import ApiRoute, EventStream, Operation, endpoint, event, json_response, progress_comment
from muster.api.openai_answers import Answers, begin_all, gather_all, variants
from muster.api.openai_bodies import Impossible, Sampled
from muster.api.openai_shape import (
    DIALECT,
    END,
    FINGERPRINT,
    Usage,
    encode,
    finish_of,
    identity,
    now_seconds,
    usage_of,
)
from muster.protocol import Generate
from muster.replies import Chunk, Done, Prefilled, Started
from muster.sampling import TokenLogprob

#: OpenAI's own default for this endpoint.
DEFAULT_COMPLETION_TOKENS = 16
#: Most answers to all prompts of a request.
MAX_ANSWERS = 128

TokenIds = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]
Prompt = str | tuple[str | int | TokenIds, ...]


class CompletionBody(Sampled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`.

    `prompt` is text, a list of texts, a list of token ids, or a list of such lists. Without `max_tokens`, an answer
    has at most 16 tokens, as with OpenAI; with 0 only the prompt is counted, and given back with `echo`.
    """

    prompt: Prompt
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Impossible = None


LIMITS: Mapping[str, Limit] = {
    "suffix": Limit("the model only goes on from the end of a prompt", ("",)),
}


class LegacyLogprobs(msgspec.Struct, frozen=True):
    """The tokens of an answer. `text_offset` counts characters from the beginning of the answer's text."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...] | None
    text_offset: tuple[int, ...]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or what is new in it; answers to the first prompt come first."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a completion is answered with; the events of a stream have the same form."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: tuple[CompletionChoice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask the backend: `per_prompt` requests for each prompt."""

    requests: tuple[Generate, ...]
    per_prompt: int
    echo: bool
    alternatives: int | None  #: per token; `None` where log probabilities are not asked for


def plan_of(body: CompletionBody) -> Plan:
    """Translate a body.

    Raises:
        ApiError: 400, it asks for something that does not fit together, or that cannot be done.
    """
    refuse(body, LIMITS)
    body.check_stream()
    if body.best_of is not None and body.best_of != body.answers:
        raise unsupported(
            "best_of", f"every answer that is made is given; leave it out, or set it to n ({body.answers})"
        )
    if body.echo and body.logprobs is not None:
        raise unsupported(
            "echo", "together with logprobs, those of the prompt's tokens are wanted, and they are not kept"
        )
    sampling = body.sampling(
        {"top_logprobs": "logprobs"},
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs,
    )
    prompts = prompts_of(body.prompt)
    if len(prompts) * body.answers > MAX_ANSWERS:
        raise invalid(f"{len(prompts)} prompts with n {body.answers} are more than {MAX_ANSWERS} answers", "prompt")
    requests = (Generate(instance=body.model, prompt=prompt, sampling=sampling) for prompt in prompts)
    return Plan(
        requests=tuple(each for request in requests for each in variants(request, body.answers)),
        per_prompt=body.answers,
        echo=bool(body.echo),
        alternatives=body.logprobs,
    )


def prompts_of(prompt: Prompt) -> tuple[str | tuple[int, ...], ...]:
    """The prompts, each a text or token ids.

    Raises:
        ApiError: 400, there is none, or texts and ids are mixed.
    """
    if isinstance(prompt, str):
        return (prompt,)
    texts = tuple(item for item in prompt if isinstance(item, str))
    ids = tuple(item for item in prompt if isinstance(item, int))
    lists = tuple(item for item in prompt if isinstance(item, tuple))
    if not prompt:
        raise invalid("prompt is empty; send a text, or token ids", "prompt")
    if len(prompt) not in (len(texts), len(ids), len(lists)):
        raise invalid("prompt mixes texts, token ids and lists of them; send one kind", "prompt")
    if ids:
        if min(ids) < 0:
            raise invalid(f"prompt has the token id {min(ids)}; ids begin at 0", "prompt")
        return (ids,)
    return texts or lists


class Legacy:
    """Log probabilities in the older form; keeps the offset from one piece of an answer to the next."""

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._offset = 0
        # A character may span tokens: it counts with the token that completes it.
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def of(self, logprobs: Iterable[TokenLogprob]) -> LegacyLogprobs:
        """The next tokens."""
        items = tuple(logprobs)
        offsets: list[int] = []
        for item in items:
            offsets.append(self._offset)
            self._offset += len(self._decode(item.data))
        top = None
        if self._alternatives:
            top = tuple({other.text: other.logprob for other in item.top} | {item.text: item.logprob} for item in items)
        return LegacyLogprobs(
            tuple(item.text for item in items), tuple(item.logprob for item in items), top, tuple(offsets)
        )


def _echo(request: Generate, started: Started) -> str:
    return request.prompt if isinstance(request.prompt, str) else started.prompt or ""


def _reply(body: CompletionBody, plan: Plan, answers: Sequence[Collected]) -> CompletionReply:
    return CompletionReply(
        id=identity("cmpl-"),
        created=now_seconds(),
        model=body.model,
        choices=tuple(_choice(index, plan, answer) for index, answer in enumerate(answers)),
        usage=usage_of((answer.done for answer in answers), plan.per_prompt),
    )


def _choice(index: int, plan: Plan, answer: Collected) -> CompletionChoice:
    text = _echo(plan.requests[index], answer.started) + answer.text if plan.echo else answer.text
    logprobs = Legacy(plan.alternatives).of(answer.logprobs) if plan.alternatives is not None else None
    return CompletionChoice(index, text, logprobs, finish_of(answer.done, called=False))


async def _events(body: CompletionBody, plan: Plan, answers: Answers) -> AsyncGenerator[bytes]:
    usage = None if body.include_usage else msgspec.UNSET
    chunk = CompletionReply(id=identity("cmpl-"), created=now_seconds(), model=body.model, choices=(), usage=usage)
    before, after = encode(chunk).rsplit(b'"choices":[', 1)
    # All but the choice is the same in each event: it is encoded once.
    head, tail = b"data: " + before + b'"choices":[', after + b"\n\n"
    legacy = [Legacy(plan.alternatives) if plan.alternatives is not None else None for _ in plan.requests]
    ends: dict[int, Done] = {}
    async for index, piece in answers:
        match piece:
            case Chunk():
                counter = legacy[index]
                logprobs = counter.of(piece.logprobs) if counter is not None and piece.logprobs else None
                if not piece.text and logprobs is None:
                    continue
                choice = CompletionChoice(index, piece.text, logprobs, None)
            case Started():
                if not plan.echo:
                    continue
                choice = CompletionChoice(index, _echo(plan.requests[index], piece), None, None)
            case Prefilled():
                yield progress_comment(piece.done, piece.total)
                continue
            case Done():
                ends[index] = piece
                choice = CompletionChoice(index, "", None, finish_of(piece, called=False))
        yield head + encode(choice) + tail
    last = END
    if body.include_usage:
        total = usage_of((ends[index] for index in sorted(ends)), plan.per_prompt)
        last = event(encode(msgspec.structs.replace(chunk, usage=total))) + last
    yield last


def routes(backend: Backend) -> list[ApiRoute]:
    """The route of plain completions."""

    async def complete(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        plan = plan_of(body)
        if not body.stream:
            return json_response(_reply(body, plan, await gather_all(backend, plan.requests)))
        answers = await begin_all(backend, plan.requests)
        return EventStream(DIALECT, _events(body, plan, answers), streams=answers.streams)

    operation = Operation(
        method="POST",
        path="/v1/completions",
        summary="Go on with a prompt (OpenAI)",
        body=CompletionBody,
        reply=CompletionReply,
        events=CompletionReply,
    )
    return [ApiRoute(operation, endpoint(DIALECT, complete))]
