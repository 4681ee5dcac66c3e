"""What operators ask of nodes and instances over muster's own API: drain, resume, retry."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from muster.api.backend import Backend
from muster.api.bodies import body_of, read_body
from muster.api.errors import ApiError
from muster.api.http import ApiRoute, Operation, endpoint, json_response
from muster.api.own import DIALECT, instance_of, unexpected
from muster.protocol import Drain, Resume, Retry
from muster.replies import Accepted, Noted
from muster.spec import InstanceId, NodeId

T = TypeVar("T")


class DrainBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why the node is to be empty; `now` also ends scripts, and cuts off the requests that models have begun."""

    reason: str = ""
    now: bool = False


class NoBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing: the path says it all."""


class RetryBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`move` also ends an attempt that starts or runs, and places it afresh."""

    move: bool = False


class NodeNoted(msgspec.Struct, frozen=True, kw_only=True):
    """The wish is in the log; `sequence` is that of its event, or the last one where nothing had to change."""

    node: NodeId
    sequence: int


class Retrying(msgspec.Struct, frozen=True, kw_only=True):
    """The instance is tried again; `sequence` is that of the event."""

    instance: InstanceId
    sequence: int


class _Operations:
    """The handlers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def drain(self, request: Request) -> Response:
        body = await read_optional(request, DrainBody)
        return await self._oversee(Drain(node=self._node(request), reason=body.reason, now=body.now))

    async def resume(self, request: Request) -> Response:
        await read_optional(request, NoBody)
        return await self._oversee(Resume(node=self._node(request)))

    async def retry(self, request: Request) -> Response:
        body = await read_optional(request, RetryBody)
        instance = instance_of(self._backend, request)
        match await self._backend.call(Retry(instance=instance.id, move=body.move)):
            case Accepted(sequence=sequence):
                return json_response(Retrying(instance=instance.id, sequence=sequence), 202)
            case reply:
                raise unexpected(reply)

    async def _oversee(self, wish: Drain | Resume) -> Response:
        match await self._backend.call(wish):
            case Noted(node=node, sequence=sequence):
                return json_response(NodeNoted(node=node, sequence=sequence), 202)
            case reply:
                raise unexpected(reply)

    def _node(self, request: Request) -> NodeId:
        known = self._backend.state().nodes
        name = NodeId(request.path_params["node"])
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise ApiError("node-unknown", f"there is no node {name!r}; the nodes are: {there}")
        return name


async def read_optional(request: Request, kind: type[T]) -> T:
    """The body, every field of which may be left out, and so may be the body itself."""
    return await read_body(request, kind) if body_of(request).strip() else kind()


def routes(backend: Backend) -> list[ApiRoute]:
    """The routes."""
    own = _Operations(backend)
    spoken = [
        (
            Operation(
                method="POST",
                path="/api/nodes/{node}/drain",
                summary="Give a node nothing new, and place what it has elsewhere.",
                body=DrainBody,
                body_required=False,
                reply=NodeNoted,
                status=202,
            ),
            own.drain,
        ),
        (
            Operation(
                method="POST",
                path="/api/nodes/{node}/resume",
                summary="Let a node that was drained or set aside take instances again.",
                body=NoBody,
                body_required=False,
                reply=NodeNoted,
                status=202,
            ),
            own.resume,
        ),
        (
            Operation(
                method="POST",
                path="/api/instances/{instance:path}/retry",
                summary="Try a failed instance again, now and with its whole budget; or move one that is up.",
                body=RetryBody,
                body_required=False,
                reply=Retrying,
                status=202,
            ),
            own.retry,
        ),
    ]
    return [ApiRoute(operation, endpoint(DIALECT, handler, mutates=True)) for operation, handler in spoken]
