"""Tells the coordinator what this node knows of its machine: when it joins, and when something changes."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import msgspec
import psutil
from loguru import logger

from muster.bus import ControlClient, Follower, Outbox
from muster.errors import FetchError, RequestError
from muster.events import NodeChanged
from muster.facts import HeldModel, NodeFacts
from muster.fetch.looks import Looks
from muster.probe.collect import Subject, collect, look_at_gpu, refresh
from muster.probe.interfaces import glance, interfaces
from muster.probe.tools import Tools
from muster.protocol import TellFacts
from muster.spec import NodeAddress, NodeInfo
from muster.worker.facts import candidates, carriers

#: Between two looks at the interfaces, of some 0.1 ms each.
POLL_SECONDS: Final = 2.0
#: Between two events about addresses: one that comes and goes must not fill the log.
_CHANGE_SECONDS: Final = 5.0
#: Between two looks at memory and disks, and how far they have to move to be told: both so many bytes and such a part.
_REFRESH_SECONDS: Final = 5.0
_MOVED_BYTES: Final = 256 * 2**20
_MOVED_PART: Final = 0.05
#: Between two runs of the system's slow tools while no interface changes: a cable in a bridge changes none.
_COLLECT_SECONDS: Final = 300.0
#: Between two looks at what the GPU may have, which run a tool where there is one to ask.
_GPU_SECONDS: Final = 30.0
#: Between two scans for models, of some milliseconds each.
_SCAN_SECONDS: Final = 60.0
#: How long a scan, a run of the slow tools, and a quick look may take before they count as hanging; where one does,
#: the next of its kind waits for it.
_SCANNING_SECONDS: Final = 20.0
_COLLECTING_SECONDS: Final = 60.0
_GLANCING_SECONDS: Final = 5.0
#: Facts that tests put in the place of those found out: a JSON object of fields of `NodeFacts`, "{node}" in the path.
TESTING_FACTS: Final = "MUSTER_TESTING_FACTS"


class Teller:
    """Keeps the node's facts. One task runs `run`; `tell` sends them again, as after each new welcome.

    `info` is what the node joined with; when its addresses change, the follower's next hello says so too. `held` says
    which models are on the node, and is called in a thread.
    """

    def __init__(
        self,
        info: NodeInfo,
        subject: Subject,
        client: ControlClient,
        outbox: Outbox,
        follower: Follower,
        held: Callable[[], tuple[HeldModel, ...]] = tuple,
        used: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.facts: NodeFacts | None = None  #: `None` until the first time that they were found out
        self._subject = subject
        self._client = client
        self._outbox = outbox
        self._follower = follower
        self._held = held
        self._used = used
        self._clock = clock
        self._tools = Tools()
        self._addresses, self._machine, self._gpu, self._scans = Looks(1), Looks(1), Looks(1), Looks(1)
        self._seen: object = None
        self._carriers: dict[str, str] = {}  #: by address
        self._changed = anyio.Event()
        #: Models, and why some are not known: they are scanned for apart from the rest.
        self._models: tuple[HeldModel, ...] = ()
        self._unknown: dict[str, str] = {}
        self._changed_at = self._refreshed_at = self._collected_at = self._scanned_at = float("-inf")
        self._gpu_at = clock()  #: the first look at the whole machine sees it too

    async def wait_change(self) -> None:
        """Wait until the facts are others than now."""
        await self._changed.wait()

    def tell(self) -> None:
        """Send the facts, if there are any yet. They are lost where there is no connection; the next welcome is not."""
        if self.facts is None:
            return
        fewer = msgspec.structs.replace(self.facts, models=())
        for facts in (self.facts, fewer, msgspec.structs.replace(fewer, interfaces=())):
            try:
                self._client.send(TellFacts(facts=facts))
            except RequestError as error:
                logger.warning("too much to tell: models, then interfaces are left out: {}", error.message)
            except (OverflowError, UnicodeError) as error:
                logger.warning("what cannot be told, models, then interfaces, is left out: {}", error)
            else:
                return

    def measured(self, memory_gbps: float) -> None:
        """The memory's speed was measured again: the best sample counts, for others were taken beside something."""
        if memory_gbps <= (self._subject.memory_gbps or 0.0):
            return
        self._subject = msgspec.structs.replace(self._subject, memory_gbps=memory_gbps)
        if self.facts is not None:
            self._keep(msgspec.structs.replace(self.facts, memory_gbps=memory_gbps))

    def look_soon(self) -> None:
        """A rank has ended: look at the GPU's memory at the next look."""
        self._gpu_at = float("-inf")

    def scan_soon(self) -> None:
        """Models came or went: scan at the next look."""
        self._scanned_at = float("-inf")

    async def run(self) -> None:
        """Look for changes until cancelled. What cannot be seen now, for want of descriptors, is looked at later."""
        async with anyio.create_task_group() as group:
            # Each by itself: a disk that hangs must not hide that an address is gone.
            for look in (self._look_at_addresses, self._look_at_machine, self._look_at_gpu, self._look_for_models):
                group.start_soon(self._repeat, look)

    async def _repeat(self, look: Callable[[], Awaitable[None]]) -> None:
        faulty = False
        while True:
            try:
                await look()
                faulty = False
            except (OSError, psutil.Error, FetchError) as error:
                if not faulty:
                    logger.warning("this machine cannot be looked at now: {}", error)
                faulty = True
            await anyio.sleep(POLL_SECONDS)

    async def _look_at_machine(self) -> None:
        now = self._clock()
        seen = (glance(), _testing_time(self.info))
        if seen != self._seen or now - self._collected_at >= _COLLECT_SECONDS:
            used = self._used()
            found = await self._machine.find(
                lambda: collect(self._subject, self._tools), "this machine", seconds=_COLLECTING_SECONDS
            )
            self._collected_at = self._refreshed_at = now
            self._seen = seen
            # The speed may have been measured again meanwhile.
            speed = self._subject.memory_gbps or found.memory_gbps
            self._keep(msgspec.structs.replace(found, memory_gbps=speed, gpu_ranks_bytes=used if found.gpus else None))
        elif self.facts is not None and now - self._refreshed_at >= _REFRESH_SECONDS:
            self._refreshed_at = now
            facts = self.facts
            moved = await self._machine.find(
                lambda: refresh(facts, self._subject, self._tools) if _moved(facts) else None,
                "memory and disks",
                seconds=_GLANCING_SECONDS,
            )
            if moved is not None:
                self._keep(
                    msgspec.structs.replace(
                        self.facts,
                        memory_available_bytes=moved.memory_available_bytes,
                        memory_pressure=moved.memory_pressure,
                        disks=moved.disks,
                    )
                )

    async def _look_at_gpu(self) -> None:
        now = self._clock()
        if (facts := self.facts) is None or not facts.gpus or now - self._gpu_at < _GPU_SECONDS:
            return
        self._gpu_at, used = now, self._used()
        found = await self._gpu.find(
            lambda: look_at_gpu(facts, self._tools), "the GPU's memory", seconds=_SCANNING_SECONDS
        )
        if found is not facts:
            self._keep(
                msgspec.structs.replace(
                    self.facts,
                    gpus=found.gpus,
                    gpu_ranks_bytes=used,
                    wired_limit_bytes=found.wired_limit_bytes,
                )
            )

    async def _look_for_models(self) -> None:
        now = self._clock()
        if now - self._scanned_at < _SCAN_SECONDS:
            return
        self._scanned_at = now
        unknown = ""
        try:
            self._models, unknown = _tellable(await self._scans.find(self._held, "models", seconds=_SCANNING_SECONDS))
        except FetchError as error:
            unknown = error.message
        self._unknown = {"models": unknown} if unknown else {}
        if self.facts is not None:
            self._keep(self.facts)

    def _keep(self, found: NodeFacts) -> None:
        before = self.facts
        if before is not None:
            found = msgspec.structs.replace(found, n=before.n)
        others = {name: why for name, why in found.unknown.items() if name != "models"}
        found = msgspec.structs.replace(found, models=self._models, unknown={**others, **self._unknown})
        found = _overridden(found, self.info)
        if found == before:
            return
        self.facts = found if before is None else msgspec.structs.replace(found, n=before.n + 1)
        self.tell()
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _look_at_addresses(self) -> None:
        now = self._clock()
        if now - self._changed_at >= _CHANGE_SECONDS:
            await self._report_addresses(now)

    async def _report_addresses(self, now: float) -> None:
        """Report that addresses came, went or moved; of a node whose operator gave them, only those count."""
        before, carried = self.info.candidates, self._carriers
        # Some files for each, and containers have hundreds.
        there = await self._addresses.find(interfaces, "interfaces", seconds=_GLANCING_SECONDS)
        found = candidates(self.info.addresses, there, given=self.info.addresses_given)
        if self.facts is not None:
            self._carriers = carriers(found, there, self.facts.interfaces)
        moved = tuple(
            f"{host}: {carried[host]} → {carrier}"
            for host, carrier in self._carriers.items()
            if carried.get(host, carrier) != carrier
        )
        if set(found) == set(before) and not moved:
            return
        self._changed_at = now
        gone, new = _without(before, found), _without(found, before)
        told = (", ".join(some) or "none" for some in (gone, new, moved))
        logger.warning("the addresses of this node changed: gone {}, new {}, moved {}", *told)
        if set(found) != set(before):
            self.info = msgspec.structs.replace(self.info, candidates=found)
            self._follower.introduce(self.info)
        self._outbox.report(
            NodeChanged(node=self.info.node, boot=self.info.boot, candidates=found, gone=gone, new=new, moved=moved), 0
        )


