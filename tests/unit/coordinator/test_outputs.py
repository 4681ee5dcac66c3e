"""What ranks print is kept in order, bounded, and handed to whoever waits for it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from muster.coordinator.outputs import OutputStore, Reader
from muster.protocol import Output
from muster.replies import Outputs
from muster.spec import BootId, InstanceId, NodeId

ONE = InstanceId("one")


def printed(*lines: str, rank: int = 0, attempt: int = 1, instance: InstanceId = ONE) -> Output:
    return Output(node=NodeId("a"), boot=BootId("b"), n=1, instance=instance, attempt=attempt, rank=rank, lines=lines)


def texts(outputs: Outputs) -> list[str]:
    return [line.text for line in outputs.lines]


def waiting(store: OutputStore, *, after: int = 0, rank: int | None = None, until: float = 10.0) -> list[Outputs]:
    answers: list[Outputs] = []
    store.wait(ONE, Reader(after, rank, until, answers.append))
    return answers


def test_lines_come_in_the_order_of_their_arrival_with_rank_and_attempt() -> None:
    store = OutputStore()
    store.add(printed("x", "y"))
    store.add(printed("z", rank=1, attempt=2))
    found = store.read(ONE, 0, None)
    assert [(line.text, line.rank, line.attempt) for line in found.lines] == [("x", 0, 1), ("y", 0, 1), ("z", 1, 2)]
    assert (found.position, found.dropped) == (3, 0)
    assert texts(store.read(ONE, 2, None)) == ["z"]
    assert store.read(ONE, 3, None) == Outputs(lines=(), position=3)


def test_one_rank_is_read_past_the_others() -> None:
    store = OutputStore()
    store.add(printed("x"))
    store.add(printed("y", rank=1))
    found = store.read(ONE, 0, 0)
    assert (texts(found), found.position) == (["x"], 2)


def test_an_unknown_instance_has_printed_nothing() -> None:
    assert OutputStore().read(InstanceId("other"), 7, None) == Outputs(lines=(), position=7)


def test_the_oldest_lines_go_and_the_reader_is_told_how_many() -> None:
    store = OutputStore(max_lines=3)
    store.add(printed(*"abcde"))
    found = store.read(ONE, 0, None)
    assert (texts(found), found.dropped, found.position) == (["c", "d", "e"], 2, 5)
    assert store.read(ONE, 4, None).dropped == 0


def test_bytes_are_bounded_too() -> None:
    store = OutputStore(max_bytes=10)
    store.add(printed("aaaa", "bbbb", "cccc"))
    assert texts(store.read(ONE, 0, None)) == ["bbbb", "cccc"]
    store.add(printed("x" * 11))
    found = store.read(ONE, 0, None)
    assert (texts(found), found.dropped, found.position) == ([], 4, 4)


def test_a_long_output_is_read_in_parts_without_a_gap() -> None:
    store = OutputStore()
    store.add(printed(*(str(number) for number in range(2500))))
    position, seen, parts = 0, list[str](), 0
    while (found := store.read(ONE, position, None)).lines:
        seen += texts(found)
        position = found.position
        parts += 1
    assert seen == [str(number) for number in range(2500)]
    assert parts == 3


def test_who_waits_is_answered_once_by_the_next_line() -> None:
    store = OutputStore()
    answers = waiting(store)
    assert answers == []
    store.add(printed("x"))
    store.add(printed("y"))
    assert [texts(answer) for answer in answers] == [["x"]]


def test_who_waits_for_one_rank_is_not_woken_by_another() -> None:
    store = OutputStore()
    answers = waiting(store, rank=1)
    store.add(printed("x"))
    assert answers == []
    store.add(printed("y", rank=1))
    assert [(texts(answer), answer.position) for answer in answers] == [(["y"], 2)]


def test_waiting_ends_at_its_time_with_an_empty_answer() -> None:
    store = OutputStore()
    early, late = waiting(store, until=10.0), waiting(store, until=20.0)
    store.expire(9.9)
    assert early == []
    store.expire(10.0)
    assert early == [Outputs(lines=(), position=0)]
    assert late == []


def test_the_end_of_the_instance_answers_all_who_wait() -> None:
    store = OutputStore()
    answers = waiting(store)
    store.wake(ONE)
    assert len(answers) == 1
    again = waiting(store)
    store.add(printed("last"))
    more = waiting(store, after=1)
    store.drop(ONE)
    assert [len(found) for found in (answers, again, more)] == [1, 1, 1]
    assert store.read(ONE, 0, None) == Outputs(lines=(), position=0)


def test_instances_do_not_mix() -> None:
    store = OutputStore()
    answers = waiting(store)
    store.add(printed("x", instance=InstanceId("two")))
    store.drop(InstanceId("two"))
    assert answers == []
    assert store.read(ONE, 0, None).lines == ()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.text(max_size=4), max_size=4)), max_size=20),
    st.integers(1, 8),
    st.integers(1, 20),
)
def test_a_reader_that_keeps_up_sees_everything_and_one_that_does_not_is_told(
    story: list[tuple[int, list[str]]], max_lines: int, max_bytes: int
) -> None:
    store = OutputStore(max_lines=max_lines, max_bytes=max_bytes)
    position = seen = dropped = total = 0
    for rank, lines in story:
        store.add(printed(*lines, rank=rank))
        total += len(lines)
        found = store.read(ONE, position, None)
        seen += len(found.lines)
        dropped += found.dropped
        position = found.position
        assert len(store.read(ONE, 0, None).lines) <= max_lines
    assert seen + dropped == total
