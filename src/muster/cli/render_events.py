"""Events as lines for people."""

from __future__ import annotations

import sys
from typing import assert_never

from rich.text import Text

from muster.cli.render import clock, exit_text, printable, workload_text
from muster.events import (
    AttemptEnding,
    AttemptStarted,
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceAdopted,
    InstanceCleared,
    InstanceCreated,
    InstanceDeleted,
    InstanceDeleting,
    InstanceFact,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    InstanceRetried,
    NodeChanged,
    NodeDraining,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    NodeSuspected,
    RankConnected,
    RankFact,
    RankFailed,
    RankFetched,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
    Unknown,
    kind_of,
)
from muster.spec import InstanceSpec

_OfNode = NodeJoined | NodeLost | NodeSuspected | NodeHeard | NodeDraining | NodeSetAside | NodeChanged | NodeResumed

_BAD = InstanceFailed | RankFailed | NodeLost | NodeSetAside
_DOUBTFUL = NodeSuspected | NodeDraining | AttemptEnding | InstanceCleared
_GOOD = InstanceReady | RankReady | InstanceAdopted | NodeResumed | NodeHeard


def event_line(envelope: Envelope) -> Text:
    """One event: time, sequence, kind, whom it is about, and what else matters."""
    event = envelope.event()
    line = Text(no_wrap=True, overflow="ellipsis" if sys.stdout.isatty() else "ignore")
    line.append(f"{clock(envelope.time_ns)}  ", style="dim").append(f"{envelope.sequence:>6}  ", style="dim")
    line.append(f"{printable(kind_of(event)):<18}", style=_style(event))
    whom: list[str] = []
    if isinstance(event, InstanceFact):
        whom.append(event.instance + (f" #{event.attempt}" if event.attempt > 1 else ""))
    if isinstance(event, RankFact):
        whom.append(f"rank {event.rank} on {event.node}")
    if not isinstance(event, Unknown):
        whom.append(_what(event))
    return line.append("  " + printable(", ".join(text for text in whom if text)))


def _style(event: Event | Unknown) -> str:
    """By severity: red for what failed, yellow for what is about to change, green for what is well."""
    match event:
        case RankGone(left=left) if left:
            return "red"
        case _ if isinstance(event, _BAD):
            return "red"
        case _ if isinstance(event, _DOUBTFUL):
            return "yellow"
        case _ if isinstance(event, _GOOD):
            return "green"
        case _:
            return ""


def _what(event: Event) -> str:
    """What matters of an event beside the instance, the attempt and the rank."""
    if isinstance(event, _OfNode):
        return _of_node(event)
    match event:
        case CoordinatorStarted(version=version, term=term, epoch=epoch):
            return f"version {version}, term {term} of log {epoch}"
        case InstanceCreated(spec=spec):
            return _spec_text(spec)
        case InstanceAdopted(spec=spec, ranks=ranks):
            places = ", ".join(f"rank {rank.rank} on {rank.node}" for rank in ranks)
            return f"found ready and kept: {_spec_text(spec)} ({places})"
        case InstanceFailed(failure=failure) | RankFailed(failure=failure):
            return f"{failure.kind}: {failure.message}"
        case AttemptEnding(reason=reason) | InstanceCleared(reason=reason) | InstanceDeleting(reason=reason):
            return reason
        case RankFetched(source=source, files=files, bytes=count, seconds=seconds):
            return f"{files} file(s), {count / 2**20:.1f} MiB from {source} in {seconds:.1f} s"
        case InstanceRetried():
            return "tried again, with its whole budget"
        case RankGone(exit_code=code, left=left, remedy=remedy):
            return _joined("" if code is None else exit_text(code), left and f"left: {left}", remedy)
        case (
            AttemptStarted()
            | InstanceReady()
            | InstanceFinished()
            | InstanceDeleted()
            | RankPrepared()
            | RankListening()
            | RankConnected()
            | RankLoaded()
            | RankReady()
        ):
            return ""
    assert_never(event)


def _of_node(event: _OfNode) -> str:
    match event:
        case NodeJoined(info=info):
            return f"{info.node} from {info.hostname}"
        case NodeChanged(node=node, gone=gone, new=new, moved=moved):
            told = [f"lost {', '.join(gone)}"] if gone else []
            told += [f"has {', '.join(new)}"] if new else []
            changed = [f"its addresses changed: {' and '.join(told)}"] if told else []
            return f"{node}: {'; '.join((*changed, *moved))}"
        case NodeLost(node=node, reason=reason) | NodeSuspected(node=node, reason=reason):
            return f"{node}: {reason}"
        case NodeHeard(node=node):
            return f"{node} was heard again"
        case NodeDraining(node=node, reason=reason, now=now):
            return _joined(f"{node}: {reason}", "scripts too" if now else "")
        case NodeSetAside(node=node, reason=reason, remedy=remedy, until_ns=until_ns):
            return _joined(f"{node}: {reason}", "" if until_ns is None else f"until {clock(until_ns)}", remedy)
        case NodeResumed(node=node, reason=reason, trial=trial):
            return _joined(f"{node}: {reason}", "on trial: the next failure sets it aside again" if trial else "")
    assert_never(event)


def _joined(*texts: str) -> str:
    return "; ".join(text.removesuffix(": ") for text in texts if text)


def _spec_text(spec: InstanceSpec) -> str:
    return f"{workload_text(spec)} over {spec.ranks} rank{'s' if spec.ranks > 1 else ''}"
