"""`POST /v1/responses`: OpenAI's newer endpoint, without anything kept between requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from muster.api.backend import Backend
from muster.api.bodies import read_body
from muster.api.calling import choose, choosing
from muster.api.errors import in_words_of
from muster.api.http import ApiRoute, EventStream, Operation, endpoint, json_response
from muster.api.openai_answers import begin_all, gather_all
from muster.api.openai_responses_bodies import ResponseBody, plan_of
from muster.api.openai_responses_shape import ResponseReply, begun, ended, output_of
from muster.api.openai_responses_stream import ResponseEvent, ResponseWriter, events
from muster.api.openai_shape import DIALECT


def routes(backend: Backend) -> list[ApiRoute]:
    """The route of responses."""

    async def respond(request: Request) -> Response:
        body = await read_body(request, ResponseBody)
        plan = plan_of(body)
        with in_words_of(plan.names):
            if not body.stream:
                (whole,) = await gather_all(backend, (plan.request,))
                answer = choose(whole) if plan.any_call else whole
                return json_response(ended(begun(body, plan), output_of(plan, answer), answer.done))
            answers = await begin_all(backend, (plan.request,))
        writer = ResponseWriter(begun(body, plan), plan)
        pieces = choosing(answers) if plan.any_call else answers
        return EventStream(writer, events(writer, pieces), streams=answers.streams)

    operation = Operation(
        method="POST",
        path="/v1/responses",
        summary="Answer a conversation (OpenAI)",
        body=ResponseBody,
        reply=ResponseReply,
        events=ResponseEvent,
    )
    return [ApiRoute(operation, endpoint(DIALECT, respond))]
