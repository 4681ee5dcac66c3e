"""What options about models become: of `muster serve`, and of `muster worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muster.cli.app import app
from muster.cli.serve_model import ServeSettings
from muster.spec import ModelWorkload
from muster.worker.settings import WorkerSettings


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Answers the settings that `muster worker` would run with."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    seen: list[WorkerSettings] = []
    monkeypatch.setattr("muster.cli.processes.run_process", lambda run, settings, attendance: seen.append(settings))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr("muster.cli.processes.configure_logs", lambda level: None)  # pyright: ignore[reportUnknownLambdaType]

    def run(*options: str) -> WorkerSettings:
        result = CliRunner().invoke(app, ["worker", "--join", "127.0.0.1", "--node-id", "a", *options])
        assert result.exit_code == 0, result.output
        return seen[-1]

    return run


def test_workers_of_a_machine_have_their_copies_in_common(worker: Any, tmp_path: Path) -> None:
    assert worker().copies_directory == tmp_path / "models"
    assert worker().directory == tmp_path / "workers" / "a"
    own = worker("--directory", str(tmp_path / "own"))
    assert own.copies_directory == tmp_path / "own" / "models"
    assert worker("--copies", str(tmp_path / "c"), "--directory", str(tmp_path)).copies_directory == tmp_path / "c"


def test_a_worker_may_share_nothing(worker: Any) -> None:
    assert (worker().share, worker("--no-share").share) == (True, False)
    assert (worker().offline, worker("--offline").offline) == (False, True)


def test_serve_lets_a_tokenizers_code_run_only_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeSettings] = []

    def noted(settings: ServeSettings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("muster.cli.serve_model.run_serve", noted)
    for options in ((), ("--trust-remote-code",)):
        assert CliRunner().invoke(app, ["serve", "owner/name", *options]).exit_code == 0
    trusts = [one.spec.workload.trust_remote_code for one in seen if isinstance(one.spec.workload, ModelWorkload)]
    assert trusts == [False, True]
