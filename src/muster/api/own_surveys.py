"""What is known of nodes, links and models over muster's own API, and where an instance would go."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from muster.api.backend import Backend
from muster.api.errors import invalid
from muster.api.http import ApiRoute, Operation, Parameter, endpoint, json_response
from muster.api.own import DIALECT, SpecBody, read_spec, unexpected
from muster.api.own_operations import NoBody, read_optional
from muster.facts import NodeFacts
from muster.links import NodeLinks
from muster.protocol import Get, Inspect, Measure, Preview
from muster.replies import Measuring, Needs, Previewed, Snapshot


class FactsList(msgspec.Struct, frozen=True, kw_only=True):
    """What every node tells of its machine, by name."""

    facts: tuple[NodeFacts, ...]


class LinksList(msgspec.Struct, frozen=True, kw_only=True):
    """What every node measured, by name. `round` is the highest measuring round that was asked for."""

    links: tuple[NodeLinks, ...]
    round: int


class _Surveys:
    """The handlers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def facts(self, request: Request) -> Response:
        del request
        return json_response(FactsList(facts=(await self._snapshot(links=False)).facts))

    async def links(self, request: Request) -> Response:
        del request
        snapshot = await self._snapshot(links=True)
        return json_response(LinksList(links=snapshot.links, round=snapshot.measure_round))

    async def measure(self, request: Request) -> Response:
        await read_optional(request, NoBody)
        match await self._backend.call(Measure()):
            case Measuring() as measuring:
                return json_response(measuring, 202)
            case reply:
                raise unexpected(reply)

    async def needs(self, request: Request) -> Response:
        model = request.query_params.get("model", "")
        if not model.strip():
            raise invalid("model is missing; give a directory on the nodes, or a hub id", "model")
        match await self._backend.call(Inspect(model=model, revision=request.query_params.get("revision", ""))):
            case Needs() as needs:
                return json_response(needs)
            case reply:
                raise unexpected(reply)

    async def place(self, request: Request) -> Response:
        body = await read_spec(request, SpecBody)
        match await self._backend.call(Preview(spec=body.spec())):
            case Previewed() as previewed:
                return json_response(previewed)
            case reply:
                raise unexpected(reply)

    async def _snapshot(self, *, links: bool) -> Snapshot:
        match await self._backend.call(Get(links=links)):
            case Snapshot() as snapshot:
                return snapshot
            case reply:
                raise unexpected(reply)


def routes(backend: Backend) -> list[ApiRoute]:
    """The routes."""
    own = _Surveys(backend)
    which = (
        Parameter(name="model", summary="A directory on the nodes, or a hub id."),
        Parameter(name="revision", summary="Of a hub id; absent: its main branch."),
    )
    spoken = [
        (
            Operation(method="GET", path="/api/facts", summary="What nodes tell of themselves.", reply=FactsList),
            own.facts,
        ),
        (Operation(method="GET", path="/api/links", summary="What nodes measured.", reply=LinksList), own.links),
        (
            Operation(
                method="POST",
                path="/api/links/measure",
                summary="Measure all links again.",
                body=NoBody,
                body_required=False,
                reply=Measuring,
                status=202,
            ),
            own.measure,
        ),
        (
            Operation(
                method="GET",
                path="/api/needs",
                summary="What a model needs, read off its config and headers.",
                reply=Needs,
                parameters=which,
            ),
            own.needs,
        ),
        (
            Operation(
                method="POST",
                path="/api/place",
                summary="Where an instance would go, and what else would do; nothing is created.",
                body=SpecBody,
                reply=Previewed,
            ),
            own.place,
        ),
    ]
    return [
        ApiRoute(operation, endpoint(DIALECT, handler, mutates=operation.method != "GET"))
        for operation, handler in spoken
    ]
