"""A rank that is killed, or does not move, in each phase: none hangs, and each failure names the rank and the phase."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from kit import Stage, assert_blames, group, kill, model, script, stopped, stretched_model

from muster.events import RankConnected, RankListening, RankLoaded, RankPrepared, RankReady
from muster.protocol import Generate
from muster.replies import Chunk, Refused
from muster.sampling import SamplingParams
from muster.spec import Deadlines, Failure, InstanceId

pytestmark = [pytest.mark.process, pytest.mark.mlx]

NODES = ("a", "b")
BOTH = pytest.mark.parametrize("rank", [0, 1])


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stretched_model(tmp_path_factory.mktemp("models") / "slow", 400)


@pytest.fixture(scope="module")
def talkative_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It loads soon, and still takes seconds to answer."""
    return stretched_model(tmp_path_factory.mktemp("models") / "talkative", 80)


@contextmanager
def preparing(shared: Stage, **deadlines: float) -> Generator[tuple[InstanceId, list[psutil.Process]]]:
    """A group whose two runners stand still while they start."""
    instance = shared.client.create(group(deadlines=Deadlines(**deadlines)))
    with stopped(shared.new_runner("a")) as first, stopped(shared.new_runner("b")) as second:
        yield instance, [first, second]


def expect_killed(shared: Stage, instance: InstanceId, rank: int, phase: str) -> None:
    failure = shared.client.failure_of(instance)
    assert_blames(failure, kind="rank-killed", rank=rank, node=NODES[rank], phase=phase)
    assert failure.exit_code == -9
    shared.clean(instance)


def assert_stopped(failure: Failure, runner: psutil.Process) -> None:
    """The failure says what the process does, and how to let it go on."""
    assert "its process is stopped (SIGSTOP)" in failure.message
    assert f"kill -CONT {runner.pid}" in failure.remedy
    assert not failure.secondary


@BOTH
def test_a_rank_that_never_starts_fails_at_the_prepare_deadline(shared: Stage, rank: int) -> None:
    with preparing(shared, prepare_seconds=1.5, stop_seconds=1.0) as (instance, runners):
        runners[1 - rank].resume()
        failure = shared.client.failure_of(instance)
        assert_blames(failure, kind="deadline-passed", rank=rank, node=NODES[rank], phase="preparing")
        assert_stopped(failure, runners[rank])
        shared.clean(instance)


@BOTH
def test_killed_while_preparing(shared: Stage, rank: int) -> None:
    with preparing(shared) as (instance, runners):
        kill(runners[rank])
        expect_killed(shared, instance, rank, "preparing")


@BOTH
def test_killed_while_the_others_wait_to_form(shared: Stage, rank: int) -> None:
    with preparing(shared) as (instance, runners):
        runners[0].resume()
        shared.client.wait(RankPrepared, instance, rank=0)
        runners[0].suspend()  # prepared, and now it can neither listen nor be dialled
        runners[1].resume()
        shared.client.wait(RankPrepared, instance, rank=1)
        kill(runners[rank])
        expect_killed(shared, instance, rank, "forming")


@BOTH
def test_killed_while_mlx_blocks_in_accept(shared: Stage, rank: int) -> None:
    with preparing(shared) as (instance, runners):
        runners[1].resume()
        shared.client.wait(RankPrepared, instance, rank=1)
        runners[1].suspend()
        runners[0].resume()
        shared.client.wait(RankListening, instance, rank=0)
        kill(runners[rank])
        expect_killed(shared, instance, rank, "forming")


def test_a_rank_that_never_dials_fails_at_the_form_deadline(shared: Stage) -> None:
    with preparing(shared, form_seconds=1.0, stop_seconds=1.0) as (instance, runners):
        runners[1].resume()
        shared.client.wait(RankPrepared, instance, rank=1)
        runners[1].suspend()
        runners[0].resume()
        failure = shared.client.failure_of(instance)
        assert_blames(failure, kind="formation-timeout", rank=1, node="b", phase="forming")
        assert_stopped(failure, runners[1])
        shared.clean(instance)


@BOTH
def test_killed_while_loading(shared: Stage, slow_model: Path, rank: int) -> None:
    instance = shared.client.create(model(slow_model, sharding="pipeline"))
    shared.client.wait(RankConnected, instance, rank=rank)
    kill(shared.runner(instance, rank))
    expect_killed(shared, instance, rank, "loading")


