"""Muster's own API: instances, nodes, models, the state and the events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from muster.api.backend import Backend, ServedModel
from muster.api.bodies import body_of, read_body
from muster.api.errors import ApiError, invalid, of_failure
from muster.api.http import ApiRoute, EventStream, Operation, Parameter, endpoint, event, json_response
from muster.api.own_errors import OwnDialect
from muster.coordinator.find import find
from muster.errors import RequestError
from muster.events import Envelope, Event, Unknown, kind_of
from muster.protocol import Beat, Create, Delete, Get
from muster.replies import Accepted, Created, NodeClock, Refused, Snapshot
from muster.spec import InstanceId, InstanceSpec, NodeId
from muster.state import Instance, Node, State

DIALECT = OwnDialect()
#: A comment after so long without an event: proxies and clients drop a connection that says nothing for a minute.
IDLE_SECONDS = 15.0

_encode = msgspec.json.Encoder().encode


class SpecBody(InstanceSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body that is the spec of an instance."""

    def spec(self) -> InstanceSpec:
        """The spec alone."""
        return InstanceSpec(**{name: getattr(self, name) for name in InstanceSpec.__struct_fields__})


class CreateBody(SpecBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /api/instances`: a spec, and a key of the client's: the same key again gives the same instance."""

    key: str = ""


SomeSpecBody = TypeVar("SomeSpecBody", bound=SpecBody)


class InstanceList(msgspec.Struct, frozen=True, kw_only=True):
    """Every instance, the oldest first."""

    instances: tuple[Instance, ...]


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """The instance is being deleted; `sequence` is that of the event."""

    instance: InstanceId
    sequence: int


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node, what its last heartbeat said, and how its clock compares with the coordinator's.

    `beat` is null while the node is not there, and `clock` while nothing is known of it.
    """

    node: Node
    beat: Beat | None
    clock: NodeClock | None


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """Every node, by name."""

    nodes: tuple[NodeView, ...]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Every model, by name."""

    models: tuple[ServedModel, ...]


class StateView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the cluster up to its `sequence`, and what is not logged. Sizes are the coordinator's own.

    `fenced` counts the messages that came too late to matter, by what they were too old in.
    """

    state: State
    beats: tuple[Beat, ...]
    memory_bytes: int
    log_bytes: int
    clocks: tuple[NodeClock, ...]
    fenced: dict[str, int]


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """A logged event. `kind` is its tag; of a kind that this version does not know, `event` is null."""

    sequence: int
    time_ns: int
    origin: NodeId
    cause: int
    kind: str
    event: Event | None


class _Own:
    """The handlers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def list_instances(self, request: Request) -> Response:
        del request
        found = sorted(self._backend.state().instances.values(), key=lambda instance: instance.created_by)
        return json_response(InstanceList(instances=tuple(found)))

    async def create_instance(self, request: Request) -> Response:
        body = await read_spec(request, CreateBody)
        match await self._backend.call(Create(spec=body.spec(), key=body.key)):
            case Created(instance=instance) if instance in self._backend.state().instances:
                return json_response(self._backend.state().instances[instance], 201)
            case reply:
                raise unexpected(reply)

    async def show_instance(self, request: Request) -> Response:
        return json_response(instance_of(self._backend, request))

    async def delete_instance(self, request: Request) -> Response:
        now = _flag(request, "now")
        instance = instance_of(self._backend, request)
        match await self._backend.call(Delete(instance=instance.id, now=now)):
            case Accepted(sequence=sequence):
                return json_response(Deletion(instance=instance.id, sequence=sequence), 202)
            case reply:
                raise unexpected(reply)

    async def list_nodes(self, request: Request) -> Response:
        del request
        snapshot = await self._snapshot()
        beats = {beat.node: beat for beat in snapshot.beats}
        clocks = {clock.node: clock for clock in snapshot.clocks}
        views = [
            NodeView(node=node, beat=beats.get(name), clock=clocks.get(name))
            if node.lost is None
            else NodeView(node=node, beat=None, clock=None)
            for name, node in sorted(self._backend.state().nodes.items())
        ]
        return json_response(NodeList(nodes=tuple(views)))

    async def list_models(self, request: Request) -> Response:
        del request
        return json_response(ModelList(models=tuple(sorted(self._backend.models(), key=lambda model: model.name))))

    async def show_state(self, request: Request) -> Response:
        del request
        snapshot = await self._snapshot()
        return json_response(
            StateView(
                state=self._backend.state(),
                beats=snapshot.beats,
                memory_bytes=snapshot.memory_bytes,
                log_bytes=snapshot.log_bytes,
                clocks=snapshot.clocks,
                fenced=snapshot.fenced,
            )
        )

    async def events(self, request: Request) -> Response:
        for name in request.query_params:
            if name not in {"after", "instance"}:
                raise invalid(f"{name} is not a parameter that is known here; there are after and instance", name)
        after = _sequence(request)
        state = self._backend.state()
        wanted = request.query_params.get("instance")
        if wanted is not None and wanted not in state.instances:
            named = [instance.id for instance in state.instances.values() if instance.spec.name == wanted]
            # One that is gone is known by its id alone.
            wanted = named[0] if named else wanted
        body = self._follow(state.sequence if after is None else after, wanted)
        return EventStream(DIALECT, body, idle_seconds=IDLE_SECONDS)

    async def _follow(self, after: int, instance: str | None) -> AsyncGenerator[bytes]:
        # Sent at once, so that the client knows that it missed nothing from here on.
        yield b": after %d\n\n" % after
        async for envelope in self._backend.follow(after):
            found = envelope.event()
            if instance is None or getattr(found, "instance", None) == instance:
                yield event(_encode(_view(envelope, found)), identity=str(envelope.sequence))

    async def _snapshot(self) -> Snapshot:
        reply = await self._backend.call(Get())
        if isinstance(reply, Snapshot):
            return reply
        raise unexpected(reply)


def _view(envelope: Envelope, found: Event | Unknown) -> EventView:
    return EventView(
        sequence=envelope.sequence,
        time_ns=envelope.time_ns,
        origin=envelope.origin,
        cause=envelope.cause,
        kind=kind_of(found),
        event=None if isinstance(found, Unknown) else found,
    )


def instance_of(backend: Backend, request: Request) -> Instance:
    """The instance that a path names, by id or name.

    Raises:
        ApiError: 404, there is none, or more than one.
    """
    try:
        return find(backend.state(), request.path_params["instance"])
    except RequestError as error:
        raise ApiError("instance-unknown", error.message) from error


def unexpected(reply: object) -> ApiError:
    """The error for a reply of the coordinator that is not what was asked for."""
    if isinstance(reply, Refused):
        return of_failure(reply.failure, reply.shortfalls)
    return ApiError("internal", f"the coordinator answered with {type(reply).__name__}")


async def read_spec(request: Request, kind: type[SomeSpecBody]) -> SomeSpecBody:
    """The body of a request, in which every field is one that is known here.

    Raises:
        ApiError: 400, it is no such body; the message names the field.
    """
    body = await read_body(request, kind)
    _refuse_unknown(msgspec.json.decode(body_of(request)), msgspec.to_builtins(body), "")
    return body


def _refuse_unknown(given: object, understood: object, path: str) -> None:
    """Refuse a field that was given and not understood: the Structs of a spec skip those of newer versions."""
    if isinstance(given, dict) and isinstance(understood, dict):
        known = cast("dict[str, Any]", understood)
        for name, value in cast("dict[str, Any]", given).items():
            place = f"{path}.{name}" if path else name
            if name not in known:
                raise invalid(f"{place} is not a field that is known here", place)
            _refuse_unknown(value, known[name], place)
    elif isinstance(given, list) and isinstance(understood, list | tuple):
        for number, (one, other) in enumerate(
            zip(cast("list[object]", given), cast("list[object]", understood), strict=False)
        ):
            _refuse_unknown(one, other, f"{path}[{number}]")


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text in {"", "1", "true", "yes"}:
        return True
    if text in {"0", "false", "no"}:
        return False
    raise invalid(f"{name} is {text!r}; it must be true or false", name)


def _sequence(request: Request) -> int | None:
    """Where a reader of events stopped. A browser that connects again says it in a header, which is newer."""
    text = request.headers.get("last-event-id") or request.query_params.get("after")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise invalid(f"after is {text!r}; it must be the sequence of an event, 0 or more", "after")
    return int(text)


def routes(backend: Backend) -> list[ApiRoute]:
    """The routes."""
    own = _Own(backend)
    one = "/api/instances/{instance:path}"
    now = Parameter(name="now", summary="Cut off the requests under way instead of finishing them.", kind=bool)
    resume = (
        Parameter(name="after", summary="The sequence of the last event that was read. Absent: from now on.", kind=int),
        Parameter(name="instance", summary="Only events of this instance, by id or name."),
        Parameter(name="Last-Event-ID", summary="As after; browsers send it.", kind=int, place="header"),
    )
    spoken = [
        (
            Operation(method="GET", path="/api/instances", summary="Every instance.", reply=InstanceList),
            own.list_instances,
        ),
        (
            Operation(
                method="POST",
                path="/api/instances",
                summary="Create an instance: a model to serve, or a script to run.",
                body=CreateBody,
                reply=Instance,
                status=201,
            ),
            own.create_instance,
        ),
        (
            Operation(method="GET", path=one, summary="One instance, by id or name.", reply=Instance),
            own.show_instance,
        ),
        (
            Operation(
                method="DELETE",
                path=one,
                summary="Delete an instance.",
                reply=Deletion,
                status=202,
                parameters=(now,),
            ),
            own.delete_instance,
        ),
        (Operation(method="GET", path="/api/nodes", summary="Every node.", reply=NodeList), own.list_nodes),
        (Operation(method="GET", path="/api/models", summary="Every model.", reply=ModelList), own.list_models),
        (Operation(method="GET", path="/api/state", summary="The whole state.", reply=StateView), own.show_state),
        (
            Operation(
                method="GET",
                path="/api/events",
                summary="Events as they are logged; the id of each is its sequence.",
                events=EventView,
                parameters=resume,
            ),
            own.events,
        ),
    ]
    return [
        ApiRoute(operation, endpoint(DIALECT, handler, mutates=operation.method != "GET"))
        for operation, handler in spoken
    ]
