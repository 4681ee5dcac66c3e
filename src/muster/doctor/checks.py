"""What a check finds: a verdict, the evidence for it, and what helps. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from muster.spec import NodeId

#: As many different ways of being OK are shown.
_SHOWN = 4


class Verdict(StrEnum):
    """Whether something needs doing: a failure keeps groups from forming or lasting, a warning costs only speed."""

    OK = "OK"
    WARNING = "WARNING"
    FAILURE = "FAILURE"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `help` is the one command or setting that helps; `node` is empty where it is no single node's."""

    name: str
    verdict: Verdict
    evidence: str
    help: str = ""
    node: NodeId = NodeId("")


def ok(name: str, evidence: str, help: str = "") -> Check:
    """Nothing needs doing."""
    return Check(name=name, verdict=Verdict.OK, evidence=evidence, help=help)


def warning(name: str, evidence: str, help: str) -> Check:
    """It works, but worse than it could."""
    return Check(name=name, verdict=Verdict.WARNING, evidence=evidence, help=help)


def failure(name: str, evidence: str, help: str) -> Check:
    """It does not work."""
    return Check(name=name, verdict=Verdict.FAILURE, evidence=evidence, help=help)


def of_node(node: NodeId, checks: Iterable[Check]) -> tuple[Check, ...]:
    """The checks as findings about this node."""
    return tuple(msgspec.structs.replace(check, node=node) for check in checks)


def merged(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Checks of several nodes, the worst first: those that say the same as one, and what is OK as one for each name."""
    same: dict[tuple[str, Verdict, str, str], list[NodeId]] = {}
    for check in checks:
        same.setdefault((check.name, check.verdict, check.evidence, check.help), []).append(check.node)
    fine: dict[str, list[Check]] = {}
    found: list[Check] = []
    for (name, verdict, evidence, help), nodes in same.items():
        node = NodeId(", ".join(filter(None, nodes)))
        check = Check(name=name, verdict=verdict, evidence=evidence, help=help, node=node)
        (fine.setdefault(name, []) if verdict is Verdict.OK else found).append(check)
    found.sort(key=lambda check: check.verdict is not Verdict.FAILURE)
    return (*found, *(_one(checks) for checks in fine.values()))


def _one(checks: list[Check]) -> Check:
    """What is OK on several nodes, each in its own way, in one line."""
    if len(checks) == 1:
        return checks[0]
    shown = [f"{check.node}: {check.evidence}" if check.node else check.evidence for check in checks[:_SHOWN]]
    more = [f"and {len(checks) - _SHOWN} more"] if len(checks) > _SHOWN else []
    nodes = ", ".join(check.node for check in checks if check.node)
    evidence = "; ".join(shown + more)
    return msgspec.structs.replace(checks[0], evidence=evidence, node=NodeId(nodes))


def failed(checks: Iterable[Check]) -> bool:
    """Whether any check is a failure."""
    return any(check.verdict is Verdict.FAILURE for check in checks)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing: "26.2" → (26, 2); empty where there are none."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def gib(count_bytes: int) -> str:
    """Bytes for people, in GiB."""
    return f"{count_bytes / 2**30:.1f} GiB"
