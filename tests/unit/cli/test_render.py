"""What people and programs see of a state."""

from __future__ import annotations

import json

import msgspec
import pytest
from cluster_states import FAILURE, NOW, ONE, SECOND, envelope, instance, text_of

from muster.cli import documents, render
from muster.cli.render_events import event_line
from muster.cli.render_instance import instance_details
from muster.events import InstanceFailed
from muster.spec import (
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    Phase,
    RestartOnFailure,
    ScriptWorkload,
)
from muster.state import Broken, Ending, Gone, Instance, InstanceStatus, Prepared, Ready, Running, Starting


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


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-15, "SIGTERM"), (-9, "SIGKILL"), (-99, "signal 99")],
)
def test_the_end_of_a_process_names_the_signal(code: int, words: str) -> None:
    assert render.exit_text(code) == words
    shown = text_of(instance_details(instance(Broken(FAILURE), Gone(code), Gone(0)), [], NOW))
    assert f"gone ({words})" in shown


def test_a_description_has_the_cause_the_remedy_and_the_last_lines() -> None:
    broken = instance(Broken(FAILURE), Gone(0), Gone(3, FAILURE))
    events = [envelope(InstanceFailed(instance=ONE, attempt=1, failure=FAILURE))]
    shown = text_of(instance_details(broken, [event_line(item) for item in events], NOW))
    assert FAILURE.sentence() in shown
    assert "before" in shown
    assert "ValueError" in shown
    assert "\x1b" not in shown
    assert "10.0.0.1:5001" in shown
    assert "2-3 (pipeline)" in shown
    assert "gone (exit code 3)" in shown
    assert "instance.failed" in shown


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


PLACING = msgspec.structs.replace(FAILURE, kind="placement-refused", phase=Phase.PLACING, rank=-1)


@pytest.mark.parametrize(
    ("status", "ranks", "words"),
    [
        (Running(), (Ready(),), ""),
        (Broken(FAILURE), (Gone(3),), ""),
        (Broken(FAILURE, NOW + 4 * SECOND), (Gone(3),), "in 4s"),
        (Broken(FAILURE, NOW + SECOND // 5), (Gone(3),), "in 0.2s"),
        (Broken(FAILURE, NOW), (Ready(),), "once every process is gone"),
        (Broken(FAILURE, NOW), (Gone(3),), "now"),
        (Broken(PLACING, NOW), (Gone(3),), "as soon as there is room"),
    ],
)
def test_the_next_attempt_has_a_time(status: InstanceStatus, ranks: tuple[Ready | Gone, ...], words: str) -> None:
    found = instance(status, *ranks)
    assert render.next_attempt_text(found, NOW) == words
    assert ("again" in text_of(render.instances_table([found], NOW))) == bool(words)
    assert ("next attempt" in text_of(instance_details(found, [], NOW))) == bool(words)


def test_an_attempt_that_is_ended_on_purpose_says_why() -> None:
    found = instance(Ending("node b is being drained", 10.0), Ready(), Ready())
    line = text_of(render.instances_table([found], NOW)).splitlines()[1]
    assert "ending" in line
    assert "node b is being drained" in line
    assert "node b is being drained; the next attempt follows" in text_of(instance_details(found, [], NOW))
    summary = documents.instance_summary(found)
    assert (summary["state"], summary["reason"], summary["failure"]) == ("ending", "node b is being drained", None)


def with_budget(status: InstanceStatus, since_ns: int) -> Instance:
    found = instance(status, Ready(), Ready())
    spec = msgspec.structs.replace(found.spec, restart=RestartOnFailure(maximum=5))
    return msgspec.structs.replace(
        found, spec=spec, failed_attempts=8, blamed={1: 7, 0: 1, -1: 2}, attempt=9, since_ns=since_ns
    )


def test_each_rank_has_a_budget_of_its_own() -> None:
    found = with_budget(Starting(), NOW)
    first, second = documents.instance_document(found, [], NOW)["ranks"]  # pyright: ignore
    assert (first["blamed"], first["retries_left"], second["blamed"], second["retries_left"]) == (1, 4, 7, 0)
    shown = text_of(instance_details(found, [], NOW)).splitlines()
    assert "2 of no rank's making, 3 of 5 retries left for those" in next(
        line for line in shown if "failed so far" in line
    )
    assert [line.split()[-4:] for line in shown if " ready " in line and "pipeline" in line] == [
        ["1", "4", "of", "5"],
        ["7", "0", "of", "5"],
    ]


def test_a_budget_is_whole_again_after_a_settled_run() -> None:
    found = with_budget(Running(), NOW - 61 * SECOND)
    document = documents.instance_document(found, [], NOW)
    assert [(rank["blamed"], rank["retries_left"]) for rank in document["ranks"]] == [(0, 5), (0, 5)]  # pyright: ignore
    assert "no rank's making" not in text_of(instance_details(found, [], NOW))


def test_where_nothing_is_tried_again_there_is_no_budget() -> None:
    assert documents.instance_document(instance(Running()), [], NOW)["ranks"][0]["retries_left"] is None  # pyright: ignore
    assert "RETRIES" not in text_of(instance_details(instance(Running()), [], NOW))


@pytest.mark.parametrize(
    ("fenced", "words"),
    [({}, ""), ({"boot": 0}, ""), ({"boot": 2, "attempt": 1}, ", too old and ignored: 1 by attempt, 2 by boot")],
)
def test_what_was_fenced_is_counted(fenced: dict[str, int], words: str) -> None:
    assert render.coordinator_text(2**20, 2**10, fenced) == "coordinator: 1 MiB, its log: 1 KiB" + words
