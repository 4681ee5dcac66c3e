"""A coordinator whose log lacks what another had acknowledged gets it again: each report once, and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.bus import Deduplicator, Outbox, Verdict
from muster.events import NodeLost, ReportId
from muster.protocol import Output, Report
from muster.replies import Acked, Answer, Refused
from muster.spec import BootId, Failure, InstanceId, NodeId, NodeInfo
from muster.state import Node, State

NODE, BOOT = NodeId("a"), BootId("boot-1")
INFO = NodeInfo(
    node=NODE,
    boot=BOOT,
    hostname="a",
    machine="m",
    pid=1,
    addresses=(),
    backends=(),
    memory_bytes=0,
    max_ranks=1,
)
STRANGER = Refused(failure=Failure(kind="node-unknown", message="say hello", retryable=True))


class Coordinator:
    """What a coordinator does with reports; it logs all but every fifth, which comes too late to matter."""

    def __init__(self, boot: str, log: list[Report], epoch: str = "e") -> None:
        self.log = list(log)
        self.state = State(
            epoch=epoch, coordinator_boot=boot, nodes={NODE: Node(info=INFO, since_ns=0)}, sequence=len(log)
        )
        self._seen = Deduplicator()
        self._note()

    def _note(self) -> None:
        reports = {NODE: ReportId(node=NODE, boot=BOOT, n=self.log[-1].n)} if self.log else {}
        self.state = msgspec.structs.replace(self.state, reports=reports)

    def take(self, message: Report | Output) -> Acked | Refused | None:
        verdict = self._seen.judge(message, self.state)
        if verdict is Verdict.STRANGER:
            return STRANGER
        if verdict is Verdict.MISSING:
            return None
        if verdict is Verdict.APPLY:
            if isinstance(message, Report) and not is_stale(message.n):
                self.log.append(message)
                self._note()
            self._seen.applied(message)
        return Acked(n=max(self._seen.acknowledged(NODE, BOOT, self.state), message.n))


def is_stale(n: int) -> bool:
    return n % 5 == 0


class Wire:
    """Stands for the control client: what was sent waits to be delivered, or is lost."""

    def __init__(self) -> None:
        self.coordinator = Coordinator("c0", [])
        self.waiting: list[tuple[int, Report | Output]] = []
        self._callbacks: dict[int, Callable[[Answer], None]] = {}
        self._calls = 0

    async def submit(self, request: Report | Output, on_answer: Callable[[Answer], None]) -> int:
        await anyio.lowlevel.checkpoint()
        self._calls += 1
        self._callbacks[self._calls] = on_answer
        self.waiting.append((self._calls, request))
        return self._calls

    def forget(self, call: int) -> None:
        self._callbacks.pop(call, None)

    def deliver(self, count: int, *, answered: bool = True) -> None:
        sent, self.waiting = self.waiting[:count], self.waiting[count:]
        for call, message in sent:
            reply = self.coordinator.take(message)
            if answered and reply is not None and call in self._callbacks:
                self._callbacks.pop(call)(Answer(id=call, reply=reply))


def outbox_on(wire: Wire, **options: Any) -> Outbox:
    made = Outbox(cast("Any", wire), NODE, BOOT, resend_seconds=600.0, **options)
    made.synchronise(wire.coordinator.state)
    return made


def report(outbox: Outbox, cause: int = 0) -> None:
    outbox.report(NodeLost(node=NODE, boot=BOOT, reason=""), cause)


async def rest(wire: Wire) -> None:
    """Let the outbox send what it can."""
    before, quiet = -1, 0
    while quiet < 5:
        await anyio.lowlevel.checkpoint()
        quiet = quiet + 1 if len(wire.waiting) == before else 0
        before = len(wire.waiting)


async def settle(wire: Wire, outbox: Outbox) -> None:
    """Deliver until nothing waits, whatever was lost on the way."""
    for _ in range(1_000):
        await rest(wire)
        wire.deliver(1_000)
        if not outbox.statistics().queued:
            return
        outbox.resend()
    raise AssertionError(outbox.statistics())


steps = st.lists(
    st.one_of(
        st.just(("report",)),
        st.just(("output",)),
        st.tuples(st.just("deliver"), st.integers(1, 8), st.booleans()),
        st.just(("lose",)),
        st.just(("resend",)),
        st.tuples(st.just("replace"), st.integers(0, 6), st.booleans()),
    ),
    max_size=40,
)


@given(script=steps)
@settings(max_examples=150, deadline=None)
def test_every_report_is_in_the_last_log_once_and_in_order(script: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        wire = Wire()
        boots = iter(range(1, 100))
        async with outbox_on(wire) as outbox:
            for step in script:
                match step:
                    case ("report",):
                        report(outbox)
                    case ("output",):
                        await outbox.output(InstanceId("i"), 1, 0, ("line",))
                    case ("deliver", number, answered):
                        wire.deliver(number, answered=answered)
                    case ("lose",):
                        wire.waiting.clear()
                    case ("resend",):
                        outbox.resend()
                    case ("replace", lacking, leaks):
                        log = wire.coordinator.log
                        wire.coordinator = Coordinator(f"c{next(boots)}", log[: max(0, len(log) - lacking)])
                        if leaks:  # what was meant for the old one reaches the new one first
                            wire.deliver(1_000)
                        wire.waiting.clear()
                        outbox.synchronise(wire.coordinator.state)
                    case _:
                        raise AssertionError(step)
                await rest(wire)
            await settle(wire, outbox)
            sent = [step[0] for step in script if step[0] in ("report", "output")]
            expected = [n for n, kind in enumerate(sent, 1) if kind == "report" and not is_stale(n)]
            assert [one.n for one in wire.coordinator.log] == expected
            assert all(one.happened_ns != 0 for one in wire.coordinator.log)

    anyio.run(run)


@pytest.mark.anyio
async def test_a_log_of_another_epoch_gets_nothing_of_what_was_settled_before() -> None:
    wire = Wire()
    async with outbox_on(wire) as outbox:
        for _ in range(3):
            report(outbox)
        await settle(wire, outbox)
        old = wire.coordinator.log
        wire.coordinator = Coordinator("n1", [], epoch="new")
        outbox.synchronise(wire.coordinator.state)
        report(outbox)
        await settle(wire, outbox)
        assert [one.n for one in wire.coordinator.log] == [4]
        wire.coordinator = Coordinator("c1", old[:1])
        outbox.synchronise(wire.coordinator.state)
        await settle(wire, outbox)
        assert [one.n for one in wire.coordinator.log] == [1, 2, 3, 4]
        wire.coordinator = Coordinator("n2", [], epoch="new")
        outbox.synchronise(wire.coordinator.state)
        await settle(wire, outbox)
        assert [one.n for one in wire.coordinator.log] == [4]
        assert outbox.statistics().rewound == 4


@pytest.mark.anyio
async def test_the_same_coordinator_is_sent_nothing_again() -> None:
    wire = Wire()
    async with outbox_on(wire) as outbox:
        report(outbox)
        await settle(wire, outbox)
        outbox.synchronise(State(epoch="e", coordinator_boot="c0"))
        await rest(wire)
        assert wire.waiting == []


@pytest.mark.anyio
async def test_the_reports_of_an_earlier_boot_are_none_of_this_ones() -> None:
    wire = Wire()
    async with outbox_on(wire) as outbox:
        report(outbox)
        await settle(wire, outbox)
        wire.coordinator = Coordinator("c1", [])
        earlier = {NODE: ReportId(node=NODE, boot=BootId("boot-0"), n=9)}
        outbox.synchronise(msgspec.structs.replace(wire.coordinator.state, reports=earlier))
        await settle(wire, outbox)
        assert [one.n for one in wire.coordinator.log] == [1]


@pytest.mark.anyio
async def test_a_cause_that_the_log_lacks_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.bus.outbox.REPORTS_KEPT", 2)
    wire = Wire()
    async with outbox_on(wire) as outbox:
        for cause in (1, 1, 1, 2):
            report(outbox, cause)
        await settle(wire, outbox)
        wire.coordinator = Coordinator("c1", wire.coordinator.log[:1])
        outbox.synchronise(wire.coordinator.state)
        await settle(wire, outbox)
        assert [(one.n, one.cause) for one in wire.coordinator.log] == [(1, 1), (3, 1), (4, 0)]
