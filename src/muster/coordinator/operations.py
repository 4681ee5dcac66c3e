"""What operators ask of nodes and of failed instances: drain, resume, retry."""

from __future__ import annotations

from muster.coordinator.find import find, refusal
from muster.coordinator.ledger import Ledger
from muster.errors import RequestError
from muster.events import AttemptEnding, InstanceRetried, NodeDraining, NodeResumed
from muster.protocol import Drain, Resume, Retry
from muster.replies import Accepted, Noted, Refused
from muster.spec import Phase
from muster.state import Broken, Draining, Ending, Running, Serving, Starting, drain_seconds, status_name


def oversee(ledger: Ledger, request: Drain | Resume) -> Noted | Refused:
    """Drain a node or let it take instances again; what it is already is no new event.

    Raises:
        LogError: the log cannot be written; nothing has happened.
    """
    node = ledger.state.nodes.get(request.node)
    if node is None:
        known = ", ".join(sorted(ledger.state.nodes)) or "none"
        error = RequestError(f"there is no node {request.node!r}; the nodes are: {known}", remedy="See: muster nodes")
        return refusal(error, Phase.RUNNING)
    match request:
        case Drain(node=name, reason=reason, now=now):
            done = isinstance(node.duty, Draining) and (node.duty.now or not now)
            event = NodeDraining(node=name, reason=reason or "asked for", now=now)
        case Resume(node=name):
            done = isinstance(node.duty, Serving) and not node.faults_ns  # else: forget these
            event = NodeResumed(node=name, reason="asked for")
    sequence = ledger.state.sequence if done else ledger.commit(event).sequence
    return Noted(node=request.node, sequence=sequence)


def retry(ledger: Ledger, request: Retry) -> Accepted | Refused:
    """Give a failed instance another attempt and its whole budget, or move one that is up.

    Raises:
        LogError: the log cannot be written; nothing has happened.
    """
    try:
        instance = find(ledger.state, request.instance)
        match instance.status:
            case Broken():
                event = InstanceRetried(instance=instance.id, attempt=instance.attempt)
            case Starting() | Running() if request.move:
                event = AttemptEnding(
                    instance=instance.id,
                    attempt=instance.attempt,
                    reason="it is to be placed afresh, as asked for",
                    drain_seconds=drain_seconds(instance),
                )
            case Starting() | Running():
                raise RequestError(
                    f"{instance.id} has not failed, it is {status_name(instance.status)}",
                    remedy=f"To end this attempt and place it afresh: muster retry --move {instance.id}",
                )
            case Ending():
                return Accepted(instance=instance.id, sequence=ledger.state.sequence)
            case _:
                raise RequestError(
                    f"{instance.id} is {status_name(instance.status)}, and only what failed can be tried again",
                    remedy="Create it again.",
                )
    except RequestError as error:
        return refusal(error, Phase.RUNNING)
    return Accepted(instance=instance.id, sequence=ledger.commit(event).sequence)
