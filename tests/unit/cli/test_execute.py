"""The exit code of `muster exec`."""

from __future__ import annotations

import msgspec
import pytest
from cluster_states import FAILURE, instance

from muster.cli.execute import _exit_code
from muster.spec import Failure, ScriptWorkload
from muster.state import Broken, Finished, Gone

SCRIPT = ScriptWorkload(path="/x/train.py")


def test_a_script_that_ended_well_gives_0() -> None:
    assert _exit_code(instance(Finished(), Gone(0), Gone(0), workload=SCRIPT)) == 0


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (FAILURE, 3),
        (msgspec.structs.replace(FAILURE, kind="rank-killed", exit_code=-9), 137),
        (msgspec.structs.replace(FAILURE, kind="formation-failed", exit_code=None), 1),
        (msgspec.structs.replace(FAILURE, kind="rank-exited", exit_code=66), 1),
    ],
)
def test_the_code_is_the_scripts_own_or_1(failure: Failure, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(instance(Broken(failure), Gone(0), Gone(failure.exit_code), workload=SCRIPT)) == code
    shown = capsys.readouterr().err
    assert failure.message in shown
    # The script's own last words were on standard output already.
    assert ("before" in shown) == (code == 1)


@pytest.mark.parametrize(("remedy", "shown"), [("See its output: muster logs one", False), ("Replug the cable.", True)])
def test_what_helps_is_shown_unless_it_is_the_output_that_was_seen(
    remedy: str, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = msgspec.structs.replace(FAILURE, remedy=remedy)
    assert _exit_code(instance(Broken(failure), Gone(0), Gone(3), workload=SCRIPT)) == 3
    assert (remedy in capsys.readouterr().err) == shown
