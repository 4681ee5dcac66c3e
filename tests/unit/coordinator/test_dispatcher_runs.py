"""Whatever clients, runners and the cluster do, every request ends exactly once, in its turn, within its bounds."""

from __future__ import annotations

from fleet import Asked, Fleet, done
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from muster.coordinator.directory import Standing, standing_of
from muster.protocol import Generate
from muster.replies import Chunk, Done, Refused, Started
from muster.spec import Failure, InstanceId
from muster.state import Deleting, Failed, Gone, Ready, Running

NAMES: tuple[str, ...] = ("a1", "a2", "b1")
SERVED = {"a1": "a", "a2": "a", "b1": "b"}
WANTED = ("a", "b", "a1", "a2", "b1", "z")
MAX_WAITING = 4
LIMIT = 1 + 8
DRAINING = Refused(failure=Failure(kind="instance-deleted", message="draining", retryable=True))

names = st.sampled_from(NAMES)
picks = st.integers(min_value=0, max_value=30)


class Gateway(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(max_waiting=MAX_WAITING)
        self.fleet.on_sent = self.check_sent
        self.asked: list[Asked] = []
        self.attempts = dict.fromkeys(NAMES, 1)
        self.returned = 0

    # --- what must hold -----------------------------------------------------------------------------------

    def check_sent(self, identity: bytes, generate: Generate) -> None:
        """Only to an instance that is ready, and not before an older request that could have gone there."""
        name, _, attempt = identity.decode().rpartition("/")
        instance = self.fleet.instances[InstanceId(name)]
        assert standing_of(instance) is Standing.READY
        assert instance.attempt == int(attempt)
        sent = [item for item in self.asked if item.request is not None and item.request.generate is generate]
        assert not any(item.ended or item.answered for item in sent)
        order = self.asked.index(sent[0]) if sent else len(self.asked)  # else it was sent within its `submit`
        for older in self.asked[:order]:
            request = older.request
            if request is not None and not older.ended and request.load is None and not request.refused_by:
                assert older.wanted != generate.instance, "not in turn"

    @invariant()
    def bounds_are_kept(self) -> None:
        for load in self.fleet.dispatcher._loads.values():  # pyright: ignore[reportPrivateUsage]
            assert len(load.requests) <= LIMIT
            assert load.outstanding_tokens == sum(request.left_tokens for request in load.requests.values())
        for model in ("a", "b"):
            assert self.fleet.dispatcher.waiting(model) <= MAX_WAITING + self.returned

    @invariant()
    def whoever_has_not_ended_is_somewhere(self) -> None:
        known = list(self.fleet.dispatcher.open_requests())
        open_ones = [item.request for item in self.asked if not item.ended]
        assert len(known) == len(open_ones)
        assert {id(request) for request in known} == {id(request) for request in open_ones}

    # --- clients ------------------------------------------------------------------------------------------

    @initialize(ready=st.booleans())
    def begin(self, ready: bool) -> None:
        for name in NAMES:
            if ready:
                self.become_ready(name)

    @rule(
        wanted=st.sampled_from(WANTED),
        count=st.sampled_from((1, 2, 6, 12)),
        wait=st.sampled_from((1.0, 60.0)),
        tokens=st.sampled_from((0, 5, 3000)),
    )
    def ask(self, wanted: str, count: int, wait: float, tokens: int) -> None:
        for _ in range(count):
            before = self.fleet.dispatcher.waiting(SERVED.get(wanted, wanted))
            asked = self.fleet.ask(wanted, wait_seconds=wait, max_tokens=tokens)
            self.asked.append(asked)
            assert (asked.kind == "queue-full") == (before >= MAX_WAITING and asked.kind != "model-unknown")

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if self.asked:
            self.fleet.cancel(self.asked[pick % len(self.asked)])

    @rule(seconds=st.sampled_from((0.05, 0.4, 2.0, 80.0)))
    def wait(self, seconds: float) -> None:
        self.fleet.pass_time(seconds)

    # --- runners ------------------------------------------------------------------------------------------

    def running(self, pick: int) -> Asked | None:
        found = [item for item in self.asked if not item.ended and self.fleet.home(item)]
        return found[pick % len(found)] if found else None

    @rule(pick=picks)
    def start(self, pick: int) -> None:
        if asked := self.running(pick):
            self.fleet.say(asked, Started(prompt_tokens=9, cached_tokens=2))

    @rule(pick=picks, count=st.integers(min_value=0, max_value=7))
    def token(self, pick: int, count: int) -> None:
        if asked := self.running(pick):
            self.fleet.say(asked, Chunk(tokens=(1,) * count))

    @rule(pick=picks, reason=st.sampled_from(("stop", "length", "cancelled")))
    def finish(self, pick: int, reason: str) -> None:
        if asked := self.running(pick):
            self.fleet.say(asked, done(reason))
            if reason == "cancelled":
                self.returned += 1
            else:
                assert isinstance(asked.replies[-1], Done)

    @rule(pick=picks, first=st.booleans())
    def decline(self, pick: int, first: bool) -> None:
        if asked := self.running(pick):
            self.fleet.say(asked, *(() if first else (Chunk(tokens=(1,)),)), DRAINING)
            self.returned += 1

    @rule(name=names)
    def cut(self, name: str) -> None:
        self.fleet.unreachable.add(f"{name}/{self.attempts[name]}".encode())

    @rule()
    def mend(self) -> None:
        self.fleet.unreachable.clear()

    # --- the cluster --------------------------------------------------------------------------------------

    def come_back(self, name: str) -> None:
        """Requests that were under way may be in the queue again, beyond its bound."""
        held = [item for item in self.asked if not item.ended and self.fleet.home(item).startswith(f"{name}/")]
        self.returned += len(held)

    @rule(name=names)
    def start_attempt(self, name: str) -> None:
        self.come_back(name)
        self.attempts[name] += 1
        self.fleet.starting(name, attempt=self.attempts[name], served=SERVED[name])

    @rule(name=names)
    def become_ready(self, name: str) -> None:
        known = self.fleet.instances.get(InstanceId(name))
        if known is not None and isinstance(known.status, Deleting):
            return  # nothing leads back from there
        self.fleet.ready(name, attempt=self.attempts[name], served=SERVED[name], max_batch=1)

    @rule(name=names, retries=st.booleans())
    def fail(self, name: str, retries: bool) -> None:
        self.come_back(name)
        self.fleet.broken(name, retries=retries, attempt=self.attempts[name], served=SERVED[name])

    @precondition(lambda self: bool(self.fleet.instances))
    @rule(pick=picks)
    def lose_a_rank(self, pick: int) -> None:
        name = list(self.fleet.instances)[pick % len(self.fleet.instances)]
        if isinstance(self.fleet.instances[name].status, Running):
            states = (Ready(), Failed(DRAINING.failure))
            self.fleet.put(name, Running(), *states, attempt=self.attempts[name], served=SERVED[name], max_batch=1)

    @rule(name=names, seconds=st.sampled_from((0.0, 10.0)), gone=st.booleans())
    def delete(self, name: str, seconds: float, gone: bool) -> None:
        if name in self.fleet.instances:
            self.come_back(name)
            states = (Gone(0), Ready()) if gone else (Ready(), Ready())
            self.fleet.put(name, Deleting(seconds), *states, attempt=self.attempts[name], served=SERVED[name])

    @rule(name=names)
    def remove(self, name: str) -> None:
        if name in self.fleet.instances:
            self.come_back(name)
            self.fleet.remove(name)
            self.attempts[name] += 1  # an id never comes back

    def teardown(self) -> None:
        """In the end all have been answered, and nothing is kept of them."""
        self.fleet.pass_time(200.0)
        self.fleet.go_on()
        dispatcher = self.fleet.dispatcher
        assert all(item.ended for item in self.asked)
        assert list(dispatcher.open_requests()) == []
        assert all(load.outstanding_tokens == 0 for load in dispatcher._loads.values())  # pyright: ignore[reportPrivateUsage]
        assert dispatcher._queues == {}  # pyright: ignore[reportPrivateUsage]
        for identity, held in self.fleet.held.items():  # no runner works for nobody, unless it cannot be told
            alive = self.fleet.instances.get(InstanceId(identity.decode().rpartition("/")[0]))
            if alive is not None and identity == f"{alive.id}/{alive.attempt}".encode():
                assert not held or isinstance(alive.status, Deleting) or identity in self.fleet.unreachable


TestGateway = Gateway.TestCase
TestGateway.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
