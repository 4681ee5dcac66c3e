"""Each report of a boot is applied once and in order."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from muster.bus.responder import Deduplicator, Verdict
from muster.events import InstanceReady, ReportId, encode_event
from muster.protocol import Output, Report
from muster.spec import BootId, InstanceId, NodeId, NodeInfo
from muster.state import Node, State

NODE = NodeId("a")
BOOT = BootId("boot-1")


def state_with(boot: BootId = BOOT, durable: int = 0) -> State:
    info = NodeInfo(
        node=NODE,
        boot=boot,
        hostname="a",
        machine="m",
        pid=1,
        addresses=(),
        backends=(),
        memory_bytes=0,
        max_ranks=1,
    )
    reports = {NODE: ReportId(node=NODE, boot=boot, n=durable)} if durable else {}
    return State(nodes={NODE: Node(info=info, since_ns=0)}, reports=reports)


def report(n: int, *, oldest: int = 1, boot: BootId = BOOT) -> Report:
    event = InstanceReady(instance=InstanceId("i"), attempt=1)
    return Report(node=NODE, boot=boot, n=n, oldest=oldest, cause=0, event=encode_event(event))


def output(n: int, *, oldest: int = 1) -> Output:
    return Output(
        node=NODE, boot=BOOT, n=n, oldest=oldest, instance=InstanceId("i"), attempt=1, rank=0, lines=(str(n),)
    )


def test_reports_and_outputs_share_one_sequence() -> None:
    judge = Deduplicator()
    state = state_with()
    for message in (report(1), output(2), report(3)):
        assert judge.judge(message, state) is Verdict.APPLY
        judge.applied(message)
        assert judge.judge(message, state) is Verdict.REPEATED
    assert judge.judge(output(5), state) is Verdict.MISSING
    assert judge.acknowledged(NODE, BOOT, state) == 3


def test_an_unknown_node_and_an_earlier_boot_are_strangers() -> None:
    judge = Deduplicator()
    assert judge.judge(report(1), State()) is Verdict.STRANGER
    assert judge.judge(report(1), state_with(BootId("boot-2"))) is Verdict.STRANGER


def test_a_new_boot_starts_again_at_one() -> None:
    judge = Deduplicator()
    judge.applied(report(7))
    second = BootId("boot-2")
    state = state_with(second)
    assert judge.acknowledged(NODE, second, state) == 0
    assert judge.judge(report(1, boot=second), state) is Verdict.APPLY
    assert judge.judge(report(2, boot=second), state) is Verdict.MISSING


def test_after_a_restart_the_log_and_the_sender_say_where_to_go_on() -> None:
    """3 is logged; 4 and 5 were outputs, acknowledged and forgotten with the process."""
    judge = Deduplicator()
    state = state_with(durable=3)
    assert judge.judge(report(3, oldest=1), state) is Verdict.REPEATED
    assert judge.judge(report(7, oldest=6), state) is Verdict.MISSING
    assert judge.judge(report(6, oldest=6), state) is Verdict.APPLY


def test_a_new_message_that_overtakes_lost_ones_after_a_restart_is_not_taken_for_the_first() -> None:
    judge = Deduplicator()
    assert judge.judge(report(8, oldest=5), state_with(durable=4)) is Verdict.MISSING


class Worker:
    """What an outbox does, without sockets: a list of what is not acknowledged."""

    def __init__(self, kinds: list[bool]) -> None:
        self.unacknowledged = [report(n) if kind else output(n) for n, kind in enumerate(kinds, 1)]

    def message(self, index: int) -> Report | Output:
        return msgspec.structs.replace(self.unacknowledged[index], oldest=self.unacknowledged[0].n)

    def acknowledge(self, safe: int) -> None:
        self.unacknowledged = [message for message in self.unacknowledged if message.n > safe]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_whatever_is_lost_or_restarted_every_report_is_applied_once_in_order(
    kinds: list[bool], data: st.DataObject
) -> None:
    worker = Worker(kinds)
    judge = Deduplicator()
    state = state_with()
    logged: list[int] = []
    printed: list[int] = []

    def deliver(index: int, *, acknowledge: bool) -> None:
        nonlocal state
        message = worker.message(index)
        verdict = judge.judge(message, state)
        if verdict is Verdict.APPLY:
            judge.applied(message)
            if isinstance(message, Report):
                logged.append(message.n)
                state = state_with(durable=message.n)
            else:
                printed.append(message.n)
        if acknowledge and verdict in (Verdict.APPLY, Verdict.REPEATED):
            worker.acknowledge(judge.acknowledged(NODE, BOOT, state))

    for _ in range(data.draw(st.integers(0, 40))):
        if not worker.unacknowledged:
            break
        if data.draw(st.integers(0, 9)) == 0:
            judge = Deduplicator()  # a new coordinator on the same log
        deliver(data.draw(st.integers(0, len(worker.unacknowledged) - 1)), acknowledge=data.draw(st.booleans()))
    for _ in range(2 * len(kinds)):  # the network is well again: go-back from the oldest
        if worker.unacknowledged:
            deliver(0, acknowledge=True)
    assert not worker.unacknowledged
    assert logged == [n for n, kind in enumerate(kinds, 1) if kind]
    assert sorted(set(printed)) == [n for n, kind in enumerate(kinds, 1) if not kind]


def test_what_was_written_for_another_coordinator_is_refused_whatever_its_number() -> None:
    judge = Deduplicator()
    state = msgspec.structs.replace(state_with(), coordinator_boot="new")
    for message in (report(1), output(1)):
        assert judge.judge(msgspec.structs.replace(message, to="old"), state) is Verdict.STRANGER
        assert judge.judge(msgspec.structs.replace(message, to="new"), state) is Verdict.APPLY
        assert judge.judge(message, state) is Verdict.APPLY
