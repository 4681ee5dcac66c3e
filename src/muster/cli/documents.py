"""What `--json` prints: plain maps and lists, with keys that stay."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import cast

import msgspec

from muster.cli.render import budget_left, workload_text
from muster.cli.render_nodes import duty_name, faults, memory_in_use_bytes, node_state, ranks_in_use
from muster.events import Envelope, Unknown, kind_of
from muster.facts import NodeFacts
from muster.protocol import Beat
from muster.replies import NodeClock
from muster.spec import Failure, NodeId, Shortfall
from muster.state import (
    Aside,
    Broken,
    Draining,
    Ending,
    Failed,
    Gone,
    Instance,
    Node,
    Rank,
    Ready,
    State,
    counted_failures,
    status_name,
    takes_instances,
)

Document = dict[str, object]


def write(document: object, *, pretty: bool = True) -> None:
    """Print a document as JSON; on one line where it is one of many."""
    payload = msgspec.json.encode(document)
    if pretty:
        payload = msgspec.json.format(payload, indent=2)
    sys.stdout.write(payload.decode() + "\n")
    sys.stdout.flush()


def plain(value: object) -> object:
    """A message as maps and lists."""
    return cast("object", msgspec.to_builtins(value))


def refusal(failure: Failure, shortfalls: Iterable[Shortfall]) -> Document:
    """Why something was refused, with what each node was short of."""
    return {
        "kind": failure.kind,
        "message": failure.message,
        "remedy": failure.remedy,
        "shortfalls": [plain(one) for one in shortfalls],
    }


def instance_summary(instance: Instance) -> Document:
    """One instance, as `muster ps --json` lists it."""
    failure = instance.status.failure if isinstance(instance.status, Broken) else None
    return {
        "instance": instance.id,
        "name": instance.spec.name,
        "workload": workload_text(instance.spec),
        "state": status_name(instance.status),
        "reason": instance.status.reason if isinstance(instance.status, Ending) else None,
        "ranks": len(instance.ranks),
        "ranks_ready": sum(isinstance(rank.state, Ready) for rank in instance.ranks),
        "nodes": [rank.node for rank in instance.ranks],
        "backend": instance.backend,
        "attempt": instance.attempt,
        "created_ns": instance.created_ns,
        "since_ns": instance.since_ns,
        "retry_at_ns": instance.status.retry_at_ns if isinstance(instance.status, Broken) else None,
        "failure": None if failure is None else failure_document(failure),
    }


def instance_document(instance: Instance, events: Iterable[Envelope], now_ns: int | None = None) -> Document:
    """One instance, as `muster describe --json` shows it."""
    return {
        **instance_summary(instance),
        "spec": plain(instance.spec),
        "failed_attempts": instance.failed_attempts,
        "ranks": [
            {
                **rank_document(rank),
                "next": _next_document(instance, rank.rank),
                "blamed": counted_failures(instance, rank.rank, now_ns or time.time_ns()),
                "retries_left": budget_left(instance, rank.rank, now_ns),
            }
            for rank in instance.ranks
        ],
        "layout": plain(instance.layout),
        "failures": [failure_document(failure) for failure in instance.failures],
        "events": [event_document(envelope) for envelope in events],
    }


def _next_document(instance: Instance, rank: int) -> object:
    """How the rank dials the next one of the ring; `None` where its own addresses decide."""
    ranks = instance.layout.ranks
    return plain(ranks[rank].next) if rank < len(ranks) else None


def rank_document(rank: Rank) -> Document:
    """One rank of the current attempt."""
    failure = rank.state.failure if isinstance(rank.state, Failed | Gone) else None
    return {
        "rank": rank.rank,
        "node": rank.node,
        "state": status_name(rank.state),
        "since_ns": rank.since_ns,
        "pid": rank.pid or None,
        "addresses": [str(address) for address in rank.addresses],
        "layers": None if rank.layers is None else list(rank.layers),
        "sharding": rank.sharding,
        "weights_bytes": rank.weights_bytes,
        "exit_code": rank.state.exit_code if isinstance(rank.state, Gone) else None,
        "failure": None if failure is None else failure_document(failure),
    }


def failure_document(failure: Failure) -> Document:
    """A failure with every field, and its sentence."""
    return {**cast("Document", plain(failure)), "sentence": failure.sentence()}


def node_document(
    state: State,
    node: Node,
    beats: Mapping[NodeId, Beat],
    clocks: Iterable[NodeClock] = (),
    now_ns: int | None = None,
    facts: Mapping[NodeId, NodeFacts] | None = None,
) -> Document:
    """One node, as `muster nodes --json` lists it. What a heartbeat carries is null while there is none."""
    info, duty = node.info, node.duty
    beat = beats.get(info.node) if node.lost is None else None
    offset = next((found for found in clocks if found.node == info.node and node.lost is None), None)
    on_duty = duty.reason if isinstance(duty, Draining | Aside) else None
    return {
        "node": info.node,
        "state": node_state(node),
        "reason": node.lost or node.suspect or on_duty,
        "remedy": (duty.remedy or None) if isinstance(duty, Aside) else None,
        "duty": duty_name(node),
        "until_ns": duty.until_ns if isinstance(duty, Aside) else None,
        "takes_instances": takes_instances(node),
        "faults": faults(node, now_ns),
        "since_ns": node.since_ns,
        "hostname": info.hostname,
        "pid": info.pid,
        "addresses": [address.host for address in info.addresses],
        "backends": list(info.backends),
        "versions": dict(info.versions),
        "ranks": ranks_in_use(state, node),
        "max_ranks": info.max_ranks,
        "memory_bytes": info.memory_bytes,
        "memory_in_use_bytes": memory_in_use_bytes(state, node),
        "memory_available_bytes": None if beat is None else beat.memory_available_bytes,
        "worker_memory_bytes": None if beat is None else beat.memory_used_bytes,
        "warm_runners": None if beat is None else beat.warm_runners,
        "warm_runner_memory_bytes": None if beat is None else beat.warm_memory_bytes,
        "clock_offset_ns": None if offset is None else offset.offset_ns,
        "clock_error_ns": None if offset is None else offset.error_ns,
        "facts": plain(told) if (told := (facts or {}).get(info.node)) is not None and node.lost is None else None,
    }


def event_document(envelope: Envelope) -> Document:
    """One event. Of a kind that this version does not know, only the kind is shown."""
    event = envelope.event()
    return {
        "sequence": envelope.sequence,
        "time_ns": envelope.time_ns,
        "time": datetime.fromtimestamp(envelope.time_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "happened_ns": None if envelope.report is None else envelope.report.happened_ns or None,
        "origin": envelope.origin,
        "cause": envelope.cause,
        "kind": kind_of(event),
        "event": {"type": event.kind} if isinstance(event, Unknown) else plain(event),
    }
