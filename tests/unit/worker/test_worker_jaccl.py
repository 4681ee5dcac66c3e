"""A worker's part in a jaccl group: rank 0's port, the payloads, and exchanges that survive a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import anyio
import msgspec
import pytest

from muster.bus import ControlClient
from muster.errors import PayloadError, UnreachableError
from muster.layout import Layout, RankLayout
from muster.protocol import Gather
from muster.rank_protocol import GatheredFrame, GatherFrame
from muster.replies import AnyReply, Gathered, Refused
from muster.spec import (
    Address,
    Assignment,
    BootId,
    Deadlines,
    Failure,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    NodeAddress,
    NodeId,
    NodeInfo,
)
from muster.state import Instance, Prepared, Rank, Starting
from muster.worker import jaccl
from muster.worker.process import RunnerProcess
from muster.worker.watch import Place

MESH = ((None, "rdma_en2", "rdma_en3"), ("rdma_en2", None, "rdma_en3"), ("rdma_en2", "rdma_en3", None))
INFO = NodeInfo(
    node=NodeId("a"),
    boot=BootId("boot"),
    hostname="host",
    machine="a",
    pid=1,
    addresses=(NodeAddress(host="10.0.0.1", network="10.0.0.0/24"),),
    candidates=(NodeAddress(host="192.168.1.1", network="192.168.1.0/24"),),
    backends=("jaccl",),
    memory_bytes=1,
    max_ranks=1,
)


def place(rank: int, layout: Layout | None = None, **spec: object) -> Place:
    found = layout if layout is not None else Layout(devices=MESH)
    options = msgspec.structs.replace(InstanceSpec(workload=GroupWorkload(), ranks=3), **spec)
    assignment = Assignment(rank=rank, node=NodeId("a"), boot=BootId("boot"))
    instance = Instance(
        id=InstanceId("one"),
        spec=options,
        created_ns=0,
        attempt=1,
        backend="jaccl",
        status=Starting(),
        since_ns=0,
        ranks=ranks(),
        created_by=1,
        caused_by=1,
        layout=found,
    )
    return Place(instance, assignment)


def ranks(lead: tuple[Address, ...] = (Address("10.0.0.1", 5000, "10.0.0.0/24"),)) -> tuple[Rank, ...]:
    return tuple(
        Rank(
            rank=number,
            node=NodeId("abc"[number]),
            boot=BootId("boot"),
            state=Prepared(),
            since_ns=0,
            addresses=() if number else lead,
        )
        for number in range(3)
    )


def told(*hosts: str) -> Layout:
    return Layout(devices=MESH, ranks=tuple(RankLayout(coordinator=host) for host in hosts))


def test_only_rank_0_has_a_port_and_with_the_bus_nobody() -> None:
    assert jaccl.endpoints(place(0), INFO) == INFO.addresses
    assert jaccl.endpoints(place(1), INFO) == ()
    assert jaccl.endpoints(place(0, side_channel="bus"), INFO) == ()
    assert jaccl.endpoints(place(0, told(*["192.168.1.1"] * 3)), INFO) == INFO.candidates
    every = NodeAddress(host="0.0.0.0", network="0.0.0.0/0")
    assert jaccl.endpoints(place(0, told("0.0.0.0", "10.0.0.1", "192.168.1.1")), INFO) == (every,)
    own = NodeAddress(host="172.16.0.9", network="172.16.0.9/32")
    assert jaccl.endpoints(place(0, told(*["10.0.0.1"] * 3), addresses=(("172.16.0.9",), (), ())), INFO) == (own,)


def coordinators(layout: Layout, lead: str, **spec: object) -> list[str]:
    address = Address(lead, 5000, "10.0.0.0/24")
    return [jaccl.payload(place(rank, layout, **spec), ranks((address,))).coordinator for rank in range(3)]


def test_each_rank_dials_its_own_way_to_rank_0() -> None:
    two_ways = told("0.0.0.0", "10.0.0.1", "192.168.1.1")
    assert coordinators(two_ways, "0.0.0.0") == ["0.0.0.0:5000", "10.0.0.1:5000", "192.168.1.1:5000"]
    assert coordinators(Layout(devices=MESH), "10.0.0.1") == ["10.0.0.1:5000"] * 3
    own = (("172.16.0.9",), (), ())
    assert coordinators(two_ways, "172.16.0.9", addresses=own) == ["172.16.0.9:5000"] * 3
    assert coordinators(told(*[""] * 3), "10.0.0.1", side_channel="bus") == [""] * 3


def test_an_attempt_without_a_matrix_is_refused() -> None:
    with pytest.raises(PayloadError, match="device matrix of 0 rows for 3 ranks"):
        jaccl.payload(place(0, Layout()), ranks())
    assert jaccl.payload(place(0, Layout(), devices=MESH), ranks()).devices == MESH


# --- exchanges --------------------------------------------------------------------------------------------------


class Peer:
    """A coordinator that answers as the test says, and the runner that hears the result."""

    def __init__(self, *answers: AnyReply | None) -> None:
        self.answers = list(answers)
        self.asked: list[Gather] = []
        self.reminded: list[Gather] = []
        self.heard: list[GatheredFrame] = []

    async def call(self, request: Gather, *, timeout_seconds: float) -> AnyReply:
        self.asked.append(request)
        answer = self.answers.pop(0) if self.answers else None
        if answer is None:
            await anyio.sleep(min(timeout_seconds, 0.01))
            raise UnreachableError("silent")
        return answer

    def send(self, request: Gather | GatheredFrame) -> None:
        assert isinstance(request, Gather)
        self.reminded.append(request)

    @property
    def runner(self) -> RunnerProcess:
        peer = self

        class Runner:
            async def send(self, frame: GatheredFrame) -> None:
                peer.heard.append(frame)

        return cast(RunnerProcess, Runner())


PARTS = Gathered(parts=(b"0", b"1", b"2"))


def carry(peer: Peer, *rounds: int, form_seconds: float = 5.0) -> None:
    async def run() -> None:
        relay = jaccl.Relay(place(1, deadlines=Deadlines(form_seconds=form_seconds)), cast(ControlClient, peer))
        relay.due = anyio.current_time() + form_seconds
        for number in rounds:
            await relay.carry(GatherFrame(round=number, data=b"1"), peer.runner)

    anyio.run(run)


def test_an_exchange_is_asked_for_again_where_the_coordinator_is_silent() -> None:
    peer = Peer(None, None, PARTS)
    carry(peer, 0)
    assert [frame.parts for frame in peer.heard] == [PARTS.parts]
    assert [(one.round, one.rank, one.data) for one in peer.asked] == [(0, 1, b"1")] * 3
    assert peer.reminded == []
    assert peer.asked[0].seconds > peer.asked[2].seconds, "the deadline is that of the first asking"


def test_a_new_coordinator_is_reminded_of_the_exchange_before() -> None:
    peer = Peer(PARTS, None, PARTS)
    carry(peer, 0, 1)
    assert [one.round for one in peer.reminded] == [0]
    assert len(peer.heard) == 2


def test_a_fenced_coordinator_is_no_answer() -> None:
    peer = Peer(Refused(failure=Failure(kind="fenced", message="another leads")), PARTS)
    carry(peer, 0, form_seconds=0.5)
    assert [frame.failure for frame in peer.heard] == [None]


def silent(peer: Peer) -> Failure | None:
    return peer.heard[0].failure


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (lambda: Peer(Refused(failure=Failure(kind="formation-timeout", message="rank 2 is missing"))), "rank 2 is"),
        (Peer, "the coordinator did not pass on the ranks' connection data in time"),
    ],
)
def test_the_runner_always_hears_something(peer: Callable[[], Peer], message: str) -> None:
    made = peer()
    carry(made, 0, form_seconds=0.2)
    failure = silent(made)
    assert failure is not None
    assert message in failure.message


# --- not formed in time -----------------------------------------------------------------------------------------


def test_the_rank_that_never_came_to_the_exchange_says_so_itself() -> None:
    failure = jaccl.not_formed(place(1, side_channel="bus"), ranks(), 15.0, None, came=False)
    assert not failure.secondary
    assert "never sent its connection data" in failure.message


@pytest.mark.parametrize(
    ("side", "way"), [("tcp", "rank 0 on node a at port 5000 of 10.0.0.1"), ("bus", "the bus, or for RDMA")]
)
def test_the_others_say_whom_they_wait_for_and_over_which_way(side: str, way: str) -> None:
    failure = jaccl.not_formed(place(1, side_channel=side), ranks(), 15.0, None)
    assert failure.secondary
    assert "this rank waits for rank 0 on node a, rank 2 on node c" in failure.message
    assert way in failure.message


def test_a_crash_inside_jaccl_is_told_apart_from_other_ends() -> None:
    crash = Failure(kind="rank-killed", message="the runner was ended by SIGSEGV", exit_code=-11)
    assert "the cable was unplugged" in jaccl.crashed(crash).message
    killed = Failure(kind="rank-killed", message="the runner was ended by SIGKILL", exit_code=-9)
    assert jaccl.crashed(killed) == killed
    assert jaccl.crashed(Failure(kind="rank-exited", message="it ended")).message == "it ended"
