"""Room is looked for in a thread: the loop goes on, what was found is checked again, and nobody looks for ever."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import anyio
import msgspec
import pytest
from books import B, Books, info

from muster.coordinator import placing as placing_module
from muster.coordinator.placing import Placing
from muster.events import (
    InstanceCreated,
    InstanceDeleted,
    InstanceFailed,
    InstanceReady,
    NodeJoined,
    NodeLost,
    RankGone,
)
from muster.known import Known
from muster.placement import Placement, Refusal, decide
from muster.placement.again import place_again
from muster.spec import BootId, Failure, GroupWorkload, InstanceId, InstanceSpec, NodeId, Phase
from muster.state import Instance, State

SPEC = InstanceSpec(workload=GroupWorkload(), ranks=2)
NAME = InstanceId("i")
REFUSED = Refusal(message="no room")
LOST = NodeLost(node=B, boot=BootId("boot-1"), reason="its worker ended")


def instance_on(books: Books) -> Instance:
    """An instance on the nodes that are there."""
    found = decide(SPEC, books.ledger.state)
    assert isinstance(found, Placement)
    books.ledger.commit(
        InstanceCreated(instance=NAME, attempt=1, spec=SPEC, assignments=found.assignments, backend=found.backend)
    )
    return books.ledger.state.instances[NAME]


class Search:
    """In the place of `place_again`: counts, and does what the test wants, in the thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[State], Placement | Refusal]) -> None:
        self.threads: list[threading.Thread] = []
        self._answer = answer
        monkeypatch.setattr(placing_module, "place_again", self._place)

    def _place(self, instance: Instance, state: State, known: Known) -> Placement | Refusal:
        del instance, known
        self.threads.append(threading.current_thread())
        return self._answer(state)


class Found:
    """Waits for `on_found`."""

    def __init__(self, placing: Placing) -> None:
        self._event = anyio.Event()
        placing.on_found = self._take

    def _take(self) -> None:
        self._event.set()

    async def next(self) -> None:
        with anyio.fail_after(10):
            await self._event.wait()
        self._event = anyio.Event()


def test_the_loop_goes_on_while_room_is_looked_for() -> None:
    books = Books("a", "b")
    free = threading.Event()

    def look(state: State, known: Known) -> str:
        del state, known
        return "found" if free.wait(10) else "the loop stood still"

    async def run() -> str:
        answers: list[str] = []

        async def search() -> None:
            answers.append(await Placing(books.ledger).search(SPEC, look))

        async with anyio.create_task_group() as group:
            group.start_soon(search)
            await anyio.wait_all_tasks_blocked()
            free.set()
        return answers[0]

    assert anyio.run(run) == "found"


def test_what_was_found_for_another_state_is_looked_for_again() -> None:
    books = Books("a", "b")
    seen: list[State] = []

    def look(state: State, known: Known) -> Placement | Refusal:
        seen.append(state)
        if len(seen) == 1:
            books.ledger.commit(LOST)  # the loop waits for this thread, and does nothing meanwhile
        return decide(SPEC, state, known)

    found = anyio.run(Placing(books.ledger).search, SPEC, look)
    assert isinstance(found, Placement)
    assert {one.node for one in found.assignments} == {NodeId("a")}
    assert len(seen) == 2
    assert seen[-1] is books.ledger.state


def test_an_event_that_takes_no_room_spoils_nothing() -> None:
    books = Books("a", "b")
    instance = instance_on(books)
    seen: list[State] = []

    def look(state: State, known: Known) -> int:
        del known
        seen.append(state)
        books.ledger.commit(InstanceReady(instance=instance.id, attempt=1))
        return 1

    assert anyio.run(Placing(books.ledger).search, SPEC, look) == 1
    assert len(seen) == 1


def test_where_the_state_never_rests_the_last_search_is_on_the_loop() -> None:
    books = Books("a", "b")
    threads: list[threading.Thread] = []

    def look(state: State, known: Known) -> str:
        del state, known
        threads.append(threading.current_thread())
        books.ledger.commit(NodeJoined(info=info(f"n{len(threads)}")))
        return "found"

    assert anyio.run(Placing(books.ledger).search, SPEC, look) == "found"
    assert [one is threading.main_thread() for one in threads] == [False, False, False, True]


