"""Random lives of a real cluster: whatever is killed, stopped, cut and asked for, the rules of the design hold.

The invariants are checked after every step; at the end the faults stop, and everything must come to rest. In CI a few
lives, the same each time. `MUSTER_MACHINE_EXAMPLES=200` lives so many others, longer ones, on workers with a pool.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kit import Client, alive
from kit.ground import LEASE_SECONDS, NODES, Ground
from kit.wishes import DEADLINES, QUESTION, QUESTION_SECONDS, SCRIPTS, wish

from muster.bench.relay import has_address
from muster.errors import MusterError
from muster.lifecycle import is_over
from muster.protocol import AnyRequest, Create, Delete, Drain, Resume, Retry
from muster.replies import Accepted, AnyReply, Chunk, Created, Done, Noted, Refused
from muster.spec import GroupWorkload, InstanceSpec, NeverRestart, NodeId, Restart, RestartOnFailure
from muster.state import Gone, Running, Serving, State

pytestmark = [pytest.mark.process, pytest.mark.mlx]

EXAMPLES = int(os.environ.get("MUSTER_MACHINE_EXAMPLES", "0"))
#: What the lives in CI are drawn from: they break, ask and mend much in few steps.
SEED = 5
#: Warm runners take seconds before the first example; without them a model takes as many.
POOL = {"a": 1 if EXAMPLES else 0, "b": 0, "c": 0}
#: How long a cluster without faults may take to come to rest: deadlines, and a model's start on a busy machine.
REST_SECONDS = 45.0
#: At most so many instances at once, for the machine's sake.
MOST_INSTANCES = 4
#: At most so many nodes are cut off at once.
MOST_CUT = 2
#: How much later than the lease a loss may be told on a busy machine.
LATE_SECONDS = 5.0

picks = st.integers(0, 11)
nodes = st.sampled_from(NODES)
kinds = st.sampled_from(("group", "group", "group", "model", *SCRIPTS))
restarts = st.sampled_from(
    (*(RestartOnFailure(maximum=n, backoff_seconds=0.01, backoff_max_seconds=0.5) for n in (5, 2)), NeverRestart())
)
sizes = st.integers(1, 3)
wishes = st.tuples(kinds, sizes, restarts)


class Life(RuleBasedStateMachine):
    """One example. The ground is that of the test.

    Hypothesis wants the same choices to be there each time. So what may happen depends on what was done, and not on
    what came of it: a step that finds nothing to do does nothing.
    """

    ground: ClassVar[Ground]

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.questions: list[tuple[Future[None], list[AnyReply]]] = []
        self.wished: set[str] = set()  #: kinds of workloads that were asked for
        self.journal: list[str] = []
        self.begun = time.monotonic()
        if self.ground.failure is not None:  # a life is not lived twice: it would be another one
            raise self.ground.failure
        with self.step("begin"):
            self.ground.prepare()
            self.state = self.ground.audit()

    @contextlib.contextmanager
    def step(self, what: str) -> Generator[None]:
        """A line in the journal; an error in it tells the whole journal, and costs the cluster."""
        self.note(what)
        try:
            yield
        except BaseException as error:
            self.note("failed")
            error.add_note("\n".join([f"The cluster is in {self.ground.directory}. What happened:", *self.journal]))
            self.ground.failure = error
            self.ground.discard()
            raise

    def note(self, what: str) -> None:
        self.journal.append(f"{time.monotonic() - self.begun:7.2f} {what}")

    def instance(self, pick: int) -> str:
        """The id of an instance; of none where there is none, and that is refused."""
        instances = sorted(self.state.instances.values(), key=lambda instance: instance.created_by)
        return instances[pick % len(instances)].id if instances else "none"

    # --- what clients and operators ask ---------------------------------------------------------------------

    @initialize(wishes=st.lists(wishes, min_size=1, max_size=3), hurry=st.booleans())
    def begin(self, wishes: list[tuple[str, int, Restart]], hurry: bool) -> None:
        for asked in wishes:
            self.create(*asked)
        if not hurry:
            self.wait_rest(5.0)

    @precondition(lambda self: self.ground.served)
    @rule(kind=kinds, ranks=sizes, restart=restarts)
    def create(self, kind: str, ranks: int, restart: Restart) -> None:
        self.wished.add(kind)
        if len(self.state.instances) >= MOST_INSTANCES:
            return
        spec = wish(kind, ranks, restart, self.ground.paths)
        with self.step(f"create a {kind} of {spec.ranks}, {restart}"):
            match self.ground.call(Create(spec=spec)):
                case Created(instance=instance):
                    self.note(f"  {instance}")
                case Refused(failure=failure):
                    self.note(f"  {failure.sentence()}")
                    assert failure.kind == "placement-refused", failure
                    assert failure.remedy, failure
                case reply:
                    raise AssertionError(reply)

    @precondition(lambda self: self.ground.served and bool(self.wished))
    @rule(pick=picks, now=st.booleans())
    def delete(self, pick: int, now: bool) -> None:
        self.ask(Delete(instance=self.instance(pick), now=now))

    @precondition(lambda self: self.ground.served and bool(self.wished))
    @rule(pick=picks, move=st.booleans())
    def retry(self, pick: int, move: bool) -> None:
        self.ask(Retry(instance=self.instance(pick), move=move))

    @precondition(lambda self: self.ground.served)
    @rule(node=nodes, now=st.booleans())
    def drain(self, node: str, now: bool) -> None:
        self.ask(Drain(node=NodeId(node), now=now))

    @precondition(lambda self: self.ground.served)
    @rule(node=nodes)
    def resume(self, node: str) -> None:
        self.ask(Resume(node=NodeId(node)))

    def ask(self, request: AnyRequest) -> None:
        """A wish that may be refused for a reason."""
        with self.step(f"{request}"):
            reply = self.ground.call(request)
            assert isinstance(reply, Accepted | Noted | Refused), reply
            if isinstance(reply, Refused):
                self.note(f"  {reply.failure.sentence()}")
                assert reply.failure.kind == "request-invalid", reply
                assert reply.failure.message, reply

    @precondition(lambda self: self.ground.served and "model" in self.wished)
    @rule(again=st.booleans())
    def generate(self, again: bool) -> None:
        async def listen(client: Client, replies: list[AnyReply]) -> None:
            async with client._client.stream(QUESTION, timeout_seconds=QUESTION_SECONDS + 10.0) as stream:
                async for reply in stream:
                    replies.append(reply)

        with self.step("ask twice" if again else "ask"):
            client = self.ground.client
            for _ in range(1 + again):
                replies: list[AnyReply] = []
                self.questions.append((client._portal.start_task_soon(listen, client, replies), replies))

    # --- what breaks, and is mended -------------------------------------------------------------------------

    @precondition(lambda self: bool(self.ground.up))
    @rule(pick=picks)
    def end_runner(self, pick: int) -> None:
        found = self.ground.runners()
        if found:
            name, runner = found[pick % len(found)]
            with self.step(f"kill runner {name}"):
                self.ground.kill_runner(name, runner)

    @precondition(lambda self: bool(self.ground.up))
    @rule(pick=picks, politely=st.booleans())
    def end_worker(self, pick: int, politely: bool) -> None:
        """What stands still can only be killed."""
        node = self.ground.up[pick % len(self.ground.up)]
        politely = politely and node not in self.ground.still_nodes
        with self.step(f"{'end' if politely else 'kill'} the worker of {node}"):
            (self.ground.end_worker if politely else self.ground.kill_worker)(node)

    @precondition(lambda self: bool(self.ground.missing))
    @rule(pick=picks)
    def start_worker(self, pick: int) -> None:
        node = self.ground.missing[pick % len(self.ground.missing)]
        with self.step(f"start the worker of {node}"):
            self.ground.start_worker(node)

    @precondition(lambda self: bool(set(self.ground.up) - self.ground.still_nodes))
    @rule(pick=picks)
    def halt_worker(self, pick: int) -> None:
        moving = [node for node in self.ground.up if node not in self.ground.still_nodes]
        node = moving[pick % len(moving)]
        with self.step(f"stop the worker of {node}"):
            self.ground.stop(node, self.ground.process(node))

    @precondition(lambda self: bool(self.ground.up))
    @rule(pick=picks)
    def halt_runner(self, pick: int) -> None:
        found = self.ground.runners()
        if found:
            name, runner = found[pick % len(found)]
            with self.step(f"stop runner {name}"):
                self.ground.stop(name, runner)

    @precondition(lambda self: bool(self.ground.still_nodes))
    @rule(pick=picks, runners=st.booleans())
    def let_worker_go_on(self, pick: int, runners: bool) -> None:
        """And its runners, or not."""
        node = sorted(self.ground.still_nodes)[pick % len(self.ground.still_nodes)]
        with self.step(f"let the worker of {node} go on"):
            self.ground.let_go_on(node)
            for name in [name for name in self.ground.still if runners and name.startswith(node)]:
                self.ground.let_go_on(name)

    @precondition(lambda self: len(self.ground.cut) < MOST_CUT)
    @rule(pick=picks)
    def sever(self, pick: int) -> None:
        whole = [node for node in NODES if node not in self.ground.cut]
        node = whole[pick % len(whole)]
        with self.step(f"cut {node} off"):
            self.ground.cut_off(node)

    @precondition(lambda self: bool(self.ground.cut))
    @rule(pick=picks)
    def unite(self, pick: int) -> None:
        node = sorted(self.ground.cut)[pick % len(self.ground.cut)]
        with self.step(f"heal {node}"):
            self.ground.heal(node)

    @precondition(lambda self: self.ground.served)
    @rule(politely=st.booleans())
    def stop_coordinator(self, politely: bool) -> None:
        with self.step("end the coordinator" if politely else "kill the coordinator"):
            self.ground.end_coordinator(politely)

    @precondition(lambda self: not self.ground.served)
    @rule(again=st.booleans())
    def start_coordinator(self, again: bool) -> None:
        with self.step("start the coordinator"):
            self.ground.start_coordinator()
            if again:
                self.ground.end_coordinator(politely=False)
                self.ground.start_coordinator()

    # --- time, and what must hold after each step -------------------------------------------------------------

    @rule(events=st.integers(1, 4))
    def wait(self, events: int) -> None:
        """Until so many further events, or for half a lease."""
        with self.step(f"wait for {events}"):
            client = self.ground.client
            count = len(client.events)
            with contextlib.suppress(AssertionError):
                client.wait_for(lambda: len(client.events) >= count + events, "events", LEASE_SECONDS / 2)

    @precondition(lambda self: self.ground.served)
    @rule(seconds=st.sampled_from((1.0, 3.0)))
    def wait_rest(self, seconds: float) -> None:
        """Until nothing comes up or ends, or for so long: it may never be so while something is broken."""
        with self.step("wait for rest"), contextlib.suppress(AssertionError):
            self.ground.client.wait_for(self.rests, "rest", seconds)

    @precondition(lambda self: self.ground.served and bool(self.ground.unheard))
    @rule(pick=picks, lost=st.booleans())
    def wait_unheard(self, pick: int, lost: bool) -> None:
        """Whoever cannot be heard is suspect, and lost when its lease ends, and not much later."""
        node = self.ground.unheard[pick % len(self.ground.unheard)]
        what = f"{'the loss' if lost else 'a suspicion'} of node {node}"
        with self.step(f"wait for {what}"):
            found = self.ground.lost if lost else self.ground.doubted
            self.ground.client.wait_for(lambda: found(node), what, LEASE_SECONDS + LATE_SECONDS)

    @invariant()
    def the_rules_hold(self) -> None:
        with self.step("check"):
            if self.ground.served:
                self.state = self.ground.audit()
            self.ground.check()
        self.journal.pop()

    def rests(self) -> bool:
        """Whether nothing comes up or ends, and what is ready is there."""
        instances = self.ground.client.latest.instances.values()
        ready = [rank for each in instances if isinstance(each.status, Running) for rank in each.ranks]
        there = all(isinstance(rank.state, Gone) or alive(rank.pid, rank.process_started) for rank in ready)
        return there and all(isinstance(each.status, Running) or is_over(each) for each in instances)

    # --- when the faults stop -------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not self.ground.made:
            return  # a step has failed
        with self.step("the faults stop"):
            self.ground.mend()
            for node in NODES:
                self.ask(Resume(node=NodeId(node)))
        with self.step("come to rest"):
            self.come_to_rest()
        with self.step("answers"):
            self.end_questions()
        with self.step("a new group"):
            spec = InstanceSpec(workload=GroupWorkload(), ranks=len(NODES), deadlines=DEADLINES)
            self.ground.client.ready(self.ground.client.create(spec), seconds=REST_SECONDS)
            self.ground.wait_nothing_wrong()
        with self.step("delete all"):
            client = self.ground.client
            for instance in self.ground.audit().instances:
                self.ask(Delete(instance=instance))
            client.wait_for(lambda: not client.latest.instances, "the end of all instances", REST_SECONDS)
        with self.step("nothing is left"):
            self.ground.wait_nothing_left()
        with (self.ground.directory / "journal.txt").open("a") as file:
            file.write("\n".join([*self.journal, "", ""]))

    def come_to_rest(self) -> None:
        """Nodes that are set aside for what failed as the faults stopped are resumed again."""
        client = self.ground.client
        aside: list[NodeId] = []

        def recovered() -> bool:
            nodes = client.latest.nodes
            aside[:] = [name for name, node in nodes.items() if not isinstance(node.duty, Serving)]
            there = all(node.lost is None and node.suspect is None for node in nodes.values())
            return bool(aside) or (there and self.rests())

        deadline = time.monotonic() + REST_SECONDS
        try:
            while True:
                client.wait_for(recovered, "rest", deadline - time.monotonic())
                if not aside:
                    return
                for node in aside:
                    self.ask(Resume(node=node))
                resumed = "the resumed nodes"
                client.wait_for(lambda: not recovered() or not aside, resumed, deadline - time.monotonic())
        except AssertionError as error:
            error.add_note(f"{self.ground.audit()}")
            raise

    def end_questions(self) -> None:
        """Each was answered, the same each time, or has an error."""
        for future, replies in self.questions:
            try:
                future.result(2 * QUESTION_SECONDS)
            except TimeoutError:
                raise AssertionError(f"a request has no end: {replies[-3:]}") from None
            except MusterError:
                continue
            match replies[-1]:
                case Done():
                    text = "".join(reply.text for reply in replies if isinstance(reply, Chunk))
                    self.ground.said = self.ground.said or text
                    assert text == self.ground.said, f"{text!r} instead of {self.ground.said!r}"
                case Refused(failure=failure):
                    assert failure.message, failure
                case reply:
                    raise AssertionError(reply)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    if not has_address("127.0.0.2"):
        pytest.skip("the links to the workers need more than one loopback address")
    made = Ground(tmp_path_factory.mktemp("machine"), POOL, SCRIPTS)
    try:
        yield made
    finally:
        made.discard()


@pytest.mark.timeout(0 if EXAMPLES else 120)
def test_whatever_happens_the_rules_hold_and_everything_comes_to_rest(ground: Ground) -> None:
    Life.ground = ground
    chosen = settings(
        max_examples=EXAMPLES or 3,
        stateful_step_count=25 if EXAMPLES else 12,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
    )
    try:
        run_state_machine_as_test(Life if EXAMPLES else seed(SEED)(Life), settings=chosen)
    except Flaky as error:
        if ground.failure is None:
            raise
        raise ground.failure from error
