"""What people and programs see of nodes: one word for the state, the reason, and what to do."""

from __future__ import annotations

import msgspec
import pytest
from cluster_states import BOOT, NOW, SECOND, instance, node, state, text_of

from muster.cli import documents
from muster.cli.render import clock
from muster.cli.render_nodes import clock_text, node_state, nodes_table
from muster.protocol import Beat
from muster.replies import NodeClock
from muster.spec import NodeId
from muster.state import Aside, Draining, Node, NodeDuty, Serving


def test_the_nodes_show_what_is_in_use_and_who_is_lost() -> None:
    seen = state(instance(), nodes=(node("a"), node("b", lost="no heartbeat for 5.0 s")))
    beat = Beat(node=NodeId("a"), boot=BOOT, memory_used_bytes=50 * 2**20, warm_runners=2, warm_memory_bytes=2**20)
    shown = text_of(nodes_table(seen, {NodeId("a"): beat}, NOW), width=80)
    header, first, second, note = shown.splitlines()
    assert header.split() == ["NODE", "STATE", "RANKS", "RESERVED", "OF", "BUDGET", "WARM", "RUNNERS", "BACKENDS"]
    assert first.split() == ["a", "ready", "1/32", "1.0", "GiB", "of", "8.0", "GiB", "2", "(1", "MiB", "each)", "ring"]
    assert second.split()[:3] == ["b", "lost", "1/32"]
    assert note.strip() == "b lost 60m ago: no heartbeat for 5.0 s"


def test_the_nodes_tell_of_process_machine_and_versions_when_asked() -> None:
    beat = Beat(node=NodeId("a"), boot=BOOT, memory_used_bytes=50 * 2**20, memory_available_bytes=3 * 2**30)
    table = nodes_table(state(nodes=(node("a"),)), {NodeId("a"): beat}, NOW, wide=True)
    line = text_of(table).splitlines()[1]
    for words in ("60m", "pid 1 on host-a", "50 MiB", "3.0 GiB", "mlx 0.32.4"):
        assert words in line


def test_a_node_whose_worker_was_stopped_on_purpose_is_stopped() -> None:
    found = node("b", lost="its worker was stopped")
    assert node_state(found) == "stopped"
    assert documents.node_document(state(nodes=(found,)), found, {})["state"] == "stopped"
    assert "b stopped 60m ago: its worker was stopped" in text_of(nodes_table(state(nodes=(found,)), {}, NOW))


def test_different_versions_on_nodes_that_are_there_are_named() -> None:
    def versioned(name: str, version: str, lost: str | None = None) -> Node:
        found = node(name, lost)
        return msgspec.structs.replace(found, info=msgspec.structs.replace(found.info, versions={"mlx": version}))

    alike = (versioned("a", "1"), versioned("b", "1"), versioned("c", "3", lost="no heartbeat"))
    assert "differ" not in text_of(nodes_table(state(nodes=alike), {}, NOW))
    unlike = (versioned("a", "1"), versioned("b", "2"), versioned("c", "1"))
    shown = text_of(nodes_table(state(nodes=unlike), {}, NOW))
    assert "versions of mlx differ: 1 on a, c; 2 on b" in shown


def standing(duty: NodeDuty, *, suspect: str | None = None, lost: str | None = None) -> Node:
    return msgspec.structs.replace(node("a", lost), duty=duty, suspect=suspect)


LATE = "no heartbeat for 3.0 s"
UNTIL = NOW + 60 * SECOND


@pytest.mark.parametrize(
    ("found", "word", "note"),
    [
        (standing(Serving()), "ready", ""),
        (
            standing(Serving(), suspect=LATE),
            "suspect",
            f"a suspect: {LATE}; it keeps what it has and is given nothing new",
        ),
        (
            standing(Draining("new memory")),
            "draining",
            "a draining: new memory; to take it back: muster resume a",
        ),
        (
            standing(Draining("new memory", now=True)),
            "draining",
            "a draining, scripts too: new memory; to take it back: muster resume a",
        ),
        (
            standing(Aside("3 failures are blamed on it", "See: muster events --node a.", UNTIL)),
            "set aside",
            f"a set aside until {clock(UNTIL)}: 3 failures are blamed on it. See: muster events --node a.",
        ),
        (
            standing(Aside("pid 7 does not end")),
            "set aside",
            "a set aside: pid 7 does not end. To use it again: muster resume a",
        ),
    ],
)
def test_a_node_has_one_word_a_reason_and_a_remedy(found: Node, word: str, note: str) -> None:
    assert node_state(found) == word
    _, row, *notes = text_of(nodes_table(state(nodes=(found,)), {}, NOW)).splitlines()
    assert row.split()[1 : 1 + len(word.split())] == word.split()
    assert [line.strip() for line in notes] == ([note] if note else [])