def _tellable(models: tuple[HeldModel, ...]) -> tuple[tuple[HeldModel, ...], str]:
    """The models that fit into a message, and why others are left out: names on disks may be no UTF-8."""
    fit: list[HeldModel] = []
    odd: list[str] = []
    for model in models:
        try:
            msgspec.msgpack.encode(model)
        except (OverflowError, UnicodeError):
            odd.append(ascii(model.path))
        else:
            fit.append(model)
    return tuple(fit), f"left out, with names or sizes that cannot be told: {', '.join(odd)[:500]}" if odd else ""


def _without(some: tuple[NodeAddress, ...], others: tuple[NodeAddress, ...]) -> tuple[str, ...]:
    hosts = {one.host for one in others}
    return tuple(one.host for one in some if one.host not in hosts)


def _moved(facts: NodeFacts) -> bool:
    """Whether memory or a disk has moved so far that it is worth telling."""
    pairs = [(facts.memory_total_bytes, facts.memory_available_bytes, psutil.virtual_memory().available)]
    for disk in facts.disks:
        try:
            pairs.append((disk.total_bytes, disk.free_bytes, psutil.disk_usage(disk.path).free))
        except OSError:  # not made yet, or gone: `refresh` looks at the nearest one above
            continue
    return any(abs(now - then) > max(_MOVED_BYTES, _MOVED_PART * total) for total, then, now in pairs)


# --- tests --------------------------------------------------------------------------------------------------------


def _testing_path(info: NodeInfo) -> Path | None:
    path = os.environ.get(TESTING_FACTS)
    return None if path is None else Path(path.replace("{node}", info.node))


def _testing_time(info: NodeInfo) -> int:
    path = _testing_path(info)
    return 0 if path is None or not path.exists() else path.stat().st_mtime_ns


def _overridden(facts: NodeFacts, info: NodeInfo) -> NodeFacts:
    """The facts with what a test says instead of what was found out."""
    path = _testing_path(info)
    if path is None or not path.exists():
        return facts
    try:
        said = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        return msgspec.convert({**msgspec.to_builtins(facts), **said}, NodeFacts)
    except msgspec.DecodeError as error:
        logger.error("{} is no JSON of facts: {}", path, error)
        return facts
