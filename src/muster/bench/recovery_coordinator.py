"""Rounds in which the coordinator is killed: what is lost, and what subscribers saw that its log does not have."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import zmq

from muster.bench.ground import Ground
from muster.bench.leftovers import is_alive
from muster.bench.load import Ask, ask
from muster.bench.observer import BenchError
from muster.bench.recovery_figures import SERVING, Findings, check_log
from muster.bus import RefusedError
from muster.bus.sockets import MAXIMUM_ANSWER_BYTES, open_socket, receive
from muster.errors import MusterError, UnreachableError
from muster.eventlog.sqlite import SqliteEventLog
from muster.events import decode_envelope, encode_envelope
from muster.protocol import Create, Delete
from muster.replies import TOPIC_BEAT, TOPIC_EVENT, Accepted, Created
from muster.spec import GroupWorkload, InstanceSpec
from muster.state import Instance

_SECONDS = 60.0
_POLL_SECONDS = 0.01
_QUEUED_EVENTS = 100_000
_READ_EVENTS = 1_000
#: A lost connection is made again at once: a life is short.
_RECONNECT_MILLISECONDS = 20
#: How long a coordinator lives at most: after the subscriber has heard of it, or of those killed early from the start.
_LIFE_SECONDS = 1.2
_HEARD_SECONDS = 3.0
_START_SECONDS = 1.0
#: One in so many is killed while it starts.
_EARLY = 4
_CHURNERS = 2
_CHURN_CALL_SECONDS = 1.0
_CHURN_PAUSE_SECONDS = 0.1
_CHURN_GONE_SECONDS = 10.0

Say = Callable[[str], None]


async def kill_coordinator(ground: Ground, number: int, findings: Findings, instance: Instance) -> None:
    """SIGKILL the coordinator, start it again, and ask the model until it answers.

    Args:
        ground: With a ready model, called "demo".
        number: Of the round.
        findings: Are added to.
        instance: The model, as it was when it became ready.

    Raises:
        BenchError: nothing answers.
    """
    observer = ground.observer
    boot = observer.state.coordinator_boot
    runners = ground.descendants()
    await ground.kill("coordinator")
    began = time.perf_counter()
    ground.tasks.start_soon(_start, ground)
    answered: float | None = None
    error = "no answer"
    with anyio.move_on_after(_SECONDS):
        while answered is None:
            reading = await ask(ground.target("demo"), Ask(messages=(("user", "What is a rank?"),), max_tokens=4))
            error = reading.error
            if not error and reading.first_seconds is not None:
                answered = reading.began_seconds + reading.first_seconds
            else:
                await anyio.sleep(_POLL_SECONDS)
    now = await observer.wait_state(
        lambda state: state.instances.get(instance.id) if state.coordinator_boot != boot else None,
        "the next coordinator is not heard of",
        deadline_seconds=_SECONDS,
    )
    await ground.all_serve()
    lost = sum(not is_alive(*runner) for runner in runners)
    findings.runners_lost = (findings.runners_lost or 0) + lost
    before, after = ([(rank.pid, rank.process_started) for rank in one.ranks] for one in (instance, now))
    if answered is None:
        findings.complain((SERVING,), number, f"nothing was answered within {_SECONDS:g} s: {error}")
    elif lost or before != after or now.attempt != instance.attempt:
        findings.complain((SERVING,), number, f"{lost} runners are lost, attempt {now.attempt} has {after}")
    else:
        findings.add("the coordinator killed", number, {SERVING: answered - began})


async def _start(ground: Ground) -> None:
    with contextlib.suppress(UnreachableError):  # the round tells that nothing answers
        await ground.start_coordinator()


# --- what subscribers saw -----------------------------------------------------------------------------------


class Subscriber:
    """A plain SUB socket: what was published, byte for byte, by sequence."""

    def __init__(self) -> None:
        self.seen: dict[int, set[bytes]] = {}
        self.heard = anyio.Event()  #: anything, since somebody replaced this

    async def run(self, port: int, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Subscribe, and listen until cancelled."""
        socket = open_socket(
            zmq.SUB, receive_messages=_QUEUED_EVENTS, send_messages=_QUEUED_EVENTS, maximum_bytes=MAXIMUM_ANSWER_BYTES
        )
        try:
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MILLISECONDS)
            socket.subscribe(TOPIC_EVENT)
            socket.subscribe(TOPIC_BEAT)
            socket.connect(f"tcp://127.0.0.1:{port}")
            task_status.started()
            while True:
                frames = await receive(socket)
                if frames[0] == TOPIC_EVENT:
                    self.seen.setdefault(decode_envelope(frames[1]).sequence, set()).add(frames[1])
                self.heard.set()
        finally:
            socket.close()


