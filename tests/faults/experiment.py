"""Playing a cell: bring an instance to the phase, do it to the target, see what comes of it, and look for leftovers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
import zmq.asyncio
from asked import Asked
from cells import (
    DEADLINES,
    MODEL_DEADLINES,
    RANKS,
    Answer,
    Cell,
    Expected,
    Fault,
    Outcome,
    Phase,
    Target,
    expected,
)
from gates import Gates
from grounds import Ground, Hosts, Loopback
from harm import Harm
from kit import DEMO_MODEL, Client, alive, until
from leftovers import children, leftovers

from muster.demo.answers import ENDLESS_PROMPT
from muster.errors import MusterError
from muster.events import Envelope, InstanceFailed, RankListening, kind_of
from muster.protocol import Delete, Generate, Resume, Retry
from muster.sampling import SamplingParams
from muster.spec import (
    Failure,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    RestartOnFailure,
)
from muster.state import Aside, Broken, Instance, Running, all_gone

#: For the next attempt, with cold runners on two busy cores; not a promise.
_RECOVERY_SECONDS: Final = 20.0
#: How long a request may be silent before its client gives up.
_PATIENCE_SECONDS: Final = 25.0
#: Within which no runner of a killed worker is left.
_ORPHAN_SECONDS: Final = 1.0
#: For what is left of a rank once the log says that it is gone, or its node is back.
_LEFTOVER_SECONDS: Final = 5.0
#: A prompt of several chunks.
_PROMPT_TOKENS, _CHUNK_TOKENS = 400, 32
#: An answer that is under way for a moment, even where a token takes a tenth of a second.
_ANSWER_TOKENS: Final = 100


@dataclass(slots=True)
class Result:
    """What came out of a cell. `seconds` is until the verdict, `again_seconds` until the instance served again."""

    cell: Cell
    outcome: Outcome = Outcome.WRONG
    seconds: float = 0.0
    again_seconds: float = 0.0
    failure: Failure | None = None
    answer: Answer = Answer.NONE
    wrong: list[str] = field(default_factory=list)  #: what differs from what was promised
    story: list[str] = field(default_factory=list)  #: the events of the cell, for whoever has to find out why

    @property
    def cause(self) -> str:
        """What an operator reads, without the remedy; empty where nothing failed."""
        failure = self.failure
        if failure is None:
            return ""
        where = f"rank {failure.rank} on node {failure.node}, " if failure.rank >= 0 else ""
        return f"{failure.kind}: {where}while {failure.phase}: {failure.message}"


class Laboratory:
    """Plays cells, one after the other, on one cluster. An instance that a cell has left in order serves the next."""

    def __init__(self, ground: Ground, gates: Gates, client: Client, slack_seconds: float) -> None:
        self.ground = ground
        self._gates = gates
        self._client = client
        self._harm = Harm(ground, client)
        self._slack_seconds = slack_seconds
        self._instance: InstanceId | None = None
        self._made_for: tuple[bool, bool] = (False, False)

    def play(self, cell: Cell) -> Result:
        """One cell, from a cluster in order to a cluster in order."""
        result = Result(cell)
        promised = expected(cell)
        known = len(self._client.envelopes)
        try:
            self._play(cell, promised, result)
        except (AssertionError, MusterError) as error:
            result.outcome = Outcome.WRONG
            result.wrong.append(str(error).splitlines()[0][:300])
            self._gates.open()
            self._harm.mend_all()
            with contextlib.suppress(AssertionError, MusterError):
                self._wait_nodes()
                self._delete()
        result.story = [_told(envelope) for envelope in self._client.envelopes[known:]]
        return result

    def close(self) -> None:
        """Delete what the last cell left."""
        self._delete()

    # --- the course of a cell -----------------------------------------------------------------------------

    def _play(self, cell: Cell, promised: Expected, result: Result) -> None:
        self._resume_nodes()
        instance, asked = self._bring_to(cell)
        before = self._client.instance(instance)
        node = before.ranks[max(cell.target.rank, 0)].node
        pids = [child.pid for name in self.ground.nodes for child in children(self.ground, name)]
        hostages = [child.pid for child in children(self.ground, node)]
        begin = time.monotonic()
        self._harm.inject(cell, before, node)
        if cell.target is Target.WORKER and cell.fault is Fault.KILL:  # also where they stand still
            until(lambda: not any(map(alive, hostages)), "the end of the killed worker's runners", _ORPHAN_SECONDS)
        self._gates.open()
        fails = Outcome.READY not in promised.outcomes
        if self._harm.outlast(cell):
            begin = time.monotonic()
        elif fails:
            self._wait_failed(before, promised, begin, result)
            if cell.loses_node:  # the instance goes on without it
                self._wait_again(before, begin, result)
        else:  # it goes on in spite of the fault
            self._wait_again(before, begin, result)
        self._harm.mend(cell, node)
        if not result.again_seconds and Outcome.FAILED not in promised.outcomes:
            self._wait_again(before, begin, result)
        self._judge(before, promised, result)
        if result.outcome is Outcome.FAILED:
            self._client.call(Retry(instance=before.id))  # the operator has mended it, and says so
            self._wait_again(before, time.monotonic(), result)
        if asked is not None:
            result.answer = asked.wait(2 * _PATIENCE_SECONDS)
            if result.answer not in promised.answers:
                result.wrong.append(f"the request: {result.answer.value} ({asked.words})")
        self._wait_nodes()
        self._look_for_leftovers(before, pids, result)
        if result.wrong:
            result.outcome = Outcome.WRONG

    def _judge(self, before: Instance, promised: Expected, result: Result) -> None:
        """Compare what came with what was promised."""
        now = self._client.latest.instances.get(before.id)
        assert now is not None, "the instance is gone"
        if isinstance(now.status, Broken) and now.status.retry_at_ns is None:
            outcome = Outcome.FAILED
        else:
            outcome = Outcome.RECOVERED if now.attempt > before.attempt else Outcome.READY
        if result.failure is None and now.attempt > before.attempt:
            result.failure = now.failures[-1]
        if not promised.kinds:  # no verdict was promised
            result.seconds = result.again_seconds
        if outcome not in promised.outcomes:
            result.wrong.append(f"{outcome.value} instead of {' or '.join(sorted(promised.outcomes))}")
        if outcome is Outcome.READY and now.ranks != before.ranks and result.cell.phase.serves:
            result.wrong.append("the ranks are not the same as before")
        if result.failure is not None and promised.kinds:
            self._judge_failure(before, promised, result.failure, result)
        if result.seconds > promised.seconds + self._slack_seconds:
            result.wrong.append(f"{result.seconds:.1f} s, promised {promised.seconds:g} s")
        result.outcome = outcome

    def _judge_failure(self, before: Instance, promised: Expected, failure: Failure, result: Result) -> None:
        if failure.kind not in promised.kinds:
            result.wrong.append(f"kind {failure.kind} instead of {' or '.join(sorted(promised.kinds))}")
        if promised.blames:
            hit = before.ranks[result.cell.target.rank]
            if (failure.rank, failure.node) != (hit.rank, hit.node):
                result.wrong.append(f"blames rank {failure.rank} on {failure.node or 'no node'}, not {hit.rank}")
        if promised.words not in failure.message:
            result.wrong.append(f"does not say {promised.words!r}")

    # --- before -------------------------------------------------------------------------------------------

    def _bring_to(self, cell: Cell) -> tuple[InstanceId, Asked | None]:
        """An instance whose ranks all stand in the phase, and the request that is under way."""
        if cell.phase.serves:
            instance = self._serving(cell)
            if cell.phase is Phase.READY:
                return instance, None
            return instance, self._ask_and_hold(cell)
        self._delete()
        gate = cell.phase.value
        self._gates.close(gate)
        instance = self._instance = self._create(cell)
        self._made_for = (cell.phase.needs_model, cell.pinned)
        asked = self._ask("early", 8) if cell.phase.needs_model else None
        if cell.phase is not Phase.LISTENING:
            self._gates.wait_reached(gate, set(range(RANKS)))
            return instance, asked
        self._gates.wait_reached(gate, {RANKS - 1})
        for rank in range(RANKS - 1):
            self._client.wait(RankListening, instance, rank=rank)
        # The worker itself stops the rank before the last for a moment, so that it does not dial too early.
        held = psutil.Process(self._client.instance(instance).ranks[RANKS - 2].pid)
        until(lambda: held.status() != psutil.STATUS_STOPPED, "the rank before the last goes on")
        return instance, None

    def _serving(self, cell: Cell) -> InstanceId:
        """The instance of the cell before where it fits, or a new one."""
        if self._instance is not None and self._made_for == (True, cell.pinned):
            found = self._client.latest.instances.get(self._instance)
            if found is not None and isinstance(found.status, Running):
                return self._instance
        self._delete()
        self._instance = self._create(cell)
        self._made_for = (True, cell.pinned)
        self._client.ready(self._instance)
        return self._instance

    def _ask_and_hold(self, cell: Cell) -> Asked:
        self._gates.close(cell.phase.value)
        if cell.phase is Phase.PREFILLING:
            asked = self._ask("r" * _PROMPT_TOKENS, 8)
        else:
            asked = self._ask(ENDLESS_PROMPT, _ANSWER_TOKENS)
            assert asked.begun.wait(_PATIENCE_SECONDS), "no first token"
        self._gates.wait_reached(cell.phase.value, set(range(RANKS)))
        return asked

    def _ask(self, prompt: str, tokens: int) -> Asked:
        request = Generate(instance="matrix", prompt=prompt, sampling=SamplingParams(max_tokens=tokens))
        return Asked(self._client, request, _PATIENCE_SECONDS)

    def _create(self, cell: Cell) -> InstanceId:
        workload = GroupWorkload()
        if cell.phase.needs_model:
            workload = ModelWorkload(
                model=str(DEMO_MODEL),
                served_name="matrix",
                sharding="pipeline",
                prefill_chunk_tokens=_CHUNK_TOKENS,
                prompt_cache_bytes=0,
            )
        nodes = tuple(map(NodeId, self.ground.nodes[:RANKS])) if cell.pinned else ()
        return self._client.create(
            InstanceSpec(
                workload=workload,
                ranks=RANKS,
                nodes=nodes,
                restart=RestartOnFailure(maximum=20, backoff_seconds=0.05, backoff_max_seconds=0.5),
                deadlines=MODEL_DEADLINES if cell.phase.needs_model else DEADLINES,
            )
        )

    def _resume_nodes(self) -> None:
        """Nobody stays set aside for what the cells before have done to it."""
        for name, node in self._client.latest.nodes.items():
            if isinstance(node.duty, Aside):
                self._client.call(Resume(node=name))

    # --- after --------------------------------------------------------------------------------------------

    def _wait_failed(self, before: Instance, promised: Expected, begin: float, result: Result) -> None:
        seconds = promised.seconds + self._slack_seconds + 10.0
        failed = self._client.wait(InstanceFailed, before.id, attempt=before.attempt, seconds=seconds)
        result.failure = failed.failure
        result.seconds = time.monotonic() - begin

    def _wait_again(self, before: Instance, begin: float, result: Result) -> None:
        """Wait until the instance is ready, on the same attempt or the next, and answers if it is a model."""

        def ready() -> bool:
            now = self._client.latest.instances.get(before.id)
            return now is not None and isinstance(now.status, Running) and self._is_next(before, now, result)

        self._client.wait_for(ready, "the instance is not ready again", _RECOVERY_SECONDS)
        if isinstance(before.spec.workload, ModelWorkload):
            request = Generate(instance="matrix", prompt="again", sampling=SamplingParams(max_tokens=1))
            answer = Asked(self._client, request, _RECOVERY_SECONDS).wait(_RECOVERY_SECONDS + 1.0)
            assert answer is Answer.DONE, f"a new request is {answer.value}"
        result.again_seconds = time.monotonic() - begin

    def _is_next(self, before: Instance, now: Instance, result: Result) -> bool:
        return now.attempt > before.attempt or result.failure is None

    def _wait_nodes(self) -> None:
        """All workers are there again."""

        def there() -> bool:
            nodes = self._client.latest.nodes
            return all(nodes[NodeId(name)].lost is None for name in self.ground.nodes)

        self._client.wait_for(there, "a node does not come back", _RECOVERY_SECONDS)

    def _delete(self) -> None:
        """Delete the instance, and see that nothing of it is left."""
        if (instance := self._instance) is None:
            return
        self._instance = None
        if instance in self._client.latest.instances:
            self._client.call(Delete(instance=instance, now=True))
            self._client.wait_for(lambda: instance not in self._client.latest.instances, "the instance is not deleted")
        until(lambda: not leftovers(self.ground, set()), "nothing left of the deleted instance", _LEFTOVER_SECONDS)

    def _look_for_leftovers(self, before: Instance, pids: list[int], result: Result) -> None:
        """Nothing is there but the ranks of the attempt that is ready now."""
        now = self._client.instance(before.id)
        ranks = () if all_gone(now) else now.ranks
        wanted = {rank.pid for rank in ranks}
        held = {address for rank in ranks for address in rank.addresses}
        ports = [(rank.node, address) for rank in before.ranks for address in rank.addresses if address not in held]
        gone = [pid for pid in pids if pid not in wanted]
        try:
            until(lambda: not leftovers(self.ground, wanted, ports, gone), "", _LEFTOVER_SECONDS)
        except AssertionError:
            result.wrong.append(f"left: {', '.join(leftovers(self.ground, wanted, ports, gone))}")


def _told(envelope: Envelope) -> str:
    """An event in one line: when (seconds within the minute), what, and whatever it says."""
    event = envelope.event()
    return f"{envelope.time_ns / 1e9 % 60:7.3f} {kind_of(event)} {event}"


@contextlib.contextmanager
def laboratory(made: Loopback | Hosts, directory: Path, slack_seconds: float) -> Generator[Laboratory]:
    """A cluster whose runners have gates, a client of it, and nothing left at the end."""
    gates = Gates(directory)
    with contextlib.ExitStack() as stack:
        stack.enter_context(gates.built_in())
        ground = stack.enter_context(made.opened())
        zmq.asyncio.Context.instance().destroy(linger=0)  # its threads are where they were made
        with ground.beside_coordinator():
            client = stack.enter_context(Client(ground.cluster.address))
        playing = Laboratory(ground, gates, client, slack_seconds)
        yield playing
        playing.close()
    zmq.asyncio.Context.instance().destroy(linger=0)
