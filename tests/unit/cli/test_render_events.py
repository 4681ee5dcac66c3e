"""Every event is one line that says what happened to whom."""

from __future__ import annotations

import msgspec
import pytest
from cluster_states import BOOT, FAILURE, MODEL, NOW, ONE, envelope, node, text_of

from muster.cli import documents
from muster.cli.render import clock
from muster.cli.render_events import event_line
from muster.events import (
    AdoptedRank,
    AttemptEnding,
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceAdopted,
    InstanceCleared,
    InstanceCreated,
    InstanceDeleting,
    InstanceFailed,
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
    RankGone,
    RankReady,
    ReportId,
)
from muster.spec import COORDINATOR, BootId, InstanceSpec, NodeId

A, B = NodeId("a"), NodeId("b")
SPEC = InstanceSpec(workload=MODEL, ranks=2)
ADOPTED = tuple(AdoptedRank(rank=n, node=name, boot=BOOT, pid=7, process_started=1.0) for n, name in enumerate((A, B)))
LEFT = RankGone(
    instance=ONE, attempt=2, rank=1, node=B, boot=BOOT, exit_code=-9, left="pid 7 does not end", remedy="Reboot it."
)


@pytest.mark.parametrize(
    ("event", "words", "colour"),
    [
        (
            CoordinatorStarted(epoch="e1", boot=BootId("x"), version="1.2", term=3),
            "version 1.2, term 3 of log e1",
            "",
        ),
        (NodeJoined(info=node("a").info), "a from host-a", ""),
        (NodeLost(node=A, boot=BOOT, reason="gone\nfishing"), "a: gone�fishing", "red"),
        (NodeSuspected(node=A, boot=BOOT, reason="it is late"), "a: it is late", "yellow"),
        (NodeHeard(node=A, boot=BOOT), "a was heard again", "green"),
        (
            NodeChanged(
                node=A, boot=BOOT, candidates=(), gone=("10.0.0.1",), new=("10.0.0.2",), moved=("10.0.0.3: x → y",)
            ),
            "a: its addresses changed: lost 10.0.0.1 and has 10.0.0.2; 10.0.0.3: x → y",
            "",
        ),
        (NodeChanged(node=A, boot=BOOT, candidates=(), moved=("10.0.0.3: x → y",)), "a: 10.0.0.3: x → y", ""),
        (NodeDraining(node=A, reason="new memory"), "a: new memory", "yellow"),
        (NodeDraining(node=A, now=True), "a; scripts too", "yellow"),
        (
            NodeSetAside(node=A, boot=BOOT, reason="it fails", remedy="Mend it.", until_ns=NOW),
            f"a: it fails; until {clock(NOW)}; Mend it.",
            "red",
        ),
        (NodeSetAside(node=A, boot=BOOT, reason="it fails"), "a: it fails", "red"),
        (NodeResumed(node=A, reason="asked for"), "a: asked for", "green"),
        (
            NodeResumed(node=A, trial=True),
            "a; on trial: the next failure sets it aside again",
            "green",
        ),
        (
            InstanceCreated(instance=ONE, attempt=1, spec=SPEC, assignments=(), backend="ring"),
            "one-1a2b3c, model tiny over 2 ranks",
            "",
        ),
        (
            AttemptEnding(instance=ONE, attempt=2, reason="node a is drained"),
            "one-1a2b3c #2, node a is drained",
            "yellow",
        ),
        (InstanceRetried(instance=ONE, attempt=2), "one-1a2b3c #2, tried again, with its whole budget", ""),
        (
            InstanceAdopted(instance=ONE, attempt=2, spec=SPEC, backend="ring", ranks=ADOPTED),
            "one-1a2b3c #2, found ready and kept: model tiny over 2 ranks (rank 0 on a, rank 1 on b)",
            "green",
        ),
        (
            InstanceCleared(instance=ONE, attempt=1, reason="rank 1 is missing"),
            "one-1a2b3c, rank 1 is missing",
            "yellow",
        ),
        (InstanceReady(instance=ONE, attempt=1), "one-1a2b3c", "green"),
        (
            InstanceFailed(instance=ONE, attempt=1, failure=FAILURE),
            "one-1a2b3c, script-failed: the script ended with exit code 3",
            "red",
        ),
        (InstanceDeleting(instance=ONE, attempt=1, reason="asked for"), "one-1a2b3c, asked for", ""),
        (RankReady(instance=ONE, attempt=1, rank=0, node=A, boot=BOOT), "one-1a2b3c, rank 0 on a", "green"),
        (
            msgspec.structs.replace(LEFT, left="", remedy=""),
            "one-1a2b3c #2, rank 1 on b, SIGKILL",
            "",
        ),
        (LEFT, "one-1a2b3c #2, rank 1 on b, SIGKILL; left: pid 7 does not end; Reboot it.", "red"),
    ],
)
def test_an_event_is_one_line_in_the_colour_of_its_severity(event: Event, words: str, colour: str) -> None:
    found = event_line(envelope(event))
    line = text_of(found)
    assert line.count("\n") == 1
    assert line.rstrip().endswith("  " + words)
    assert str(found.spans[2].style if len(found.spans) > 2 else "") == colour


def test_an_event_says_when_it_happened_where_that_is_known() -> None:
    event = envelope(RankReady(instance=ONE, attempt=1, rank=0, node=A, boot=BOOT))
    for happened_ns, shown in ((0, None), (NOW - 5, NOW - 5)):
        report = ReportId(node=A, boot=BOOT, n=1, happened_ns=happened_ns)
        assert documents.event_document(msgspec.structs.replace(event, report=report))["happened_ns"] == shown
    assert documents.event_document(event)["happened_ns"] is None


def test_an_event_of_a_newer_version_is_still_shown() -> None:
    body = msgspec.Raw(msgspec.msgpack.encode({"type": "rank.dreaming", "depth": 3}))
    newer = Envelope(sequence=1, time_ns=NOW, origin=COORDINATOR, cause=0, body=body)
    assert documents.event_document(newer)["kind"] == "rank.dreaming"
    assert "rank.dreaming" in text_of(event_line(newer))
