"""Attempts after a failure, deletion at any moment, and many instances at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import STATES, Stage, brought_to, group, kill, script, stage

from muster.events import AttemptStarted, Envelope, InstanceFailed, InstanceFinished, RankGone
from muster.protocol import Delete
from muster.replies import Refused
from muster.spec import Deadlines, InstanceId, RestartOnFailure

pytestmark = [pytest.mark.process, pytest.mark.mlx]


def story(shared: Stage, instance: InstanceId) -> list[Envelope]:
    return [one for one in shared.client.envelopes if getattr(one.event(), "instance", None) == instance]


def test_attempts_have_fresh_numbers_longer_waits_and_an_end(shared: Stage, tmp_path: Path) -> None:
    restart = RestartOnFailure(maximum=2, backoff_seconds=0.2)
    instance = shared.client.create(script(tmp_path, "raise SystemExit(3)\n", 1, restart=restart))
    shared.client.wait(InstanceFailed, instance, attempt=3)
    failures = [(one, event) for one in story(shared, instance) if isinstance(event := one.event(), InstanceFailed)]
    assert [event.attempt for _, event in failures] == [1, 2, 3]
    waits = [(event.retry_at_ns - one.time_ns) / 1e9 for one, event in failures if event.retry_at_ns is not None]
    # The wait is counted from the round that decided it, and the event is written a moment later.
    assert 0 < waits[0] <= 0.201
    assert 0.2 < waits[1] <= 0.401
    assert failures[-1][1].retry_at_ns is None
    assert len(shared.client.instance(instance).failures) == 3
    shared.clean(instance)


def test_the_next_attempt_begins_when_all_ranks_of_the_last_are_gone(shared: Stage, tmp_path: Path) -> None:
    count = tmp_path / "count"
    text = (
        "import pathlib, signal, time\n"
        "import mlx.core as mx\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "rank = mx.distributed.init().rank()\n"
        f"count = pathlib.Path({str(count)!r})\n"
        "tries = len(count.read_text()) if count.exists() else 0\n"
        "mx.eval(mx.distributed.all_sum(mx.ones(1)))\n"
        "if rank == 1 and tries < 2:\n"
        "    count.write_text('x' * (tries + 1))\n"
        "    raise SystemExit(3)\n"
        "time.sleep(600 if tries < 2 else 0)\n"
    )
    restart = RestartOnFailure(maximum=5, backoff_seconds=0.01)
    deadlines = Deadlines(stop_seconds=0.3)
    instance = shared.client.create(script(tmp_path, text, restart=restart, deadlines=deadlines))
    shared.client.wait(InstanceFinished, instance, attempt=3)
    gone: set[tuple[int, int]] = set()
    for envelope in story(shared, instance):
        event = envelope.event()
        if isinstance(event, RankGone):
            gone.add((event.attempt, event.rank))
        if isinstance(event, AttemptStarted):
            assert {(event.attempt - 1, 0), (event.attempt - 1, 1)} <= gone
    shared.clean(instance)


def test_a_killed_rank_of_a_ready_group_is_replaced(shared: Stage) -> None:
    instance = shared.client.create(group(restart=RestartOnFailure(maximum=3)))
    before = shared.client.ready(instance).ranks
    kill(shared.runner(instance, 1))
    after = shared.client.ready(instance, attempt=2).ranks
    assert {rank.pid for rank in before}.isdisjoint(rank.pid for rank in after)
    assert all(rank.addresses != old.addresses for rank, old in zip(after, before, strict=True))
    shared.clean(instance)


def test_deleting_while_the_next_attempt_waits_ends_it(shared: Stage, tmp_path: Path) -> None:
    restart = RestartOnFailure(maximum=3, backoff_seconds=60.0, backoff_max_seconds=60.0)
    instance = shared.client.create(script(tmp_path, "raise SystemExit(3)\n", 1, restart=restart))
    assert shared.client.wait(InstanceFailed, instance).retry_at_ns is not None
    shared.clean(instance)


@pytest.mark.parametrize("state", STATES[1:])
def test_deleting_in_each_phase_leaves_nothing(shared: Stage, tmp_path: Path, state: str) -> None:
    with brought_to(shared, state, tmp_path) as instance:
        assert instance is not None
        shared.clean(instance)


def test_deleting_twice_and_deleting_what_is_gone(shared: Stage) -> None:
    instance = shared.client.create(group())
    assert not isinstance(shared.client.call(Delete(instance=instance)), Refused)
    assert not isinstance(shared.client.call(Delete(instance=instance)), Refused)
    shared.client.gone(instance)
    shared.assert_nothing_left(instance)
    failure = shared.client.refusal(Delete(instance=instance))
    assert failure.kind == "request-invalid"
    assert instance in failure.message


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path / "cluster", coordinator_options=()) as made:
        yield made


def test_twenty_groups_created_at_once_all_get_ready_and_leave_nothing(wide: Stage) -> None:
    instances = [wide.client.create(group()) for _ in range(20)]
    ports: set[str] = set()
    for instance in instances:
        for rank in wide.client.ready(instance, seconds=50.0).ranks:
            ports |= {str(address) for address in rank.addresses}
    assert len(ports) == 40
    for instance in instances:
        wide.client.call(Delete(instance=instance))
    for instance in instances:
        wide.client.gone(instance)
    wide.assert_nothing_left(*instances)
