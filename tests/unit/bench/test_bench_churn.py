"""What the soak counts as lost, as growth, and as settled."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from muster.bench.churn import settled, times_of
from muster.bench.churn_figures import (
    SILENT,
    Churned,
    Moment,
    Outage,
    Outcomes,
    Vitals,
    churn_figures,
    growth_figures,
    kind_of_error,
)
from muster.spec import Failure, GroupWorkload, InstanceId, InstanceSpec
from muster.state import Broken, Deleting, Ending, Finished, Instance, InstanceStatus, Running, Starting

OUTAGE = Outage(began=100.0, ended=104.0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('status 503: {"error": {"code": "model-unavailable"}}', "503 model-unavailable"),
        ("status 502: no JSON", "502"),
        ("error event: {'message': 'gone', 'code': 'answer-lost'}", "error event answer-lost"),
        ("error event: gone", "error event"),
        ("status missing: ", f"{SILENT}status missing: "),
        ("the stream was cut before [DONE]", f"{SILENT}the stream was cut before [DONE]"),
        ("ConnectionRefusedError: no", f"{SILENT}ConnectionRefusedError: no"),
    ],
)
def test_an_error_has_a_kind_and_a_hang_up_is_silence(text: str, kind: str) -> None:
    assert kind_of_error(text) == kind


def test_answers_and_errors_are_counted_by_kind() -> None:
    outcomes = Outcomes()
    for error in (None, "rank-killed", None, "rank-killed", "503"):
        outcomes.add(error, 1.0, 3.5, [])
    assert (outcomes.answers, outcomes.errors) == (2, Counter({"rank-killed": 2, "503": 1}))
    assert (outcomes.lost, outcomes.longest_seconds) == ([], 2.5)


@pytest.mark.parametrize(
    ("began", "ended", "excused"),
    [
        (90.0, 101.0, True),
        (99.0, 99.5, True),
        (104.5, 110.0, True),
        (101, 102, True),
        (90, 98.9, False),
        (106, 110, False),
    ],
)
def test_silence_is_excused_by_an_outage_alone(began: float, ended: float, excused: bool) -> None:
    outcomes = Outcomes()
    outcomes.add(f"{SILENT}cut", began, ended, [Outage(began=1.0, ended=2.0), OUTAGE])
    assert (outcomes.errors["unreachable"], len(outcomes.lost)) == ((1, 0) if excused else (0, 1))


def test_an_outage_that_goes_on_excuses_what_ends_in_it() -> None:
    outcomes = Outcomes()
    outcomes.add(f"{SILENT}cut", 200.0, 300.0, [Outage(began=100.0)])
    assert outcomes.lost == []


# --- growth -------------------------------------------------------------------------------------------------


def moments(*, memory: float = 100.0, descriptors: int = 40, threads: int = 4, events: int = 20) -> list[Moment]:
    """Nine looks at one process; the values are those of the last third, in which `events` are logged per cycle."""
    made: list[Moment] = []
    logged = 0
    for number in range(9):
        late = number >= 6
        logged += events if late else 20
        vitals = Vitals(
            memory_bytes=int((memory if late else 100.0) * 1e6),
            descriptors=descriptors if late else 40,
            threads=threads if late else 4,
        )
        made.append(
            Moment(seconds=number, roles={"coordinator": vitals}, cycles=number, events=logged, log_bytes=2**20)
        )
    return made


def broken(found: list[Moment]) -> list[str]:
    return [row.name.split(",")[0] for row in growth_figures(found, judged=True) if not row.holds]


def test_what_stays_as_it_is_holds() -> None:
    rows = growth_figures(moments(), judged=True)
    assert len(rows) == 5 and all(row.holds for row in rows)
    # A tenth of the memory, or a few descriptors, are no leak.
    assert broken(moments(memory=110.0, descriptors=48, threads=7, events=25)) == []


def test_what_grows_is_told() -> None:
    assert broken(moments(memory=110.1)) == ["growth of memory"]
    assert broken(moments(descriptors=49)) == ["growth of descriptors"]
    assert broken(moments(threads=8)) == ["growth of threads"]
    assert broken(moments(events=26)) == ["events logged per churn cycle"]
    large = [msgspec.structs.replace(moment, log_bytes=65 * 2**20) for moment in moments()]
    assert broken(large) == ["the log in the end"]


def test_a_short_run_does_not_judge_growth() -> None:
    rows = growth_figures(moments(memory=500.0), judged=False)
    assert [row.holds for row in rows] == [None, None, None, True, None]
    assert growth_figures([], judged=True) == []


def test_a_process_that_was_not_there_is_left_out() -> None:
    absent = [msgspec.structs.replace(moment, roles={}) for moment in moments()]
    assert [row.unit for row in growth_figures(absent, judged=True)] == ["bytes", ""]


def test_every_broken_promise_is_a_row_that_does_not_hold() -> None:
    good = Churned(seconds=900.0, outcomes=Outcomes(answers=5), cycles=9, answers_in_the_end=True, moments=moments())
    assert not [row.name for row in churn_figures(good) if row.holds is False]
    errors = Counter({"internal": 1, "500 x": 1, "503": 3})
    bad = Churned(
        seconds=900.0,
        outcomes=Outcomes(errors=errors, lost=["cut"]),
        stuck=["cycle 1"],
        kills=Counter(ranks=3),
        asides=2,
        moments=moments(memory=200.0),
    )
    rows = {row.name: row for row in churn_figures(bad)}
    assert [name for name, row in rows.items() if row.holds is False] == [
        "churn cycles",
        "what did not converge",
        "requests answered",
        "requests lost without an error",
        "requests with an internal error",
        "the model answers in the end",
        "growth of memory, coordinator, from 100 MB",
    ]
    assert rows["requests with an internal error"].muster == 2
    assert (rows["kills: ranks"].muster, rows["requests with the error 503"].muster) == (3, 3)


# --- the plan -----------------------------------------------------------------------------------------------


def test_a_run_of_any_length_has_every_kill_and_evenly() -> None:
    assert times_of(24.0, 150.0, 0.25) == [6.0]
    assert times_of(900.0, 150.0, 0.5) == [75.0, 225.0, 375.0, 525.0, 675.0, 825.0]


def instance(status: InstanceStatus, attempt: int = 1) -> Instance:
    return Instance(
        id=InstanceId("i"),
        spec=InstanceSpec(workload=GroupWorkload()),
        created_ns=0,
        attempt=attempt,
        backend="ring",
        status=status,
        since_ns=0,
        ranks=(),
        created_by=1,
        caused_by=1,
    )


FAILURE = Failure(kind="rank-killed", message="gone")


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (None, "gone"),
        (instance(Running()), None),
        (instance(Running(), 2), "ready"),
        (instance(Running(), 3), "ready"),
        (instance(Starting(), 2), None),
        (instance(Ending("moved"), 2), None),
        (instance(Deleting()), None),
        (instance(Finished()), "over"),
        (instance(Broken(FAILURE)), "over"),
        (instance(Broken(FAILURE, 5)), None),
    ],
)
def test_an_instance_is_settled_in_the_attempt_that_is_waited_for(found: Instance | None, what: str | None) -> None:
    assert settled(found, 2) == what