def test_what_is_not_there_counts_before_what_is_to_become_of_it() -> None:
    found = standing(Draining("new memory"), lost="no heartbeat for 5.0 s")
    assert node_state(found) == "lost"
    shown = text_of(nodes_table(state(nodes=(found,)), {}, NOW))
    assert "a lost 60m ago: no heartbeat for 5.0 s" in shown
    assert "a draining: new memory" in shown
    assert node_state(standing(Draining(), suspect=LATE)) == "suspect"


def document(found: Node, clocks: tuple[NodeClock, ...] = ()) -> dict[str, object]:
    return documents.node_document(state(nodes=(found,)), found, {}, clocks, NOW)


def test_a_program_learns_the_same() -> None:
    aside = document(standing(Aside("it fails", "Mend it.", UNTIL)))
    expected = {
        "state": "set aside",
        "reason": "it fails",
        "remedy": "Mend it.",
        "duty": "set aside",
        "until_ns": UNTIL,
        "takes_instances": False,
    }
    assert expected.items() <= aside.items()
    late = document(standing(Serving(), suspect=LATE))
    assert (late["state"], late["reason"], late["duty"], late["takes_instances"]) == ("suspect", LATE, "serving", False)
    well = document(standing(Serving()))
    assert (well["reason"], well["remedy"], well["until_ns"], well["takes_instances"]) == (None, None, None, True)


def test_faults_of_late_are_counted() -> None:
    found = msgspec.structs.replace(node("a"), faults_ns=(NOW - 601 * SECOND, NOW - 599 * SECOND, NOW))
    assert document(found)["faults"] == 2
    header, row = text_of(nodes_table(state(nodes=(found,)), {}, NOW)).splitlines()
    assert header.split()[-1] == "FAULTS"
    assert row.split()[-1] == "2"
    assert "FAULTS" not in text_of(nodes_table(state(nodes=(node("a"),)), {}, NOW))


@pytest.mark.parametrize(
    ("offset_ns", "words"),
    [
        (1_200_000, "ahead by 1.2 ms ± 0.3 ms"),
        (-40_000_000, "behind by 40.0 ms ± 0.3 ms"),
        (-3_600_500_000_000, "behind by 3,600.5 s ± 0.3 ms"),
    ],
)
def test_a_clock_is_ahead_or_behind(offset_ns: int, words: str) -> None:
    assert clock_text(NodeClock(node=NodeId("a"), offset_ns=offset_ns, error_ns=300_000)) == words


@pytest.mark.parametrize(
    ("offset_ns", "note"),
    [
        (SECOND, ""),
        (SECOND + 1, "the clock of a is 1.0 s ahead of the coordinator's (± 0.3 ms); set both by NTP"),
        (-90 * SECOND, "the clock of a is 90.0 s behind the coordinator's (± 0.3 ms); set both by NTP"),
    ],
)
def test_a_clock_that_is_far_off_is_told_how_to_be_set(offset_ns: int, note: str) -> None:
    clocks = (NodeClock(node=NodeId("a"), offset_ns=offset_ns, error_ns=300_000),)
    found = node("a")
    assert document(found, clocks)["clock_offset_ns"] == offset_ns
    lines = text_of(nodes_table(state(nodes=(found,)), {}, NOW, wide=True, clocks=clocks)).splitlines()
    assert clock_text(clocks[0]) in lines[1]
    assert [line.strip() for line in lines[2:]] == ([note] if note else [])
    gone = node("a", lost="it left")
    assert "clock of" not in text_of(nodes_table(state(nodes=(gone,)), {}, NOW, clocks=clocks))
    assert document(gone, clocks)["clock_offset_ns"] is None
