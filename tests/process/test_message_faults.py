"""The bus over a line that loses, doubles, delays and reorders messages: all agree, and nothing counts twice."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from pathlib import Path

import pytest
from kit import COLD, DEMO_MODEL, Client, Stage, group, kill, model, script, until
from kit.faulty_bus import Chaos, FaultyCluster, Odds

from muster.events import Envelope, NodeLost, RankFact, decode_envelope, kind_of
from muster.fold import apply
from muster.protocol import Delete, Query
from muster.replies import Accepted, Found
from muster.spec import RestartOnFailure
from muster.state import State

#: Doubles cost nothing; the others make a worker wait until it sends again.
ODDS = Odds(drop=0.05, duplicate=0.15, delay=0.05, reorder=0.05, delay_seconds=0.2)
#: Short heartbeats, and a lease that only a dead node overruns, however many of them get lost.
CLOCKS = ("--heartbeat", "0.2", "--lease", "5.0")


def fates(odds: Odds, messages: int = 400) -> tuple[list[int], Chaos]:
    """Messages 0, 1, … of one flow, 0.01 s apart, as they arrive."""
    chaos, arrived = Chaos(odds, seed=1), list[int]()
    for number in range(messages):
        chaos.take("flow", lambda number=number: arrived.append(number), number * 0.01)
        chaos.run_due(number * 0.01)
    chaos.run_due(messages * 0.01 + odds.delay_seconds)
    return arrived, chaos


@pytest.mark.parametrize(
    ("odds", "fate"),
    [
        (Odds(), "passed"),
        (Odds(drop=0.5), "dropped"),
        (Odds(duplicate=0.5), "duplicated"),
        (Odds(delay=0.5, delay_seconds=0.1), "delayed"),
        (Odds(reorder=0.5), "reordered"),
    ],
)
def test_a_message_suffers_what_the_odds_say_and_the_seed_decides(odds: Odds, fate: str) -> None:
    arrived, chaos = fates(odds)
    assert fates(odds)[0] == arrived
    assert sum(chaos.counts.values()) == 400
    assert chaos.counts["passed"] == 400 if fate == "passed" else 120 < chaos.counts[fate] < 280
    copies = Counter(Counter(arrived).values())
    assert copies[2] == chaos.counts["duplicated"]
    assert 400 - copies.total() == chaos.counts["dropped"]
    assert (arrived != sorted(arrived)) == (fate in ("duplicated", "delayed", "reordered"))
    if fate == "reordered":  # only by those that follow, until one that passes
        assert Counter(arrived).total() == 400
    assert all(abs(place - number) <= 25 for place, number in enumerate(arrived)) or fate in ("dropped", "duplicated")


@pytest.mark.process
@pytest.mark.mlx
def test_state_converges_over_a_line_that_loses_doubles_delays_and_reorders_and_nothing_counts_twice(
    tmp_path: Path,
) -> None:
    with (
        FaultyCluster(
            tmp_path, ("a", "b"), odds=ODDS, seed=20_26, coordinator_options=CLOCKS, node_options=COLD
        ) as cluster,
        Client(cluster.address) as honest,
        Client(cluster.line("observer").address) as behind,
    ):
        made = Stage(cluster, honest)
        again = RestartOnFailure(maximum=3, backoff_seconds=0.05)
        restarted, served = honest.create(group(restart=again)), honest.create(model(DEMO_MODEL))
        printing = honest.create(script(tmp_path, "for line in range(8): print(line)", ranks=1))
        victim = honest.ready(restarted).ranks[1]
        kill(next(one for one in made.runners("b") if one.pid == victim.pid))
        honest.ready(restarted, attempt=2)
        honest.ready(served)
        assert honest.lines(printing, 8) == [f"0: {line}" for line in range(8)]
        instances = [restarted, served, printing]
        for instance in instances:
            assert isinstance(honest.call(Delete(instance=instance)), Accepted)
        for instance in instances:
            honest.gone(instance)

        for line in cluster.lines.values():
            line.calm()
        head = log_of(honest)[-1].sequence
        agreed = until(lambda: agreement(honest, behind, head), f"both have event {head}")
        log = [envelope for envelope in log_of(honest) if envelope.sequence <= agreed.sequence]
        assert reduce(apply, log, State()) == agreed
        assert_once(log)
        # The deletion may reach a rank later than the end of its sibling does, which is a failure to it.
        ends = (["gone"], ["failed", "gone"])
        lost = [event.reason for envelope in log if isinstance(event := envelope.event(), NodeLost)]
        assert not lost, lost
        steps = steps_of(log)
        for rank in range(2):
            # One that is connected before its worker has looked is never seen to listen.
            model_steps = [step for step in steps[served, 1, rank] if step != "listening"]
            group_steps = [step for step in steps[restarted, 2, rank] if step != "listening"]
            assert model_steps[:4] == ["prepared", "connected", "loaded", "ready"]
            assert group_steps[:3] == ["prepared", "connected", "ready"]
            assert model_steps[4:] in ends, model_steps
            assert group_steps[3:] in ends, group_steps
        made.assert_nothing_left(*instances)
        for line in cluster.lines.values():
            assert {"dropped", "duplicated", "delayed", "reordered"} <= set(line.chaos.counts), line.chaos.counts


def agreement(one: Client, other: Client, head: int) -> State | None:
    """The state that both have, where it is the same and that of event `head` or of a later one."""
    state = one.latest
    return state if state.sequence >= head and state == other.latest else None


def log_of(client: Client) -> list[Envelope]:
    """The whole log."""
    found = client.call(Query(limit=10_000))
    assert isinstance(found, Found)
    assert found.oldest == 1
    return [decode_envelope(envelope) for envelope in found.envelopes]


def assert_once(log: list[Envelope]) -> None:
    """No report is in the log twice, and no rank of an attempt did anything twice."""
    reports = Counter((one.report.node, one.report.boot, one.report.n) for one in log if one.report is not None)
    assert [(report, times) for report, times in reports.items() if times > 1] == []
    for steps in steps_of(log).values():
        assert len(steps) == len(set(steps)), steps


def steps_of(log: list[Envelope]) -> dict[tuple[str, int, int], list[str]]:
    """What each rank did, in order, by instance, attempt and rank."""
    steps: dict[tuple[str, int, int], list[str]] = {}
    for envelope in log:
        event = envelope.event()
        if isinstance(event, RankFact):
            key = (event.instance, event.attempt, event.rank)
            steps.setdefault(key, []).append(kind_of(event).removeprefix("rank."))
    return steps