def run_placing(placing: Placing, test: Callable[[Found], Awaitable[None]]) -> None:
    async def run() -> None:
        found = Found(placing)
        async with anyio.create_task_group() as group:
            group.start_soon(placing.run)
            await test(found)
            group.cancel_scope.cancel()

    anyio.run(run)


def test_the_next_attempt_is_known_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books("a", "b")
    instance = instance_on(books)
    search = Search(monkeypatch, lambda state: place_again(instance, state, Known()))
    placing = Placing(books.ledger)

    async def test(found: Found) -> None:
        assert placing.next_attempt(instance, books.ledger.state) is None
        await found.next()
        assert isinstance(placing.next_attempt(instance, books.ledger.state), Placement)
        assert threading.main_thread() not in search.threads

    run_placing(placing, test)


def test_a_refusal_that_cost_much_stands_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books("a", "b")
    instance = instance_on(books)
    placing = Placing(books.ledger)
    now = [100.0]
    monkeypatch.setattr(placing_module.time, "monotonic", lambda: now[0])

    def slow(state: State) -> Refusal:
        del state
        now[0] += 1.0
        return REFUSED

    search = Search(monkeypatch, slow)

    async def asked(found: Found) -> None:
        assert placing.next_attempt(instance, books.ledger.state) is None
        await found.next()
        assert placing.next_attempt(instance, books.ledger.state) is REFUSED

    async def test(found: Found) -> None:
        await asked(found)
        now[0] += 19.0  # heartbeats alone do not count before twenty times what the search took
        assert placing.next_attempt(instance, books.ledger.state) is REFUSED
        assert len(search.threads) == 1
        books.ledger.commit(NodeJoined(info=info("c")))
        await asked(found)
        assert len(search.threads) == 2
        now[0] += 21.0
        await asked(found)
        assert len(search.threads) == 3

    run_placing(placing, test)


def test_what_was_found_is_forgotten_when_it_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books("a", "b")
    instance = instance_on(books)
    Search(monkeypatch, lambda state: REFUSED)
    placing = Placing(books.ledger)
    other = msgspec.structs.replace(instance, id=InstanceId("another"))

    async def test(found: Found) -> None:
        placing.next_attempt(instance, books.ledger.state)
        await found.next()
        assert list(placing._sought) == [NAME]
        books.ledger.commit(InstanceDeleted(instance=NAME, attempt=1))
        placing.next_attempt(other, books.ledger.state)
        await found.next()
        assert list(placing._sought) == []

    run_placing(placing, test)


def test_one_that_cannot_be_placed_leaves_the_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books("a", "b")
    instance = instance_on(books)

    def fail(state: State) -> Refusal:
        raise ValueError("a bug")

    Search(monkeypatch, fail)
    placing = Placing(books.ledger)

    async def test(found: Found) -> None:
        assert placing.next_attempt(instance, books.ledger.state) is None
        await found.next()
        assert placing.next_attempt(instance, books.ledger.state) is None
        Search(monkeypatch, lambda state: REFUSED)
        books.ledger.commit(LOST)
        assert placing.next_attempt(instance, books.ledger.state) is None
        await found.next()
        assert placing.next_attempt(instance, books.ledger.state) is REFUSED

    run_placing(placing, test)


def test_news_let_the_rules_look_again_at_once() -> None:
    books = Books("a", "b")
    looks: list[Instance] = []
    instance = instance_on(books)

    def place(one: Instance, state: State) -> None:
        del state
        looks.append(one)

    books.ledger.place = place
    failure = Failure(kind="placement-refused", message="no room", phase=Phase.PLACING, retryable=True)
    for rank in instance.ranks:
        books.ledger.commit(
            RankGone(instance=NAME, attempt=1, rank=rank.rank, node=rank.node, boot=BootId(rank.boot), exit_code=0)
        )
    now_ns = books.ledger.clock.now_ns()
    books.ledger.commit(InstanceFailed(instance=NAME, attempt=1, failure=failure, retry_at_ns=now_ns))
    books.ledger.settle()
    books.ledger.settle()
    assert len(looks) == 1
    books.ledger.look_again()
    books.ledger.settle()
    assert len(looks) == 2
