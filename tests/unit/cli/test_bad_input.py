"""Bad input ends with 2, one line that says what is wrong and one that says what to do, before any connection."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from muster import __version__
from muster.cli import instance_commands
from muster.cli.app import main
from muster.cli.errors import InterruptedBySignalError, exit_code_of
from muster.cli.options import parse_backend
from muster.errors import MusterError, PlacementError, RequestError, UnreachableError
from muster.spec import BackendWish, InstanceSpec

#: Nobody listens there: whoever tried to connect would end with 3.
NOWHERE = ("--coordinator", "127.0.0.1:1")


def ends(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("backend", get_args(BackendWish))
def test_every_backend_that_a_spec_takes_is_an_option(backend: str) -> None:
    assert parse_backend(backend) == backend
    with pytest.raises(RequestError) as caught:
        parse_backend(f"{backend}s")
    assert backend in caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create"], "nothing to create"),
        (["create", "one", "two"], "2 models"),
        (["create", "--script", "a.py", "--group"], "exclude each other"),
        (["create", "--group", "model"], "'model'"),
        (["create", "--group", "--ranks", "0"], "ranks is 0"),
        (["create", "--group", "--ranks", "1", "--nodes", "a,b"], "2 nodes for 1 ranks"),
        (["create", "--group", "--nodes", "a b"], "'a b'"),
        (["create", "--group", "--restart", "often"], "'often'"),
        (["create", "--group", "--deadline", "form=0"], "form_seconds is 0"),
        (["create", "--group", "--backend", "nccl"], "'nccl'"),
        (["create", "--group", "--memory", "-1"], "--memory is -1"),
        (["create", "--group", "--name", ""], "name is ''"),
        (["create", "model", "--sharding", "both"], "'both'"),
        (["create", "model", "--timeout", "3"], "muster: --timeout is for scripts only"),
        (["create", "--group", "--env", "A=1"], "muster: --env is for scripts only"),
        (["create", "--group", "--max-batch", "3"], "--max-batch is for models only"),
        (["create", "model", "--max-batch", "0"], "max_batch is 0"),
        (["create", "model", "--prefill-chunk", "0"], "prefill_chunk_tokens is 0"),
        (["create", "model", "--prompt-cache", "-1"], "prompt_cache_bytes is -"),
        (["create", "model", "--served-name", ""], "served_name is ''"),
        (["create", "--group", "--env", "A=1", "--timeout", "3"], "--timeout and --env are for scripts only"),
        (["create", "--script", "a.py", "--timeout", "-3"], "--timeout is -3"),
        (["create", "--script", "a.py", "--env", "A"], "'A'"),
        (["delete"], "nothing to delete"),
        (["delete", "one", "--all"], "both"),
        (["exec", "--ranks", "0", "a.py"], "ranks is 0"),
        (["exec", "--timeout", "0", "a.py"], "--timeout is 0"),
        (["generate", "one", ""], "prompt is empty"),
        (["generate", "one", "x", "--temperature", "-1"], "temperature is -1"),
        (["generate", "one", "x", "--max-tokens", "-1"], "max_tokens is -1"),
        (["events", "--since", "yesterday"], "'yesterday'"),
        (["events", "--limit", "0"], "--limit is 0"),
        (["events", "--node", "a b"], "'a b'"),
        (["events", "--kind", "foo"], "'foo'"),
        (["events", "--kind", "rank", "--kind", "rank.foo"], "'rank.foo'"),
        (["trace", "one", "--attempt", "0"], "--attempt is 0"),
        (["logs", "one", "--rank", "-1"], "--rank is -1"),
        (["drain"], "no node to drain"),
        (["drain", "a b"], "'a b'"),
        (["drain", "a", "--timeout", "0"], "--timeout is 0"),
        (["drain", "a", "--timeout", "3", "--no-wait"], "exclude each other"),
        (["resume"], "no node to resume"),
        (["resume", "a", "b,c"], "'b,c'"),
        (["retry"], "nothing to try again"),
        (["retry", "one", "--wait-seconds", "-1"], "--wait-seconds is -1"),
        (["ps", "--coordinator", "a:b:c"], "a:b:c"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # What belongs to the script of `exec` would follow its file, so the address comes before.
    where = () if "--coordinator" in arguments else NOWHERE
    assert ends([arguments[0], *where, *arguments[1:]]) == 2
    shown = capsys.readouterr()
    cause, remedy = shown.err.splitlines()
    assert cause.startswith("muster: ")
    assert words in cause
    assert remedy.strip()
    assert not shown.out


@pytest.mark.parametrize("options", [["--nodes", "0"], ["--port", "70000"], ["--pool", "-1"], ["--lease", "0"]])
def test_up_refuses_bad_numbers(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["up", *options]) == 2
    assert options[0] in capsys.readouterr().err


def test_nobody_at_the_address_ends_with_3_and_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["ps", *NOWHERE]) == 3
    shown = capsys.readouterr().err
    assert "127.0.0.1:1 (connection refused)" in shown
    assert "muster up" in shown


@pytest.mark.parametrize(
    ("error", "code"),
    [(RequestError("x"), 2), (UnreachableError("x"), 3), (PlacementError("x"), 1), (MusterError("x"), 1)],
)
def test_each_error_has_its_exit_code(error: MusterError, code: int) -> None:
    assert exit_code_of(error) == code


def test_a_refusal_of_bad_input_counts_as_bad_input() -> None:
    from muster.bus import RefusedError
    from muster.spec import Failure

    assert exit_code_of(RefusedError(Failure(kind="request-invalid", message="x"))) == 2
    assert exit_code_of(RefusedError(Failure(kind="placement-refused", message="x"))) == 1


def test_a_signal_names_itself() -> None:
    assert str(InterruptedBySignalError(15)) == "SIGTERM"


def test_help_says_what_the_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "no coordinator at the address" in shown


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["--version"]) == 0
    assert capsys.readouterr().out == f"muster {__version__}\n"


def test_an_unknown_kind_of_event_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["events", "--kind", "foo", *NOWHERE]) == 2
    remedy = capsys.readouterr().err.splitlines()[1]
    assert "attempt, coordinator, instance, node, rank for all" in remedy
    assert "rank.ready" in remedy


@pytest.mark.parametrize("kind", ["rank", "rank.", "rank.ready", "attempt"])
def test_a_known_kind_of_event_is_taken(kind: str) -> None:
    assert ends(["events", "--kind", kind, *NOWHERE]) == 3


@pytest.mark.parametrize(
    ("options", "ranks"), [([], 2), (["--ranks", "1"], 1), (["--nodes", "a"], 1), (["--nodes", "a,b,c"], 3)]
)
def test_a_group_has_two_ranks_where_nothing_else_is_said(
    options: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[InstanceSpec] = []

    def take(coordinator: str, spec: InstanceSpec, *rest: object) -> None:
        del coordinator, rest
        specs.append(spec)

    monkeypatch.setattr(instance_commands, "_create", take)
    assert ends(["create", "--group", *options]) == 0
    assert [spec.ranks for spec in specs] == [ranks]


def test_help_is_light() -> None:
    program = (
        "import sys; import muster.cli.app; print([m for m in ('mlx', 'zmq', 'anyio', 'psutil') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout.strip() == "[]"
