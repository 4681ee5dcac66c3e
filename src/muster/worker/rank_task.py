"""One rank's life on its node: take a runner, reserve ports, form, report, and leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio
import msgspec
from loguru import logger

from muster.bus import Outbox
from muster.errors import MusterError
from muster.group.ports import Reservation
from muster.group.scope import owner_alive, sweep
from muster.protocol import Progress
from muster.rank_protocol import (
    ConnectedFrame,
    FetchedFrame,
    Form,
    GatherFrame,
    LoadedFrame,
    PreparedFrame,
    ProgressFrame,
    ReadyFrame,
    Redial,
)
from muster.spec import Address, Failure, ModelWorkload, Phase, ScriptWorkload
from muster.state import Assigned, Connected, Listening, Prepared, State
from muster.worker import diagnosis, group_plan, jaccl, unburied
from muster.worker.condition import Condition, watch
from muster.worker.dialling import all_prepared, listening, listens_first, wait_listening
from muster.worker.drain import drain
from muster.worker.line import Line, RankError, RunnerEndedError
from muster.worker.pool import RunnerPool
from muster.worker.preparation import preparation
from muster.worker.process import RunnerProcess
from muster.worker.reporter import Reporter
from muster.worker.site import Site
from muster.worker.waiting import LateError, expect
from muster.worker.watch import Place, StateWatch
from muster.worker.watchdog import StuckError, watch_steps

#: How long the word that an instance is to end may take from one node to all others.
_WORD_SECONDS = 1.0
#: How long the last output of a rank may take to reach the outbox before its end is reported anyway.
_LAST_OUTPUT_SECONDS = 5.0


F = TypeVar("F")


class RankTask:
    """Runs one rank from its assignment to the report that its process is gone."""

    def __init__(self, place: Place, site: Site, pool: RunnerPool, watch: StateWatch, outbox: Outbox) -> None:
        self.place = place
        self.ended = anyio.Event()
        self.progress: Progress | None = None  #: what the heartbeat tells of it
        self._site = site
        self._pool = pool
        self._watch = watch
        self._scope = anyio.CancelScope()
        self._phase = Phase.PREPARING
        self._reporter = Reporter(place, site.info, outbox)
        self._reservations: list[Reservation] = []
        self._addresses: tuple[Address, ...] = ()
        self._runner: RunnerProcess | None = None
        self._relay = jaccl.Relay(place, outbox.client)
        self._links = 1
        self._generation = site.generation
        self._dialled = site.generation  #: what the runner was told
        self._formed = False  #: before that it reads no frame but the one that it waits for
        self._hurrying = False
        self._stuck = False
        self._worker_stops = anyio.Event()

    async def redial(self, generation: str) -> None:
        """Another coordinator has taken over: rank 0 of a model takes its requests from that one's gateway."""
        self._generation = generation
        leads = self.place.rank == 0 and isinstance(self.place.spec.workload, ModelWorkload)
        if leads and self._runner is not None and self._formed and generation != self._dialled:
            self._dialled = generation
            await self._runner.send(Redial(generation=generation))

    def adopted(self, sequence: int) -> None:
        """Another log has taken the rank over with this event: what it reports from now on follows from that."""
        self._reporter.cause = sequence

    @property
    def memory_bytes(self) -> int:
        """Memory of the rank's runner, 0 where it has none."""
        runner = self._runner
        return 0 if runner is None or runner.ended else runner.used_bytes()

    def stop(self) -> None:
        """The worker itself is being stopped: the rank fails with that as the cause."""
        self._worker_stops.set()
        self._scope.cancel()

    async def run(self) -> None:
        """Live, and report; on cancellation too, nothing is left and the end is reported."""
        self._hurry(True)
        # What the rank printed outlives the rank by a moment: its last lines say why it ended.
        async with anyio.create_task_group() as self._output:
            try:
                await self._run()
            except Exception as error:  # the outermost edge of a rank: the worker and its other ranks go on
                logger.exception("{} failed in the worker itself", self.place)
                cause: BaseException = error
                while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
                    cause = cause.exceptions[0]
                message = f"{type(cause).__name__}: {cause}"
                self._fail(_failure("internal", message, "See the worker's log, and report it."))
            finally:
                with anyio.CancelScope(shield=True):
                    if self._worker_stops.is_set():
                        self._fail(_failure("worker-stopped", "its worker was stopped", "Start the worker again."))
                    await self._tear_down()
                    self.ended.set()
            self._output.cancel_scope.cancel()

    async def _run(self) -> None:
        with self._scope:
            async with anyio.create_task_group() as group:
                group.start_soon(self._leave_when_unwanted)
                await self._live()
                group.cancel_scope.cancel()

    async def _leave_when_unwanted(self) -> None:
        await self._watch.until(lambda state: not self.place.wanted(state))
        self._scope.cancel()

    async def _live(self) -> None:
        try:
            try:
                line = await self._take_runner()
                await self._prepare(line)
                await self._form(line)
                await self._bring_up(line)
                await self._stay(line)
            except RunnerEndedError:
                await self._judge_end()
            except MusterError as error:
                raise RankError(diagnosis.failure_of(error)) from error
        except RankError as error:
            self._stuck = isinstance(error, StuckError)
            self._fail(error.failure)

    # --- preparing ----------------------------------------------------------------------------------------

    async def _take_runner(self) -> Line:
        for address in group_plan.endpoints(self.place, self._site.info):
            reservation = self._site.reserve(address.host)
            self._reservations.append(reservation)
            self._addresses += (Address(address.host, reservation.port, address.network),)
        seconds = self.place.spec.deadlines.prepare_seconds
        runner = self._runner = await self._pool.take(full=isinstance(self.place.spec.workload, ModelWorkload))
        runner.roams = isinstance(self.place.spec.workload, ScriptWorkload)
        watched = watch(runner.pid, runner.started)
        line = Line(runner, self._watch)
        self._output.start_soon(self._reporter.pump, runner)
        with anyio.move_on_after(seconds):
            if not await runner.wait_warm():
                await line.receive()  # raises what the runner said last, or that it ended
        if runner.warm is None:
            what = "the runner did not start within"
            raise RankError(diagnosis.late(await watched.condition(), seconds, what=what, shared=False))
        return line

    async def _prepare(self, line: Line) -> None:
        self._dialled = self._generation
        await line.runner.send(preparation(self.place, self._site, self._dialled))
        frame = await self._expect(line, PreparedFrame, self.place.spec.deadlines.prepare_seconds)
        self._reporter.prepared(line.runner, self._addresses, frame.steps)

    # --- forming ------------------------------------------------------------------------------------------

    async def _form(self, line: Line) -> None:
        seconds = self.place.spec.deadlines.form_seconds
        if self.place.world_size == 1:
            self._phase = Phase.FORMING
            await line.runner.send(Form())
        else:
            # The others' workers watch over the others: no deadline of this rank's own until it can act.
            self._reporter.cause = await line.until(lambda state: all_prepared(self.place, state))
            self._phase = Phase.FORMING
            if first := listens_first(self.place):
                self._reporter.cause = await line.until(lambda state: listening(self.place, state, first))
            begin = time.monotonic()
            self._relay.due = anyio.current_time() + seconds
            await self._send_form(line.runner)
            addresses = [(address.host, address.port) for address in self._addresses]
            try:
                await wait_listening(line, self.place, addresses, self._links, self._reporter.listening)
            except LateError as error:
                raise RankError(self._late(line.runner, seconds, error)) from error
            seconds -= time.monotonic() - begin
        frame = await self._expect(line, ConnectedFrame, seconds)
        self._reporter.connected(frame.seconds)
        self._formed = True
        await self.redial(self._generation)
        self._release_ports()

    async def _send_form(self, runner: RunnerProcess) -> None:
        ranks = self.place.ranks(self._watch.state)
        if not ranks:
            await anyio.sleep_forever()  # unwanted by now: `_leave_when_unwanted` cancels this
        payload = group_plan.payload(self.place, ranks)
        self._links = group_plan.links(payload)
        body = msgspec.msgpack.encode(payload)
        await runner.send(Form(payload=body, steps=ranks[0].steps))

    def _gather(self, frame: GatherFrame) -> None:
        """The runner waits for the answer, and the reader of its frames must not: the process may end meanwhile."""
        if self._runner is not None:
            self._output.start_soon(self._relay.carry, frame, self._runner)

    def _not_formed(self, runner: RunnerProcess, condition: Condition) -> Failure:
        seconds = self.place.spec.deadlines.form_seconds
        ranks = self.place.ranks(self._watch.state)
        if not ranks:  # the attempt is over, and this rank about to be cancelled
            return _failure("formation-timeout", f"the group was not formed within {seconds:g} s", "")
        if self.place.backend == "jaccl":
            return jaccl.not_formed(self.place, ranks, seconds, condition, came=self._relay.came)
        return diagnosis.not_formed(ranks[self.place.rank], ranks, runner.pid, seconds, condition)

    # --- loading, warming, running ------------------------------------------------------------------------

    async def _bring_up(self, line: Line) -> None:
        deadlines = self.place.spec.deadlines
        if isinstance(self.place.spec.workload, ModelWorkload):
            self._phase = Phase.LOADING
            frame = await self._expect(line, LoadedFrame, deadlines.load_seconds)
            self._reporter.loaded(frame)
        self._phase = Phase.WARMING
        await self._expect(line, ReadyFrame, deadlines.warm_seconds, starts=self._all_loaded)
        self._phase = Phase.RUNNING
        self.progress = None
        self._reporter.ready()
        self._hurry(False)

    def _all_loaded(self, state: State) -> bool:
        if not isinstance(self.place.spec.workload, ModelWorkload):
            return True
        return not any(
            isinstance(rank.state, Assigned | Prepared | Listening | Connected) for rank in self.place.ranks(state)
        )

    async def _stay(self, line: Line) -> None:
        """Run until the runner ends; a script for no longer than it may, a model while its steps end in time."""
        workload = self.place.spec.workload
        limit = workload.run_seconds if isinstance(workload, ScriptWorkload) else None
        with anyio.move_on_after(limit if limit is not None else float("inf")):
            try:
                if isinstance(workload, ModelWorkload):
                    await watch_steps(line, self.place)
                await line.receive()
            except RunnerEndedError:
                await line.runner.wait_ended()  # a script may close the line and go on
                raise
        message = f"the script still runs after {limit or 0:g} s"
        raise RankError(_failure("deadline-passed", message, "Raise --timeout, or see why it hangs: muster logs"))

    # --- frames -------------------------------------------------------------------------------------------

    async def _expect(
        self, line: Line, kind: type[F], seconds: float, starts: Callable[[State], bool] = lambda state: True
    ) -> F:
        try:
            return await expect(
                line,
                self.place,
                kind,
                seconds,
                starts=starts,
                on_progress=self._note,
                on_gather=self._gather,
                on_fetched=self._fetched,
            )
        except LateError as error:
            raise RankError(self._late(line.runner, seconds, error)) from error

    def _fetched(self, frame: FetchedFrame) -> None:
        self._reporter.fetched(frame)
        if self._site.on_fetched is not None:
            self._site.on_fetched()

    def _note(self, frame: ProgressFrame) -> None:
        self.progress = Progress(
            instance=self.place.id,
            attempt=self.place.attempt,
            rank=self.place.rank,
            phase=frame.phase,
            done=frame.done,
            total=frame.total,
            unit=frame.unit,
            rate=frame.rate,
            note=frame.note,
        )

    def _late(self, runner: RunnerProcess, seconds: float, error: LateError) -> Failure:
        forms = self._phase is Phase.FORMING and self.place.world_size > 1
        if error.alarmed:
            return diagnosis.awaited("formation-timeout" if forms else "deadline-passed", error.condition)
        if forms:
            return self._not_formed(runner, error.condition)
        # Warming up is the first thing that the ranks of a model do together.
        together = self._phase is Phase.WARMING and isinstance(self.place.spec.workload, ModelWorkload)
        shared = together and self.place.world_size > 1
        return diagnosis.late(error.condition, seconds, what="no progress for", shared=shared)

    # --- the end ------------------------------------------------------------------------------------------

    async def _judge_end(self) -> None:
        assert self._runner is not None
        seconds = self.place.spec.deadlines.stop_seconds
        with anyio.move_on_after(seconds) as scope:
            await self._runner.wait_ended()
        if scope.cancelled_caught:
            condition = await watch(self._runner.pid, self._runner.started).condition()
            message = f"the runner closed its line to the worker and did not end within {seconds:g} s; {condition.text}"
            raise RankError(_failure("rank-exited", message, condition.remedy or "See its output: muster logs"))
        code = await self._runner.wait_ended()
        await self._output_sent()
        script = isinstance(self.place.spec.workload, ScriptWorkload)
        if code == 0 and self._phase is Phase.RUNNING and not script:
            with anyio.move_on_after(_WORD_SECONDS):  # rank 0 has heard first that the instance is to end
                await anyio.sleep_forever()  # `_leave_when_unwanted` cancels this
        if not (script and self._phase is Phase.RUNNING and code == 0):
            ranks = self.place.world_size
            ended = diagnosis.ended(code, self._runner.tail, script=script, phase=self._phase, ranks=ranks)
            raise RankError(jaccl.crashed(ended) if self.place.backend == "jaccl" else ended)

    async def _output_sent(self) -> None:
        """Wait a moment for what the runner printed last."""
        with anyio.move_on_after(_LAST_OUTPUT_SECONDS):
            await self._reporter.pumped.wait()

    def _fail(self, failure: Failure) -> None:
        remedy = failure.remedy.replace("muster logs", f"muster logs {self.place.id}")
        failure = msgspec.structs.replace(
            failure, rank=self.place.rank, node=self._site.info.node, phase=self._phase, remedy=remedy
        )
        self._reporter.failed(failure)

    async def _tear_down(self) -> None:
        """The process is gone, its output is on its way, its file and ports are free: only then say so."""
        self._hurry(False)
        code: int | None = None
        left: list[str] = []
        runner = self._runner
        if runner is not None:
            script = isinstance(self.place.spec.workload, ScriptWorkload)
            asks = self._phase is Phase.RUNNING and not script and not self._stuck
            if asks:
                await drain(runner, self.place, self._watch, self._worker_stops)
            seconds = self.place.spec.deadlines.stop_seconds
            remains = await self._pool.end(runner, ask=asks, patience_seconds=seconds)
            ports = [(address.host, address.port) for address in self._addresses]
            left = [await unburied.describe(process, runner.pid, ports) for process in remains]
            code = runner.exit_code
            if runner.ended:
                await self._output_sent()
        with suppress(OSError):  # the file of a process that does not end is of no use to anybody
            sweep(self._site.directory, alive=lambda pid, at: not self._is_ours(pid) and owner_alive(pid, at))
        self._release_ports()
        self._reporter.gone(code, "; ".join(left), unburied.REMEDY.format(node=self._site.info.node) if left else "")

    def _is_ours(self, pid: int) -> bool:
        return self._runner is not None and self._runner.pid == pid

    def _release_ports(self) -> None:
        while self._reservations:
            self._reservations.pop().close()

    def _hurry(self, wanted: bool) -> None:
        if wanted == self._hurrying:
            return
        self._hurrying = wanted
        if wanted:
            self._pool.hurry()
        else:
            self._pool.relax()


def _failure(kind: str, message: str, remedy: str) -> Failure:
    return Failure(kind=kind, message=message, remedy=remedy, retryable=True)
