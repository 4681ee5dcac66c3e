"""What people and programs see of a state."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from cluster_states import BOOT, FAILURE, MODEL, NOW, ONE, SECOND, instance, node, state
from rich.console import Console, RenderableType

from muster.cli import documents, render
from muster.events import Envelope, Event, InstanceCreated, InstanceFailed, NodeLost, RankGone, encode_event
from muster.protocol import Beat
from muster.spec import (
    COORDINATOR,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    ScriptWorkload,
)
from muster.state import Broken, Gone, Node, Prepared, Ready, Running


def text_of(renderable: RenderableType, width: int = 300) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def envelope(event: Event) -> Envelope:
    return Envelope(sequence=12, time_ns=NOW, origin=COORDINATOR, cause=3, body=encode_event(event))


def test_the_list_shows_how_many_ranks_are_ready() -> None:
    line = text_of(render.instances_table([instance(Running(), Ready(), Prepared())], NOW)).splitlines()[1]
    assert line.split() == [ONE, "model", "tiny", "ready", "1/2", "a,b", "ring", "1", "90s"]


def test_a_narrow_list_keeps_names_and_states_whole() -> None:
    found = [
        msgspec.structs.replace(instance(Running()), id=InstanceId("group-d0f359")),
        msgspec.structs.replace(
            instance(Broken(FAILURE), Gone(0), Gone(3, FAILURE), workload=ModelWorkload(model="m" * 40)),
            id=InstanceId("smollm2-135m-instruct-1a2b3c"),
        ),
    ]
    lines = text_of(render.instances_table(found, NOW, 80), width=80).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    header, first, second = (line.split() for line in lines[:3])
    assert header == ["INSTANCE", "WORKLOAD", "STATE", "RANKS", "NODES", "CAUSE"]
    assert first == ["group-d0f359", "model", "tiny", "ready", "0/2", "a,b"]
    assert second[0] == "smollm2-135m-instruct-1a2b3c"
    assert second[2].endswith("…")
    assert second[3:6] == ["failed", "0/2", "a,b"]
    cause = "".join(line[lines[0].index("CAUSE") :].replace(" ", "") for line in lines[2:])
    assert cause == "script-failed(rank1onb)"


def test_a_narrow_list_counts_nodes_that_it_has_no_room_for() -> None:
    one = instance(Running())
    ranks = tuple(msgspec.structs.replace(one.ranks[0], rank=n, node=NodeId(f"node{n}")) for n in range(16))
    found = msgspec.structs.replace(one, ranks=ranks)
    line = text_of(render.instances_table([found], NOW, 80), width=80).splitlines()[1]
    assert line.split() == [ONE, "model", "tiny", "ready", "0/16", "node0,+15"]
    assert "node14,node15" in text_of(render.instances_table([found], NOW))


def test_the_list_shows_why_an_instance_failed_and_where() -> None:
    shown = text_of(render.instances_table([instance(Broken(FAILURE), Gone(0), Gone(3, FAILURE))], NOW))
    assert "failed" in shown
    assert "script-failed (rank 1 on b)" in shown


def test_the_nodes_show_what_is_in_use_and_who_is_lost() -> None:
    seen = state(instance(), nodes=(node("a"), node("b", lost="no heartbeat for 5.0 s")))
    beat = Beat(node=NodeId("a"), boot=BOOT, memory_used_bytes=50 * 2**20, warm_runners=2, warm_memory_bytes=2**20)
    shown = text_of(render.nodes_table(seen, {NodeId("a"): beat}, NOW), width=80)
    header, first, second, note = shown.splitlines()
    assert header.split() == ["NODE", "STATE", "RANKS", "RESERVED", "OF", "BUDGET", "WARM", "RUNNERS", "BACKENDS"]
    assert first.split() == ["a", "alive", "1/32", "1.0", "GiB", "of", "8.0", "GiB", "2", "(1", "MiB", "each)", "ring"]
    assert second.split()[:3] == ["b", "lost", "1/32"]
    assert note.strip() == "b lost 60m ago: no heartbeat for 5.0 s"


def test_the_nodes_tell_of_process_machine_and_versions_when_asked() -> None:
    beat = Beat(node=NodeId("a"), boot=BOOT, memory_used_bytes=50 * 2**20, memory_available_bytes=3 * 2**30)
    table = render.nodes_table(state(nodes=(node("a"),)), {NodeId("a"): beat}, NOW, wide=True)
    line = text_of(table).splitlines()[1]
    for words in ("60m", "pid 1 on host-a", "50 MiB", "3.0 GiB", "mlx 0.32.4"):
        assert words in line


def test_a_node_whose_worker_was_stopped_on_purpose_is_stopped() -> None:
    found = node("b", lost="its worker was stopped")
    assert render.node_state(found) == "stopped"
    assert documents.node_document(state(nodes=(found,)), found, {})["state"] == "stopped"
    assert "b stopped 60m ago: its worker was stopped" in text_of(render.nodes_table(state(nodes=(found,)), {}, NOW))


def test_different_versions_on_nodes_that_are_there_are_named() -> None:
    def versioned(name: str, version: str, lost: str | None = None) -> Node:
        found = node(name, lost)
        return msgspec.structs.replace(found, info=msgspec.structs.replace(found.info, versions={"mlx": version}))

    alike = (versioned("a", "1"), versioned("b", "1"), versioned("c", "3", lost="no heartbeat"))
    assert "differ" not in text_of(render.nodes_table(state(nodes=alike), {}, NOW))
    unlike = (versioned("a", "1"), versioned("b", "2"), versioned("c", "1"))
    shown = text_of(render.nodes_table(state(nodes=unlike), {}, NOW))
    assert "versions of mlx differ: 1 on a, c; 2 on b" in shown


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-15, "SIGTERM"), (-9, "SIGKILL"), (-99, "signal 99")],
)
def test_the_end_of_a_process_names_the_signal(code: int, words: str) -> None:
    assert render.exit_text(code) == words
    shown = text_of(render.instance_details(instance(Broken(FAILURE), Gone(code), Gone(0)), [], NOW))
    assert f"gone ({words})" in shown


def test_a_description_has_the_cause_the_remedy_and_the_last_lines() -> None:
    broken = instance(Broken(FAILURE), Gone(0), Gone(3, FAILURE))
    events = [envelope(InstanceFailed(instance=ONE, attempt=1, failure=FAILURE))]
    shown = text_of(render.instance_details(broken, events, NOW))
    assert FAILURE.sentence() in shown
    assert "before" in shown
    assert "ValueError" in shown
    assert "\x1b" not in shown
    assert "10.0.0.1:5001" in shown
    assert "2-3 (pipeline)" in shown
    assert "gone (exit code 3)" in shown
    assert "instance.failed" in shown


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            InstanceCreated(
                instance=ONE, attempt=1, spec=InstanceSpec(workload=MODEL, ranks=2), assignments=(), backend="ring"
            ),
            "one-1a2b3c, model tiny over 2 ranks",
        ),
        (NodeLost(node=NodeId("a"), boot=BOOT, reason="gone\nfishing"), "a: gone�fishing"),
        (
            RankGone(instance=ONE, attempt=2, rank=1, node=NodeId("b"), boot=BOOT, exit_code=-9),
            "one-1a2b3c #2, rank 1 on b, SIGKILL",
        ),
    ],
)
def test_an_event_is_one_line(event: Event, words: str) -> None:
    line = text_of(render.event_line(envelope(event)))
    assert line.count("\n") == 1
    assert words in line


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (172_800, "2d"), (-5, "0s")]
)
def test_an_age_is_short(seconds: int, shown: str) -> None:
    assert render.age(NOW - seconds * SECOND, NOW) == shown


def test_a_workload_is_a_few_words() -> None:
    assert render.workload_text(InstanceSpec(workload=GroupWorkload())) == "group"
    assert render.workload_text(InstanceSpec(workload=ScriptWorkload(path="/x/train.py"))) == "script train.py"


def test_markup_in_names_is_shown_as_it_is() -> None:
    assert "[red]x" in text_of(render.instances_table([instance(name="[red]x")], NOW))


def test_documents_are_json_with_the_keys_that_help_names() -> None:
    broken = instance(Broken(FAILURE, retry_at_ns=NOW), Gone(0), Gone(3, FAILURE))
    events = [envelope(InstanceFailed(instance=ONE, attempt=1, failure=FAILURE))]
    found = json.loads(msgspec.json.encode(documents.instance_document(broken, events)))
    assert set(documents.instance_summary(broken)) <= set(found)
    assert found["failure"]["sentence"] == FAILURE.sentence()
    assert found["ranks"][1]["exit_code"] == 3
    assert found["ranks"][1]["failure"]["remedy"] == FAILURE.remedy
    workload = {"type": "model", "model": "/models/tiny", "revision": None, "sharding": "auto"}
    assert workload.items() <= found["spec"]["workload"].items()
    assert found["events"][0]["kind"] == "instance.failed"
    assert found["events"][0]["event"]["failure"]["exit_code"] == 3
    assert found["retry_at_ns"] == NOW


def test_an_event_of_a_newer_version_is_still_shown() -> None:
    body = msgspec.Raw(msgspec.msgpack.encode({"type": "rank.dreaming", "depth": 3}))
    newer = Envelope(sequence=1, time_ns=NOW, origin=COORDINATOR, cause=0, body=body)
    assert documents.event_document(newer)["kind"] == "rank.dreaming"
    assert "rank.dreaming" in text_of(render.event_line(newer))