async def kill_often(ground: Ground, kills: int, seed: int, say: Say, findings: Findings) -> None:
    """Kill the coordinator at random moments under churn, and compare what was seen with what is in its log.

    Raises:
        UnreachableError: it did not start again.
        LogError: the log cannot be read.
    """
    chance = random.Random(seed)
    subscriber = Subscriber()
    await ground.tasks.start(subscriber.run, ground.ports[1])
    async with anyio.create_task_group() as churn:
        for _ in range(_CHURNERS):
            churn.start_soon(_churn, ground)
        for number in range(1, kills + 1):
            say(f"kill {number} of {kills} of the coordinator; {len(subscriber.seen)} events seen")
            await _live_and_die(ground, subscriber, chance)
        churn.cancel_scope.cancel()
    if ground.cluster.members["coordinator"].process.poll() is not None:
        await ground.start_coordinator()
    await ground.observer.wait_state(
        lambda state: state.sequence >= max(subscriber.seen, default=0) or None,
        "the last coordinator has not what was seen",
        deadline_seconds=_SECONDS,
    )
    await ground.observer.delete_all(deadline_seconds=_SECONDS)
    await ground.kill("coordinator")
    seen = {sequence: set(payloads) for sequence, payloads in subscriber.seen.items()}
    logged = await anyio.to_thread.run_sync(_logged, ground)
    findings.log = check_log(kills, seen, logged)
    await ground.start_coordinator()


async def _live_and_die(ground: Ground, subscriber: Subscriber, chance: random.Random) -> None:
    """One life of the coordinator: at its end it is dead, and the next one may start."""
    running = ground.cluster.members["coordinator"].process.poll() is None
    if not running and chance.randrange(_EARLY) == 0:
        async with anyio.create_task_group() as group:
            group.start_soon(_start, ground)
            await anyio.sleep(chance.uniform(0.05, _START_SECONDS))
            group.start_soon(ground.kill, "coordinator")
        return
    if not running:
        subscriber.heard = anyio.Event()
        await ground.start_coordinator()
    with anyio.move_on_after(_HEARD_SECONDS):
        await subscriber.heard.wait()
    await anyio.sleep(chance.uniform(0.0, _LIFE_SECONDS))
    await ground.kill("coordinator")


async def _churn(ground: Ground) -> None:
    """Create groups and delete them again, asking as often as it takes."""
    spec = InstanceSpec(workload=GroupWorkload(), ranks=2)
    while True:
        request = Create(spec=spec, key=secrets.token_hex(8))
        created = await _insist(partial(ground.observer.ask, request, Created, timeout_seconds=_CHURN_CALL_SECONDS))
        await anyio.sleep(_CHURN_PAUSE_SECONDS)
        if created is not None:
            wish = Delete(instance=created.instance)
            await _insist(partial(ground.observer.ask, wish, Accepted, timeout_seconds=_CHURN_CALL_SECONDS))
            with contextlib.suppress(BenchError):  # so that they do not pile up
                await ground.observer.wait_gone(created.instance, deadline_seconds=_CHURN_GONE_SECONDS)


async def _insist(call: Callable[[], Awaitable[msgspec.Struct]]) -> Created | None:
    """Ask until there is an answer; `None` where it is a refusal."""
    while True:
        try:
            answer = await call()
        except RefusedError:
            return None
        except MusterError:
            continue
        return answer if isinstance(answer, Created) else None


def _logged(ground: Ground) -> dict[int, bytes]:
    """Every event of the log as it would be published, by sequence."""
    log = SqliteEventLog(ground.cluster.directory / "coordinator" / "events.db")
    try:
        found: dict[int, bytes] = {}
        after = log.oldest - 1
        while envelopes := log.read(after, _READ_EVENTS):
            found |= {envelope.sequence: encode_envelope(envelope) for envelope in envelopes}
            after = envelopes[-1].sequence
        return found
    finally:
        log.close()
