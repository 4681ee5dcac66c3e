"""Processes that SIGKILL does not end: watched until they are gone, for until then their node is not clean."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import psutil

from muster.group.listening import is_listening
from muster.worker.condition import Condition, watch

#: Between two looks at what does not end; nothing tells of the end of a process that is not our child.
_LOOK_SECONDS = 1.0

#: What a person can do about it, with the `node` to be filled in.
REMEDY = (
    "See what it waits for: dmesg. It goes by itself when that comes back; else reboot the node, as on a Mac with "
    "wired or RDMA memory. Then: muster resume {node}"
)


class Unburied:
    """The processes that could not be ended on this node. `clean` says when the last of them is gone."""

    def __init__(self, left: Sequence[psutil.Process] = ()) -> None:
        self._left: list[psutil.Process] = []
        self._added = anyio.Event()
        if left:
            self.add(left)

    @property
    def pids(self) -> list[int]:
        """Those that are still there, as far as was seen."""
        return [process.pid for process in self._left]

    def add(self, processes: Sequence[psutil.Process]) -> None:
        """Watch these."""
        self._left += processes
        self._added.set()

    async def clean(self) -> list[int]:
        """Wait until something was left and nothing is any more; answers the pids. One task may wait."""
        await self._added.wait()
        pids: list[int] = []
        while self._left:
            pids += [pid for pid in self.pids if pid not in pids]
            self._left = [process for process in self._left if is_living(process)]
            if self._left:
                await anyio.sleep(_LOOK_SECONDS)
        self._added = anyio.Event()
        return pids


def is_living(process: psutil.Process) -> bool:
    """Whether this very process is there, and no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


async def describe(process: psutil.Process, runner: int, addresses: Sequence[tuple[str, int]]) -> str:
    """What is left, in words: which process, why it does not end, and what it still holds.

    A process's sockets and memory are given back before its parent is told of its end: of one that is gone nothing
    is left. What RDMA has wired on a Mac may outlive its process, and the system does not say whose it was.
    """
    condition: Condition = await watch(process.pid, 0.0).condition()
    name = f"runner {process.pid}" if process.pid == runner else f"process {process.pid} that runner {runner} started"
    holds: list[str] = []
    try:
        holds.append(f"{process.memory_info().rss / 2**20:.0f} MiB")
        holds += [f"port {host}:{port}" for host, port in addresses if is_listening(process.pid, [(host, port)])]
    except (psutil.Error, OSError):
        pass
    return f"{name} does not end: {condition.text}" + (f"; it holds {', '.join(holds)}" if holds else "")
