"""What processes and files of a cluster must not be, whatever the log says: of the past, nobody's, or twice there."""

from __future__ import annotations

import contextlib
import hashlib
import re
import stat
import time
from collections import Counter
from pathlib import Path

import psutil

from kit.auditor import Auditor
from kit.processes import alive, is_runner
from muster.bench.leftovers import port_left
from muster.spec import NodeId
from muster.state import Assigned, Connected, Failed, Gone, Loaded, Ready, is_script

#: How long something may be wrong while nothing hinders its worker; the machine may be busy.
PATIENCE_SECONDS = 10.0

_FILE = re.compile(r"muster-.*-(?P<digest>[0-9a-f]{12})-a(?P<attempt>\d+)-r(?P<rank>\d+)-p(?P<pid>\d+)-t\d+-.*\.json")
_RECORD = re.compile(r"(\d+)-(\d+)\.runner")


class Patience:
    """Remembers since when each thing is wrong."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def see(self, wrong: set[str], seconds: float = PATIENCE_SECONDS) -> None:
        """What is wrong now; what has been for longer than `seconds` is an error."""
        now = time.monotonic()
        self._since = {what: self._since.get(what, now) for what in wrong}
        late = [f"for {now - since:.1f} s: {what}" for what, since in self._since.items() if now - since > seconds]
        assert not late, "\n".join(late)


def runners_of(worker: psutil.Process) -> list[psutil.Process]:
    """The runners of a worker that are alive, the oldest first; none where it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = [child for child in worker.children() if is_runner(child) and alive(child.pid)]
        return sorted(children, key=lambda child: (child.create_time(), child.pid))
    return []


def check_gone(auditor: Auditor) -> None:
    """A runner whose end is in the log has ended."""
    for key, runner in auditor.runners.items():
        if runner.ended == "gone":
            fact = runner.fact
            assert not alive(fact.pid, fact.process_started), (
                f"runner {fact.pid} of {key} is gone in the log, and alive"
            )


def check_files(directory: Path) -> None:
    """The coordination files of a node: private, and one at most for each rank of each attempt."""
    seen = Counter[tuple[str, str, str]]()
    for path in _listed(directory / "groups"):
        match = _FILE.fullmatch(path.name)
        assert match, f"{path} is no coordination file"
        seen[match["digest"], match["attempt"], match["rank"]] += 1
        with contextlib.suppress(FileNotFoundError):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, f"others may read {path}"
    assert not [key for key, count in seen.items() if count > 1], f"two files for one rank: {seen}"


def wrong_of(node: str, worker: psutil.Process, directory: Path, auditor: Auditor) -> set[str]:
    """What may be so for a moment on a node that nothing hinders."""
    wrong: set[str] = set()
    for key, runner in auditor.runners.items():
        fact = runner.fact
        if fact.node != node:
            continue
        lives = alive(fact.pid, fact.process_started)
        if runner.ended == "lost" and lives:
            wrong.add(f"runner {fact.pid} of {key} lives, and its node was lost meanwhile")
        instance = auditor.state.instances.get(fact.instance)
        rank = instance.ranks[fact.rank] if instance is not None and instance.attempt == fact.attempt else None
        if rank is not None and not isinstance(rank.state, Assigned | Failed | Gone) and not lives:
            wrong.add(f"runner {fact.pid} of {key} is dead, and nobody says so")
    for path in _listed(directory / "groups"):
        match = _FILE.fullmatch(path.name)
        if match and not alive(int(match["pid"])):
            wrong.add(f"{path} is a dead runner's")
        elif match and _has_formed(match, auditor):
            wrong.add(f"{path} is there, and its group has formed")
    for path in _listed(directory / "runners"):
        match = _RECORD.fullmatch(path.name)
        if match and not alive(int(match[1]), int(match[2]) / 100):
            wrong.add(f"{path} is a dead runner's")
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in worker.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() == psutil.STATUS_ZOMBIE:
                    wrong.add(f"{child.pid} is a zombie of the worker of node {node}")
    return wrong


def left_of(node: str, worker: psutil.Process, directory: Path, auditor: Auditor, pool: int) -> list[str]:
    """What is left on a node without instances, but for so many warm runners."""
    found = sorted(wrong_of(node, worker, directory, auditor))
    warm = runners_of(worker)
    if len(warm) > pool:
        found.append(f"runners {[one.pid for one in warm]} on node {node}, whose pool is {pool}")
    found += [f"{path}" for path in _listed(directory / "groups")]
    records = list(_listed(directory / "runners"))
    if len(records) > pool:
        found.append(f"records {[path.name for path in records]} on node {node}")
    facts = [runner.fact for runner in auditor.runners.values() if runner.fact.node == NodeId(node)]
    pids = {fact.pid for fact in facts}
    addresses = [address for fact in facts for address in fact.addresses]
    found += [left for address in addresses if (left := port_left(address, pids)) is not None]
    return found


def _has_formed(file: re.Match[str], auditor: Auditor) -> bool:
    """Whether MLX has read the file, and needs it no more; a script reads it when it likes."""
    for instance in auditor.state.instances.values():
        digest = hashlib.sha256(instance.id.encode()).hexdigest()[:12]
        if (digest, str(instance.attempt)) == (file["digest"], file["attempt"]) and not is_script(instance):
            return isinstance(instance.ranks[int(file["rank"])].state, Connected | Loaded | Ready)
    return False


def _listed(directory: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return list(directory.iterdir())
    return []