@BOTH
def test_killed_while_warming(shared: Stage, slow_model: Path, rank: int) -> None:
    instance = shared.client.create(model(slow_model, sharding="pipeline"))
    shared.client.wait(RankConnected, instance, rank=1 - rank)
    with stopped(shared.runner(instance, 1 - rank)):  # it still loads, and warming needs both
        shared.client.wait(RankLoaded, instance, rank=rank)
        kill(shared.runner(instance, rank))
        expect_killed(shared, instance, rank, "warming")


def test_a_rank_that_is_stopped_while_it_loads_is_named(shared: Stage, slow_model: Path) -> None:
    deadlines = Deadlines(load_seconds=1.5, stop_seconds=1.0)
    instance = shared.client.create(model(slow_model, sharding="pipeline", deadlines=deadlines))
    shared.client.wait(RankConnected, instance, rank=1)
    with stopped(shared.runner(instance, 1)) as runner:
        failure = shared.client.failure_of(instance)
        assert_blames(failure, kind="deadline-passed", rank=1, node="b", phase="loading")
        assert_stopped(failure, runner)
        shared.clean(instance)


def test_a_rank_that_is_stopped_while_all_warm_up_is_named(shared: Stage, slow_model: Path) -> None:
    deadlines = Deadlines(warm_seconds=1.0, stop_seconds=1.0)
    instance = shared.client.create(model(slow_model, sharding="pipeline", deadlines=deadlines))
    shared.client.wait(RankConnected, instance, rank=1)
    with stopped(shared.runner(instance, 1)) as late:
        shared.client.wait(RankLoaded, instance, rank=0)
        with stopped(shared.runner(instance, 0)) as runner:
            late.resume()
            shared.client.wait(RankLoaded, instance, rank=1)
            failure = shared.client.failure_of(instance)
            assert_blames(failure, kind="deadline-passed", rank=0, node="a", phase="warming")
            assert_stopped(failure, runner)
            shared.clean(instance)


@BOTH
def test_killed_while_ready_and_idle(shared: Stage, rank: int) -> None:
    instance = shared.client.create(group())
    shared.client.ready(instance)
    kill(shared.runner(instance, rank))
    expect_killed(shared, instance, rank, "running")


@BOTH
def test_killed_while_a_script_runs_in_a_collective(shared: Stage, tmp_path: Path, rank: int) -> None:
    spec = script(
        tmp_path,
        "import mlx.core as mx\n"
        "group = mx.distributed.init()\n"
        "while True:\n"
        "    mx.eval(mx.distributed.all_sum(mx.ones(4), group=group))\n",
    )
    instance = shared.client.create(spec)
    shared.client.wait(RankReady, instance, rank=0)
    shared.client.wait(RankReady, instance, rank=1)
    kill(shared.runner(instance, rank))
    expect_killed(shared, instance, rank, "running")


def test_the_middle_one_of_three_ranks_is_named(shared: Stage) -> None:
    instance = shared.client.create(group(ranks=3))
    ranks = shared.client.ready(instance).ranks
    kill(shared.runner(instance, 1))
    failure = shared.client.failure_of(instance)
    assert_blames(failure, kind="rank-killed", rank=1, node=ranks[1].node, phase="running")
    shared.clean(instance)


@BOTH
def test_killed_while_it_answers(shared: Stage, talkative_model: Path, rank: int) -> None:
    instance = shared.client.create(model(talkative_model, sharding="pipeline"))
    shared.client.ready(instance)
    sampling = SamplingParams(max_tokens=1000)
    replies = shared.client.begin(Generate(instance=instance, prompt="Why?", sampling=sampling))
    shared.client.wait_for(lambda: any(isinstance(reply, Chunk) for reply in replies), "the first token")
    kill(shared.runner(instance, rank))
    last = shared.client.wait_for(lambda: replies[-1] if isinstance(replies[-1], Refused) else None, "the refusal")
    assert_blames(last.failure, kind="answer-lost", rank=rank, node=NODES[rank], phase="running")
    assert "the runner was ended by SIGKILL" in last.failure.message
    expect_killed(shared, instance, rank, "running")
