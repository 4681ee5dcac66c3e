"""The life of a runner: warm up, take a rank, form its group, run its workload, end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import msgspec
import psutil

from muster.errors import MusterError, ProtocolError, RdmaError, sentence
from muster.group.payload import Payload
from muster.group.remedies import explain_later
from muster.group.verify import own_identity
from muster.rank_protocol import ConnectedFrame, FailedFrame, Form, Prepare, WarmFrame
from muster.runner import warmth
from muster.runner.context import RankContext, RankWorkload
from muster.runner.counter import StepCounter
from muster.runner.frames import Channel
from muster.runner.parent import die_with
from muster.runner.side_channel import SideChannelError, bus_gather
from muster.spec import Failure, GroupWorkload, ModelWorkload, Phase, ScriptWorkload

#: Names a file, for machines without RDMA: a stand-in takes the place of MLX's JACCL (`muster.testing.jaccl`).
TESTING_JACCL = "MUSTER_TESTING_JACCL"
#: Added to the worker's own deadline before the C-level watchdog ends the process, in seconds.
WATCHDOG_GRACE_SECONDS = 2.0


def main(descriptor: int, parent_pid: int, *, full: bool, counter: int | None = None, measure: bool = False) -> None:
    """Run as a runner on the worker's socket `descriptor`; never returns.

    `counter` is the descriptor of the memory in which the worker sees the rank's step.
    `full` imports mlx-lm as well, which a model needs and which takes most of a runner's start. `measure` also says how
    fast memory is.
    """
    die_with(parent_pid)
    # The worker decides when a runner ends: Ctrl-C in a shared terminal must not reach it first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    os.set_inheritable(descriptor, False)
    steps: StepCounter | None = None
    if counter is not None:
        steps = StepCounter(counter)
        os.close(counter)
    code = 1
    context: RankContext | None = None
    try:
        channel.send(_warm(full=full, measure=measure))
        first = channel.receive()
        if first is None or not isinstance(first, Prepare):
            os._exit(0)
        os.environ.update(first.environment)
        context = RankContext(channel, first, steps)
        workload = _workload(context)
        channel.send(workload.prepare())
        second = channel.receive()
        if second is None or not isinstance(second, Form):
            os._exit(0)
        context.phase = Phase.FORMING
        code = _form_and_run(workload, context, second)
    except SideChannelError as error:
        _fail(channel, context, error.failure)
    except MusterError as error:
        _fail(channel, context, _failure_of(error))
    except Exception as error:  # the outermost edge of the process: whatever it is, the worker hears of it
        traceback.print_exc()
        _fail(channel, context, unexpected(error, context.prepare.world_size if context is not None else 1))
    _exit(code)


def _exit(code: int) -> None:
    """End without the interpreter's teardown, which joins MLX's threads and may wait for a dead peer."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a script may have closed it, or put anything in its place
            stream.flush()
    os._exit(code)


def _warm(*, full: bool, measure: bool) -> WarmFrame:
    begin = time.perf_counter()
    warmth.warm_up(full=full)
    if devices := os.environ.get(TESTING_JACCL):
        from muster.testing import jaccl

        jaccl.install(Path(devices))
    from muster.group.formation import available_backends

    return WarmFrame(
        seconds=time.perf_counter() - begin,
        memory_bytes=psutil.Process().memory_info().rss,
        backends=available_backends(),
        versions=versions(),
        memory_gbps=warmth.memory_gbps() if measure else None,
        device=warmth.device() if measure else "",
    )


def versions() -> dict[str, str]:
    """The versions that must agree between the ranks of a group, as `verify` compares them."""
    mine = own_identity("", 0, 0, 1, "")
    return {"muster": mine.muster, "python": mine.python, "mlx": mine.mlx, "mlx-lm": mine.mlx_lm}


def _workload(context: RankContext) -> RankWorkload:
    match context.prepare.workload:
        case ModelWorkload() as model:
            from muster.runner.model_rank import ModelRank

            return ModelRank(context, model)
        case ScriptWorkload() as script:
            from muster.runner.script_rank import ScriptRank

            return ScriptRank(context, script)
        case GroupWorkload():
            from muster.runner.group_rank import GroupRank

            return GroupRank(context)


def _form_and_run(workload: RankWorkload, context: RankContext, form: Form) -> int:
    channel, prepare = context.channel, context.prepare
    if form.payload is None:
        channel.send(ConnectedFrame(seconds=0.0))
        return workload.run(None, form)
    from muster.group import formation, verify

    try:
        payload: Payload = msgspec.msgpack.decode(form.payload, type=Payload)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the payload cannot be decoded: {error}") from error
    # Before MLX has the neighbours: a rank that comes late to the exchange makes the others spin.
    mine = verify.own_identity(
        prepare.instance, prepare.attempt, prepare.rank, prepare.world_size, workload.fingerprint()
    )
    begin = time.perf_counter()
    faulthandler.dump_traceback_later(prepare.shared_seconds + WATCHDOG_GRACE_SECONDS, exit=True)
    # The scope outlives formation: a script may read its variables, and `_exit` runs no cleanup of its own.
    gather = bus_gather(channel) if prepare.side_channel == "bus" else None
    with formation.group_scope(payload, directory=Path(prepare.directory), gather=gather) as formed:
        warmth.formed()
        verify.check(mine, verify.exchange(formed.group, mine))
        faulthandler.cancel_dump_traceback_later()
        channel.send(ConnectedFrame(seconds=time.perf_counter() - begin))
        if not isinstance(prepare.workload, ScriptWorkload):
            formed.close()
        return workload.run(formed.group, form)


def _fail(channel: Channel, context: RankContext | None, failure: Failure) -> None:
    if context is not None:
        failure = msgspec.structs.replace(failure, rank=context.prepare.rank, phase=context.phase)
    try:
        channel.send(FailedFrame(failure=failure))
    except OSError:
        sys.stderr.write(f"muster: the worker is gone; nobody hears that {failure.sentence()}\n")


def _failure_of(error: MusterError) -> Failure:
    return Failure(
        kind=error.kind,
        message=error.message,
        remedy=error.remedy,
        retryable=error.retryable,
        secondary=is_echo(error.message),
    )


def unexpected(error: Exception, ranks: int) -> Failure:
    """An error that nobody raised on purpose, in a group of so many ranks; what MLX says of the group is explained."""
    text = f"{type(error).__name__}: {error}"
    known = explain_later(text, ranks=ranks)
    if known is not None and known.lasting and "[jaccl]" in text:
        return _failure_of(RdmaError(f"{known.cause}; MLX says: {error}", remedy=known.remedy))
    if known is not None:
        return Failure(
            kind="peer-lost" if known.echo else "internal",
            message=f"{known.cause}; MLX says: {error}",
            remedy=sentence(known.remedy),
            retryable=True,
            secondary=known.echo,
        )
    return Failure(
        kind="internal",
        message=text,
        remedy="See the runner's output: muster logs",
        retryable=True,
    )


def is_echo(text: str) -> bool:
    """Whether an MLX error says no more than that another rank ended.

    Source: mlx/distributed/ring/ring.cpp; mlx/distributed/jaccl/lib/jaccl/tcp.cpp (the side channel), and mesh.cpp and
    ring.cpp there (a connection that broke).
    """
    found = re.search(r"connection to a peer was lost|\[jaccl\] (Recv|Send) failed(:| with (errno=|error code ))", text)
    return found is not None
