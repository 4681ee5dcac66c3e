"""What the HTTP API is told: models, events without a gap, and whether a model decodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from books import Books
from books import create as enter
from fleet import DONE, Asked, Fleet

from muster.coordinator import calls as calls_module
from muster.coordinator import door as door_module
from muster.coordinator.calls import Calls
from muster.coordinator.comparing import Clocks
from muster.coordinator.door import Door
from muster.coordinator.gateway import Gateway
from muster.coordinator.knowledge import Knowledge
from muster.coordinator.outputs import OutputStore
from muster.coordinator.served import Readiness
from muster.events import Envelope, InstanceReady, NodeJoined, NodeLost, decode_event
from muster.links import NodeLinks
from muster.placement import Placement, Refusal, decide
from muster.protocol import Create, Delete, Generate, Get, Output, Query, ReadOutput
from muster.replies import AnyReply, Chunk, Created, Found, Outputs, Refused, Snapshot
from muster.spec import BootId, Failure, GroupWorkload, InstanceId, InstanceSpec, NodeId

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Desk:
    """A door on books in memory, with a dispatcher whose runners the test plays."""

    def __init__(self) -> None:
        self.books = Books("a", "b")
        self.fleet = Fleet()
        self.fleet.now = time.monotonic()
        self.gateway = Gateway("127.0.0.1")
        self.gateway.dispatcher = self.fleet.dispatcher
        self.outputs = OutputStore()
        self.woken = 0
        self.knowledge = Knowledge()
        ledger = self.books.ledger
        self.calls = Calls(self.books.log, ledger, self.outputs, self.knowledge, self.wake, Clocks(), {}, self.wake)
        self.door = Door(self.books.log, ledger, self.gateway, self.calls)
        ledger.on_event = lambda envelope, event: self.door.note_logged()

    def wake(self) -> None:
        self.woken += 1

    def probed(self) -> Asked:
        """The request that a probe made, as the fleet's own."""
        (request,) = [item for item in self.fleet.dispatcher.open_requests() if item.generate.prompt == (0,)]
        asked = Asked("m")
        asked.request = request
        self.fleet.now = time.monotonic()
        return asked


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- models ---------------------------------------------------------------------------------------------------


async def test_models_are_listed_with_their_instances_and_requests(desk: Desk) -> None:
    desk.fleet.ready("one", max_batch=1)
    desk.fleet.starting("two")
    desk.fleet.starting("three", served="n")
    desk.fleet.broken("four", served="dead", retries=False)
    for _ in range(11):
        desk.fleet.ask("one")
    first, second = desk.door.models()
    assert (first.name, first.instances, first.ready) == ("m", ("one", "two"), 1)
    assert (first.running_requests, first.waiting_requests) == (9, 2)
    assert (second.name, second.ready, second.running_requests) == ("n", 0, 0)


async def test_a_stream_of_the_door_ends_with_its_refusal(desk: Desk) -> None:
    pieces = [piece async for piece in desk.door.generate(Generate(instance="x", prompt="hi"))]
    assert [type(piece) for piece in pieces] == [Refused]


# --- calls ----------------------------------------------------------------------------------------------------


async def test_calls_are_answered_as_on_the_control_socket(desk: Desk) -> None:
    created = await desk.door.call(Create(spec=InstanceSpec(workload=GroupWorkload(), ranks=2)))
    assert isinstance(created, Created)
    assert created.instance in desk.door.state().instances
    assert not isinstance(await desk.door.call(Delete(instance=created.instance)), Refused)
    assert desk.woken == 2
    assert isinstance(await desk.door.call(Get()), Snapshot)
    found = await desk.door.call(Query(kinds=("instance.",)))
    assert isinstance(found, Found)
    assert len(found.envelopes) == 2
    assert isinstance(await desk.door.call(ReadOutput(instance="nobody")), Refused)
    desk.books.log.full = True
    refused = await desk.door.call(Create(spec=InstanceSpec(workload=GroupWorkload(), ranks=2)))
    assert isinstance(refused, Refused)
    assert refused.failure.kind == "log-unavailable"


