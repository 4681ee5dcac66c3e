"""Options and arguments that commands share, and how their text is read. Light: `muster --help` imports it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster import paths
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.spec import BackendWish, Deadlines, NodeId, Restart

DEFAULT_ADDRESS = "127.0.0.1:5710"

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _complete_instance(context: typer.Context, incomplete: str) -> list[str]:
    from muster.cli.client import instance_names

    return instance_names(_address_of(context), incomplete)


def _complete_node(context: typer.Context, incomplete: str) -> list[str]:
    from muster.cli.client import node_names

    return node_names(_address_of(context), incomplete)


def _address_of(context: typer.Context) -> str:
    return str(context.params.get("coordinator") or os.environ.get(paths.COORDINATOR_VARIABLE) or DEFAULT_ADDRESS)


#: More than the memory of any machine, in GiB.
MOST_GIB = 2.0**20
CoordinatorOption = Annotated[
    str,
    typer.Option(
        "--coordinator",
        envvar=paths.COORDINATOR_VARIABLE,
        help="The coordinator's address, and its standby's after a comma.",
        metavar="HOST[:PORT][,…]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
InstanceArgument = Annotated[
    str,
    typer.Argument(
        help="Its id, its name, or the beginning of its id.", metavar="INSTANCE", autocompletion=_complete_instance
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="A served model, or an instance's id or name; needed where there are several and nobody can be asked.",
        metavar="[INSTANCE]",
        autocompletion=_complete_instance,
    ),
]
InstancesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Ids, names, or beginnings of ids.", metavar="[INSTANCE]...", autocompletion=_complete_instance
    ),
]
NodesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Nodes; see: muster nodes", metavar="NODE", autocompletion=_complete_node),
]
NodesOption = Annotated[
    str | None, typer.Option("--nodes", help="Only these nodes, in the order of the ranks.", metavar="A,B,…")
]
EnvironmentOption = Annotated[
    list[str] | None, typer.Option("--env", help="A variable for the script; again for more.", metavar="KEY=VALUE")
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", help="Seconds that a rank of the script may run.", metavar="SECONDS")
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        help="auto, ring (TCP), jaccl (RDMA, a mesh before a ring) or jaccl-ring (RDMA, all cables to each neighbour).",
        metavar="BACKEND",
    ),
]
SideChannelOption = Annotated[
    str,
    typer.Option(
        "--side-channel",
        help="How jaccl ranks exchange connection data: tcp (a port of rank 0) or bus (through the coordinator).",
        metavar="WAY",
    ),
]


@contextmanager
def input_errors(remedy: str = "See the command's --help.") -> Generator[None]:
    """What the messages' own checks refuse is bad input, not a defect.

    Raises:
        RequestError: a `ValueError` came out of the body.
    """
    try:
        yield
    except ValueError as error:
        raise RequestError(str(error), remedy=remedy) from error


def parse_choice(option: str, text: str, choices: Sequence[str]) -> str:
    """One of the choices.

    Raises:
        RequestError: it is none of them.
    """
    if text not in choices:
        raise RequestError(f"{option} is {text!r}", remedy=f"Use one of: {', '.join(choices)}.")
    return text


def parse_backend(text: str) -> BackendWish:
    """Read --backend.

    Raises:
        RequestError: there is none of that name.
    """
    match text:
        case "auto" | "ring" | "jaccl" | "jaccl-ring":
            return text
        case _:
            raise RequestError(f"--backend is {text!r}", remedy="Use one of: auto, ring, jaccl, jaccl-ring.")


def parse_nodes(text: str | None) -> tuple[NodeId, ...]:
    """Read "a,b".

    Raises:
        RequestError: a name is empty or no name of a node.
    """
    from muster.spec import NodeId

    if text is None:
        return ()
    names = text.split(",")
    for name in names:
        check_node(name, "--nodes")
    return tuple(NodeId(name) for name in names)


def check_node(name: str, option: str) -> None:
    """Raises `RequestError` unless the text can be a node's id."""
    if not _NODE.fullmatch(name):
        raise RequestError(
            f"{option} has {name!r}, which is no node id",
            remedy="Node ids are letters, digits, '.', '_' and '-', separated by commas without spaces; "
            "see: muster nodes",
        )


def parse_restart(text: str) -> Restart:
    """Read "never", "on-failure" or "on-failure:N".

    Raises:
        RequestError: it is none of these, or N is no positive number.
    """
    from muster.spec import NeverRestart, RestartOnFailure

    if text == "never":
        return NeverRestart()
    policy, colon, count = text.partition(":")
    if policy == "on-failure" and not colon:
        return RestartOnFailure()
    if policy == "on-failure" and count.isascii() and count.isdigit() and 0 < int(count) < 10_000:
        return RestartOnFailure(maximum=int(count))
    raise RequestError(
        f"--restart is {text!r}", remedy="Use never, on-failure, or on-failure:N with N from 1 on, as on-failure:3."
    )


def parse_deadlines(texts: Sequence[str] | None) -> Deadlines:
    """Read "form=30" and the like.

    Raises:
        RequestError: an unknown phase, or a value that is no number of seconds in range.
    """
    import msgspec

    from muster.spec import Deadlines

    known = {name.removesuffix("_seconds"): name for name in Deadlines.__struct_fields__}
    values: dict[str, float] = {}
    for text in texts or ():
        phase, equals, seconds = text.partition("=")
        if not equals or phase not in known:
            raise RequestError(
                f"--deadline is {text!r}", remedy=f"Use PHASE=SECONDS with a phase of: {', '.join(known)}."
            )
        values[known[phase]] = parse_seconds(f"--deadline {phase}", seconds)
    with input_errors("Give seconds, as in --deadline form=30."):
        # Only a constructor runs the Struct's own checks.
        return Deadlines(**{**msgspec.structs.asdict(Deadlines()), **values})


def parse_environment(texts: Sequence[str] | None) -> dict[str, str]:
    """Read "KEY=VALUE"s.

    Raises:
        RequestError: there is no "=", or the key is no name of a variable.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not _VARIABLE.fullmatch(key):
            raise RequestError(f"--env is {text!r}", remedy="Use KEY=VALUE, as in --env OMP_NUM_THREADS=4.")
        found[key] = value
    return found


def parse_seconds(option: str, text: str) -> float:
    """A length of time: "90", "90s", "10m", "2h", "1d" or "500ms", in seconds.

    Raises:
        RequestError: it is none of these.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise RequestError(f"{option} is {text!r}, which is no length of time", remedy="Use 90s, 10m, 2h or 1d.")
    return float(match[1]) * _UNIT_SECONDS[match[2] or "s"]


def check_positive(option: str, value: float | None) -> None:
    """Raises `RequestError` unless the value is missing or a finite number above zero."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise RequestError(f"{option} is {value:g}", remedy="Give a number above zero.")


def parse_gib(option: str, value: float | None) -> int | None:
    """GiB as bytes; `None` where it is missing.

    Raises:
        RequestError: it is no number above zero, or more than any machine has.
    """
    check_positive(option, value)
    if value is not None and value > MOST_GIB:
        raise RequestError(f"{option} is {value:g}", remedy=f"Give GiB, at most {MOST_GIB:g}.")
    return None if value is None else int(value * 2**30)


def absolute(path: Path) -> str:
    """The path from the root, with its links: other nodes may have other links."""
    return os.path.abspath(path.expanduser())  # noqa: PTH100  Path.resolve would follow the links
