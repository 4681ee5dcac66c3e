"""`muster doctor` and `--hostfile`: what goes together, what an error text means, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.cli.app import main

#: Nobody listens there: whoever tried to connect would end with 3.
NOWHERE = ("--coordinator", "127.0.0.1:1")


def ends(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--explain", "errno 22", "--cluster"], "--explain goes with no other check"),
        (["doctor", "--cluster", "--ports", "40000-40010"], "--ports is for this machine only"),
        (["doctor", "--ports", "1-2"], "--ports is '1-2'"),
        (["create", "m", "--hostfile", "none.json"], "none.json cannot be read: No such file"),
        (["create", "m", "--hostfile", "none.json", "--ranks", "2"], "--hostfile and --ranks exclude"),
        (["create", "m", "--hostfile", "none.json", "--backend", "ring"], "--hostfile and --backend exclude"),
        (["exec", "--hostfile", "none.json", "--nodes", "a", "x.py"], "--hostfile and --nodes exclude"),
    ],
)
def test_bad_input_is_refused_before_any_connection(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = arguments
    assert ends(command, *NOWHERE, *rest) == 2
    assert words in capsys.readouterr().err


def test_a_hostfile_with_a_mistake_is_refused_before_any_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"hosts": [{"ssh": "mac1", "ip": "10.0.0.1"}]}))
    assert ends("create", "m", "--hostfile", str(path), *NOWHERE) == 2
    assert capsys.readouterr().err.splitlines() == [
        "muster: hosts[0] has the unknown key 'ip'",
        "  The keys are: ssh, ips, rdma, node.",
    ]
    path.write_bytes(b"\xff\xfe")
    assert ends("create", "m", "--hostfile", str(path), *NOWHERE) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_an_error_text_of_mlx_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[jaccl] Changing queue pair to RTR failed with errno 22"
    assert not ends("doctor", "--explain", text)
    cause, remedy = capsys.readouterr().out.splitlines()[:2]
    assert "bridge" in cause
    assert remedy.startswith("→ ")
    assert not ends("doctor", "--explain", text, "--json")
    assert set(json.loads(capsys.readouterr().out)) == {"cause", "remedy", "lasting"}
    assert ends("doctor", "--explain", "all is well") == 1
    assert "nothing is known of this text" in capsys.readouterr().err