async def test_links_are_left_out_where_nobody_wants_them(desk: Desk) -> None:
    links = NodeLinks(node=NodeId("a"), boot=BootId("boot-1"), n=1)
    desk.knowledge.tell_links(links, desk.door.state())
    for request, expected in ((Get(), (links,)), (msgspec.msgpack.decode(b"\x81\xa4type\xa3get", type=Get), (links,))):
        assert isinstance(found := await desk.door.call(request), Snapshot)
        assert found.links == expected
    assert isinstance(found := await desk.door.call(Get(links=False)), Snapshot)
    assert found.links == ()


class SlowSearch:
    """In the place of `decide`: goes on once the test says so, and the first time changes the cluster meanwhile."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        self.advised: list[bool] = []
        self.threads: list[threading.Thread] = []
        self._meanwhile = meanwhile

    def __call__(self, *given: Any, advise: bool = True, **more: Any) -> Placement | Refusal:
        self.advised.append(advise)
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.free.wait(10), "the loop stood still"
        if len(self.advised) == 1:
            self._meanwhile()
        return decide(*given, advise=advise, **more)


async def created_slowly(desk: Desk, monkeypatch: pytest.MonkeyPatch, search: SlowSearch, create: Create) -> AnyReply:
    """The answer, while the loop goes on."""
    monkeypatch.setattr(calls_module, "decide", search)
    replies: list[AnyReply] = []

    async def ask() -> None:
        replies.append(await desk.door.call(create))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.to_thread.run_sync(search.begun.wait, 10)
        assert isinstance(await desk.door.call(Get()), Snapshot)
        assert replies == []
        search.free.set()
    return replies[0]


async def test_an_instance_is_placed_beside_the_loop(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = NodeLost(node=NodeId("b"), boot=BootId("boot-1"), reason="its worker ended")
    search = SlowSearch(lambda: desk.books.ledger.commit(gone))
    spec = InstanceSpec(workload=GroupWorkload(), ranks=2)
    created = await created_slowly(desk, monkeypatch, search, Create(spec=spec))
    assert isinstance(created, Created)
    assert search.advised == [False, False], "what was found for a cluster that is no more is found again"
    assert {rank.node for rank in desk.door.state().instances[created.instance].ranks} == {"a"}


async def test_a_refusal_is_advised_beside_the_loop(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    search = SlowSearch()
    spec = InstanceSpec(workload=GroupWorkload(), ranks=99)
    refused = await created_slowly(desk, monkeypatch, search, Create(spec=spec))
    assert isinstance(refused, Refused)
    assert refused.failure.kind == "placement-refused"
    assert search.advised == [False, True]
    assert threading.main_thread() not in search.threads


async def test_where_room_appears_while_a_refusal_is_advised_it_is_taken(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def search(*given: Any, advise: bool, **more: Any) -> Placement | Refusal:
        asked.append(advise)
        return decide(*given, advise=advise, **more) if len(asked) > 1 else Refusal(message="no room")

    monkeypatch.setattr(calls_module, "decide", search)
    spec = InstanceSpec(workload=GroupWorkload(), ranks=2)
    assert isinstance(await desk.door.call(Create(spec=spec)), Created)
    assert asked == [False, True, False], "it is looked for once more, in turn"


async def test_what_was_created_under_the_key_meanwhile_is_the_answer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Create(spec=InstanceSpec(workload=GroupWorkload(), ranks=2), key="k")
    search = SlowSearch(lambda: enter(desk.books.ledger, create))
    created = await created_slowly(desk, monkeypatch, search, create)
    assert isinstance(created, Created)
    assert list(desk.door.state().instances) == [created.instance]


async def test_reading_output_may_wait_for_it(desk: Desk) -> None:
    created = await desk.door.call(Create(spec=InstanceSpec(workload=GroupWorkload(), ranks=2)))
    assert isinstance(created, Created)
    replies: list[object] = []

    async def read() -> None:
        replies.append(await desk.door.call(ReadOutput(instance=created.instance, wait_seconds=10)))

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert replies == []
        line = Output(
            node=NodeId("a"),
            boot=BootId("boot-1"),
            n=1,
            instance=created.instance,
            attempt=1,
            rank=0,
            lines=("hello",),
        )
        desk.outputs.add(line)
    (reply,) = replies
    assert isinstance(reply, Outputs)
    assert [item.text for item in reply.lines] == ["hello"]


# --- events ---------------------------------------------------------------------------------------------------


async def follow(door: Door, after: int, seen: list[Envelope]) -> None:
    async for envelope in door.follow(after):
        seen.append(envelope)


async def test_a_follower_sees_the_past_and_then_each_event_once(desk: Desk) -> None:
    seen: list[Envelope] = []
    late: list[Envelope] = []
    async with anyio.create_task_group() as group:
        group.start_soon(follow, desk.door, 0, seen)
        await anyio.wait_all_tasks_blocked()
        assert [envelope.sequence for envelope in seen] == [1, 2]
        group.start_soon(follow, desk.door, 1, late)
        for number in range(1500):  # more than is read at a time, while nobody reads
            desk.books.ledger.commit(InstanceReady(instance=InstanceId("x"), attempt=number))
        await anyio.wait_all_tasks_blocked()
        desk.books.ledger.commit(NodeLost(node=NodeId("a"), boot=BootId("boot-1"), reason="left"))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert [envelope.sequence for envelope in seen] == list(range(1, 1504))
    assert [envelope.sequence for envelope in late] == list(range(2, 1504))
    assert isinstance(decode_event(seen[0].body), NodeJoined)
    assert isinstance(decode_event(seen[-1].body), NodeLost)


# --- readiness ------------------------------------------------------------------------------------------------


def nothing(fleet: Fleet) -> None:
    del fleet


def one_that_starts(fleet: Fleet) -> None:
    fleet.starting("one")


def one_that_failed(fleet: Fleet) -> None:
    fleet.broken("one", retries=False)


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (nothing, "the models are: none"),
        (one_that_starts, "no instance is ready yet"),
        (one_that_failed, "SIGKILL"),
    ],
)
async def test_what_is_not_up_is_not_ready_and_says_why(desk: Desk, put: Callable[[Fleet], None], reason: str) -> None:
    put(desk.fleet)
    found = await desk.door.probe("m")
    assert not found.ready
    assert reason in found.reason


async def test_answers_that_get_tokens_are_proof_enough(desk: Desk) -> None:
    desk.fleet.ready("one")
    asked = desk.fleet.ask()
    desk.fleet.now = time.monotonic()
    desk.fleet.token(asked)
    found = await desk.door.probe("m")
    assert found.ready
    assert found.seconds_since_token is not None
    assert found.seconds_since_token < 5
    assert len(desk.fleet.sent) == 1


async def test_an_idle_model_is_asked_for_one_token_by_all_who_ask(desk: Desk) -> None:
    desk.fleet.ready("one")
    found: list[Readiness] = []

    async def probe() -> None:
        found.append(await desk.door.probe("m"))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(probe)
        await anyio.wait_all_tasks_blocked()
        probed = desk.probed()
        assert probed.request is not None
        assert probed.request.generate.sampling.max_tokens == 1
        desk.fleet.say(probed, Chunk(text="x", tokens=(1,)), DONE)
    assert [item.ready for item in found] == [True] * 3
    assert (await desk.door.probe("m")).ready
    assert len(desk.fleet.sent) == 1


async def test_a_probe_that_nobody_answers_says_so_and_is_made_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.fleet.ready("one")
    found: list[Readiness] = []

    async def probe() -> None:
        found.append(await desk.door.probe("m"))

    async with anyio.create_task_group() as group:
        group.start_soon(probe)
        await anyio.wait_all_tasks_blocked()
        desk.fleet.pass_time(5.1)
    assert not found[0].ready
    assert "no token came from one within 5 s" in found[0].reason
    monkeypatch.setattr(door_module, "_PROBE_LASTS_SECONDS", 0.0)
    async with anyio.create_task_group() as group:
        group.start_soon(probe)
        await anyio.wait_all_tasks_blocked()
        desk.fleet.say(desk.probed(), Refused(failure=Failure(kind="internal", message="broken")))
    assert "broken" in found[1].reason
    assert len(desk.fleet.sent) == 2
