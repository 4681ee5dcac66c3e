"""`place` asks for what `create` would create, and what nodes were short of is printed for programs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from muster.bench.random_clusters import GIB, node
from muster.bus import RefusedError
from muster.cli import client as client_module
from muster.cli.app import main
from muster.cli.instance_commands import create
from muster.cli.place_commands import place
from muster.protocol import Create, Preview
from muster.replies import Created, Option, Previewed
from muster.spec import Failure, InstanceId, InstanceSpec, NodeAddress, NodeId, Shortfall
from muster.state import Node, State

SHORT = Shortfall(node=NodeId("a"), reason="node a is full", needed_bytes=9, available_bytes=7, missing_bytes=2)


class Asked:
    """Stands for the client: keeps what is asked for, and answers or refuses."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.specs: list[InstanceSpec] = []

    async def ask(self, request: object, timeout_seconds: float, kind: type[object]) -> object:
        del timeout_seconds, kind
        assert isinstance(request, Create | Preview), request
        self.specs.append(request.spec)
        failure = Failure(kind="placement-refused", message="no room", remedy="Make some.")
        if isinstance(request, Preview):
            refused = (Option(refusal="no room", shortfalls=(SHORT,)),)
            return Previewed(options=refused if self.refuses else (), remedies=())
        if self.refuses:
            raise RefusedError(failure, (SHORT,))
        return Created(instance=InstanceId("i"), sequence=1)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Asked, int]]:
    def run(*arguments: str, refuses: bool = False) -> tuple[Asked, int]:
        asked = Asked(refuses=refuses)

        def answer(coordinator: str, work: Callable[[Any], Awaitable[object]]) -> object:
            del coordinator
            return anyio.run(work, asked)

        async def view(client: object) -> object:
            del client
            other = NodeAddress(host="10.0.0.2", network="10.0.0.0/24")
            infos = (
                node("a", GIB).info,
                msgspec.structs.replace(node("b", GIB).info, addresses=(other,), candidates=(other,)),
            )
            nodes = {info.node: Node(info=info, since_ns=0) for info in infos}
            return Seen(State(nodes=nodes))

        monkeypatch.setattr(client_module, "run", answer)
        monkeypatch.setattr(client_module, "view", view)
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert isinstance(caught.value.code, int)
        return asked, caught.value.code

    return run


class Seen:
    """Stands for what the coordinator shows of itself."""

    facts = ()

    def __init__(self, state: State) -> None:
        self.state = state


OPTIONS = [
    "--nodes a,b --backend ring --side-channel bus --network 10.0.0.0/24 --memory 3",
    "--split 3,4 --sharding pipeline --name n --restart never --deadline form=3",
    "--context 99 --concurrency 2 --max-batch 7 --prefill-chunk 64 --prompt-cache 0.5 --served-name s",
    "--revision r --trust-remote-code --ranks auto",
    "",
]


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_previewed_is_what_would_be_created(options: str, ask: Callable[..., tuple[Asked, int]]) -> None:
    words = ["org/model", *options.split()]
    created, previewed = ask("create", *words)[0], ask("place", *words)[0]
    assert created.specs == previewed.specs and len(created.specs) == 1


def test_a_hostfile_is_previewed_too(tmp_path: Path, ask: Callable[..., tuple[Asked, int]]) -> None:
    path = tmp_path / "hosts.json"
    hosts = [{"node": name, "ssh": name, "ips": [host]} for name, host in (("b", "10.0.0.2"), ("a", "10.0.0.1"))]
    path.write_text(json.dumps(hosts))
    words = ["org/model", "--hostfile", str(path)]
    created, previewed = ask("create", *words)[0], ask("place", *words)[0]
    assert created.specs == previewed.specs
    assert (previewed.specs[0].nodes, previewed.specs[0].ranks) == (("b", "a"), 2)


def test_no_option_of_a_model_is_left_out_of_place() -> None:
    creating, placing = (dict(inspect.signature(command).parameters) for command in (create, place))
    only = {"arguments", "script", "group", "timeout", "environment", "wait", "wait_seconds", "quiet"}
    assert {name for name in creating if name not in placing} == only
    assert {name for name in placing if name not in creating} == {"model"}
    assert [name for name in placing if name != "model" and placing[name] != creating[name]] == []
    assert {option for text in OPTIONS for option in text.split() if option.startswith("--")} == {
        f"--{name.replace('_', '-')}" for name in placing if name not in {"model", "json", "coordinator", "hostfile"}
    }


@pytest.mark.parametrize("wait", [(), ("--wait-seconds", "1")])
def test_what_nodes_were_short_of_is_json(
    wait: tuple[str, ...],
    ask: Callable[..., tuple[Asked, int]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if wait:
        monkeypatch.setattr("muster.cli.watch.watching", _watching)
    _, code = ask("create", "org/model", "--json", *wait, refuses=True)
    out, err = capsys.readouterr()
    assert code == 1
    assert json.loads(out) == {
        "refused": {
            "kind": "placement-refused",
            "message": "no room",
            "remedy": "Make some.",
            "shortfalls": [
                {
                    "node": "a",
                    "reason": "node a is full",
                    "what": "memory",
                    "needed_bytes": 9,
                    "available_bytes": 7,
                    "missing_bytes": 2,
                }
            ],
        }
    }
    assert "muster: no room" in err and "full" not in err, "the text stays short"
    _, code = ask("place", "org/model", "--json", refuses=True)
    assert code == 1
    assert json.loads(capsys.readouterr().out)["options"][0]["shortfalls"][0]["missing_bytes"] == 2
    _, code = ask("create", "org/model", refuses=True)
    assert (code, capsys.readouterr().out) == (1, "")


class _watching:
    def __init__(self, *arguments: object) -> None:
        del arguments

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *arguments: object) -> None:
        return None
