"""What a worker concludes from how a runner ended, or did not get on."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from muster.errors import MusterError, sentence
from muster.group.listening import has_connection, is_listening, strangers
from muster.group.remedies import Entry, explain_later
from muster.runner.main import is_echo
from muster.spec import Failure, Phase
from muster.state import Failed, Listening, Rank
from muster.worker.condition import Condition

#: Failures of ranks that were late.
TIMEOUTS = ("formation-timeout", "deadline-passed", "step-timeout")
#: Lines of output that a failure quotes.
TAIL_LINES = 8


def failure_of(error: MusterError) -> Failure:
    """The error as a failure: of a request, or of a rank in whichever phase it is."""
    return Failure(kind=error.kind, message=error.message, remedy=error.remedy, retryable=error.retryable)


def ended(exit_code: int, tail: Sequence[str], *, script: bool, phase: Phase, ranks: int = 1) -> Failure:
    """Why a runner ended by itself, from its exit code (minus the signal's number) and its last lines.

    What MLX says there of the group, which has so many ranks, is explained: the last of it, or what lasts.
    """
    lines = tuple(tail)[-TAIL_LINES:]
    known = _explained(lines, ranks)
    echo = known.echo if known is not None else any(is_echo(line) for line in lines)
    if exit_code < 0:
        name = _signal_name(-exit_code)
        return Failure(
            kind="rank-killed",
            message=f"the runner was ended by {name}",
            remedy="Out of memory is a frequent reason for SIGKILL: see the system's log."
            if exit_code == -signal.SIGKILL
            else "See its output: muster logs",
            exit_code=exit_code,
            retryable=True,
            log_tail=lines,
        )
    running = script and phase is Phase.RUNNING
    what = f"the {'script' if running else 'runner'} ended {'' if running else 'by itself '}with exit code {exit_code}"
    lasting = known is not None and known.lasting
    kind = "rdma-unusable" if lasting else "peer-lost" if echo else "script-failed" if running else "rank-exited"
    return Failure(
        kind=kind,
        message=f"{what}: {known.cause}" if known is not None else what,
        remedy=sentence(known.remedy) if known is not None else "See its output: muster logs",
        exit_code=exit_code,
        retryable=not lasting,
        secondary=echo,
        log_tail=lines,
    )


def _explained(lines: Sequence[str], ranks: int) -> Entry | None:
    """What is known of the last line that MLX wrote of the group; before it comes what cannot pass by itself."""
    found: Entry | None = None
    for line in reversed(lines):
        entry = explain_later(line, ranks=ranks)
        if entry is not None and entry.lasting and "[jaccl]" in line:
            return entry
        found = found or (entry if entry is not None and not entry.lasting else None)
    return found


def others_late(ranks: Sequence[Rank], rank: int) -> list[Failure]:
    """What other ranks said that were late for no reason of their own: it may be `rank` that they wait for."""
    return [
        other.state.failure
        for other in ranks
        if isinstance(other.state, Failed)
        and other.state.failure.secondary
        and other.state.failure.kind in TIMEOUTS
        and other.rank != rank
    ]


def late(condition: Condition, seconds: float, *, what: str, shared: bool) -> Failure:
    """A phase that did not end in time. `shared` is one in which a rank that runs waits for the others."""
    runs = "its process runs" + (" and waits for another rank" if shared else "")
    return Failure(
        kind="deadline-passed",
        message=f"{what} {seconds:g} s: {condition.text if condition.hindered else runs}",
        remedy=condition.remedy or "Raise the deadline of this phase, or see: muster logs",
        retryable=True,
        secondary=shared and not condition.hindered,
    )


def awaited(kind: str, condition: Condition) -> Failure:
    """Another rank is late, and this one is the reason."""
    message = f"another rank waits for this one, and {condition.text}"
    return Failure(kind=kind, message=message, remedy=condition.remedy, retryable=True)


def not_formed(
    rank: Rank, ranks: Sequence[Rank], pid: int, seconds: float, condition: Condition | None = None
) -> Failure:
    """Why a group was not formed in time: this rank cannot go on, a stranger is on its port, or others are late."""
    if condition is not None and condition.hindered:
        return Failure(
            kind="formation-timeout",
            message=f"the group was not formed within {seconds:g} s: {condition.text}",
            remedy=condition.remedy,
            retryable=True,
        )
    left = ranks[rank.rank - 1]
    addresses = [(address.host, address.port) for address in rank.addresses]
    same_machine = {address.host for address in left.addresses} & {address.host for address in rank.addresses}
    found = strangers(
        pid, addresses, {address.host for address in left.addresses}, [left.pid] if same_machine and left.pid else None
    )
    if not found and isinstance(rank.state, Listening) and not is_listening(pid, addresses):
        # MLX stops listening when somebody has connected; a neighbour would still be there.
        found = [] if has_connection(pid, addresses) else ["somebody who is gone again"]
    if found:
        ports = ", ".join(str(address) for address in rank.addresses)
        return Failure(
            kind="stranger-connected",
            message=f"{', '.join(found)} connected to the rank's port ({ports}) before its neighbour did",
            remedy="Keep port scanners and other programs away from these ports, and try again.",
            retryable=True,
        )
    dialled = ranks[(rank.rank + 1) % len(ranks)]
    return Failure(
        kind="formation-timeout",
        message=f"the group was not formed within {seconds:g} s; this rank waits for rank {left.rank} on node "
        f"{left.node} to dial it, or for rank {dialled.rank} on node {dialled.node} to take its connection",
        remedy="Check that the nodes reach each other on all TCP ports (a firewall?), and that no process is stopped.",
        retryable=True,
        secondary=True,  # all ranks are late together: one that has seen a reason is believed first
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
