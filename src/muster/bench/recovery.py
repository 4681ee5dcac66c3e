"""`muster bench recovery`: how fast muster notices what dies, and how fast it is whole again."""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import msgspec
from loguru import logger

from muster.bench.ground import Ground, GroundSettings, Remains, ground
from muster.bench.launch import KILLED_SECONDS, killed_seconds, launcher
from muster.bench.machine import this_machine
from muster.bench.recovery_coordinator import kill_coordinator, kill_often
from muster.bench.recovery_figures import (
    CUT_FAILED,
    CUT_PLACED,
    CUT_READY,
    GROUP_FAILED,
    GROUP_READY,
    KILLED_FAILED,
    KILLED_READY,
    MODEL_READY,
    PARTS,
    RUNNERS_GONE,
    SERVING,
    STOPPED_FAILED,
    Findings,
    LogCheck,
    Part,
    count_figures,
    left_figures,
    limits,
    time_figures,
)
from muster.bench.recovery_nodes import CUT_NODES, Relays, cut_node, cuttable, how_cut, kill_worker
from muster.bench.recovery_ranks import NODES, demo_spec, kill_rank_decoding, kill_rank_of_group, stop_rank_decoding
from muster.bench.report import Report
from muster.errors import MusterError
from muster.spec import RestartOnFailure

_READY_SECONDS = 60.0
_PEER: Final = "mlx.launch --backend ring -n 2, rank 1 killed, until the launcher ends"

Say = Callable[[str], None]
PlayRound = Callable[[int], Awaitable[None]]


class RecoverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured, with which clocks, in seconds, and how many warm runners on each node.

    `seed` gives the moments of the coordinator's kills.
    """

    parts: tuple[Part, ...] = PARTS
    rounds: int = 20
    kills: int = 200
    heartbeat_seconds: float = 1.0
    lease_seconds: float = 5.0
    step_seconds: float = 3.0
    pool: int = 2
    seed: int | None = None


#: Shows that everything works; its figures mean little.
QUICK = RecoverySettings(rounds=1, kills=3, heartbeat_seconds=0.2, lease_seconds=1.0, step_seconds=1.0, pool=0)


async def measure(settings: RecoverySettings, directory: Path, say: Say) -> Report:
    """Measure the parts, each from a settled cluster with warm pools.

    Args:
        settings: How much.
        directory: For the clusters and the peer; the caller removes it.
        say: Told what is going on.

    Raises:
        UnreachableError: a cluster did not start.
    """
    machine = this_machine()
    bench = _Bench(settings, directory, say)
    await bench.run()
    found = bench.findings
    bars = limits(settings.lease_seconds, settings.step_seconds)
    figures = [*time_figures(found, bars, _PEER), *count_figures(found)]
    figures += left_figures(bench.remains.files, bench.remains.ports, bench.remains.processes)
    return Report(
        machine=machine,
        figures=tuple(figures),
        rounds=tuple(found.rounds),
        notes=(*_how(settings), *bench.notes, *found.wrong),
    )


class _Bench:
    def __init__(self, settings: RecoverySettings, directory: Path, say: Say) -> None:
        self.findings = Findings()
        self.remains = Remains()
        self.notes: list[str] = []
        self._settings = settings
        self._directory = directory
        self._say = say

    async def run(self) -> None:
        """All parts that are asked for."""
        parts = set(self._settings.parts)
        if parts & {"rank-kill", "rank-stop", "coordinator-kill", "worker-kill"}:
            async with ground(self._directory / "two", self._ground(NODES, http=True), self.remains) as two:
                await self._on_two(two)
        if "cut" in parts:
            settings = msgspec.structs.replace(self._ground(CUT_NODES), started=())
            async with (
                ground(self._directory / "three", settings, self.remains) as three,
                cuttable(three) as relays,
            ):
                await self._cut(three, relays)
        if "log" in parts:
            async with ground(self._directory / "log", self._ground(NODES), self.remains) as own:
                seed = secrets.randbits(32) if self._settings.seed is None else self._settings.seed
                self.notes.append(f"The moments of the coordinator's kills under churn are by the seed {seed}.")
                try:
                    await kill_often(own, self._settings.kills, seed, self._say, self.findings)
                except MusterError as error:
                    self.findings.wrong.append(f"the kills of the coordinator under churn: {error}")
                    self.findings.log = LogCheck(kills=self._settings.kills, seen=0, logged=0, missing=0)
        if "peer" in parts:
            await self._peer()

    def _ground(self, nodes: tuple[str, ...], *, http: bool = False) -> GroundSettings:
        return GroundSettings(
            nodes=nodes,
            heartbeat_seconds=self._settings.heartbeat_seconds,
            lease_seconds=self._settings.lease_seconds,
            pool=self._settings.pool,
            http=http,
        )

    async def _on_two(self, own: Ground) -> None:
        found = self.findings
        if "rank-kill" in self._settings.parts:
            await self._rounds(
                own,
                "a rank of the demo model is killed",
                (KILLED_FAILED, KILLED_READY, MODEL_READY),
                lambda number: kill_rank_decoding(own, number, found),
            )
            await self._rounds(
                own,
                "a rank of a bare group is killed",
                (GROUP_FAILED, GROUP_READY),
                lambda number: kill_rank_of_group(own, number, found),
            )
        if "rank-stop" in self._settings.parts:
            seconds = self._settings.step_seconds
            await self._rounds(
                own,
                "a rank of the demo model is stopped",
                (STOPPED_FAILED,),
                lambda number: stop_rank_decoding(own, number, found, seconds),
            )
        if "coordinator-kill" in self._settings.parts:
            await self._coordinator(own)
        if "worker-kill" in self._settings.parts:
            await self._rounds(
                own, "a worker is killed", (RUNNERS_GONE,), lambda number: kill_worker(own, number, found)
            )

    async def _coordinator(self, own: Ground) -> None:
        """One model, whose runners outlive every coordinator."""
        await own.forgive()
        await own.settle()
        spec = msgspec.structs.replace(demo_spec(), restart=RestartOnFailure(maximum=1000))
        instance = (await own.observer.bring_up(spec, deadline_seconds=_READY_SECONDS)).instance
        await own.settle()
        for number in range(1, self._settings.rounds + 1):
            self._say(f"round {number} of {self._settings.rounds}: the coordinator is killed")
            try:
                await kill_coordinator(own, number, self.findings, instance)
            except MusterError as error:
                self.findings.complain((SERVING,), number, str(error))
        await own.observer.delete_all()

    async def _cut(self, own: Ground, relays: Relays) -> None:
        self.notes.append(how_cut(relays))
        await self._rounds(
            own,
            "a node is cut off",
            (CUT_PLACED, CUT_FAILED, CUT_READY),
            lambda number: cut_node(own, number, self.findings, relays),
        )

    async def _rounds(self, own: Ground, what: str, figures: tuple[str, ...], play: PlayRound) -> None:
        """So many rounds, each on a cluster without instances; what goes wrong in one is told."""
        for number in range(1, self._settings.rounds + 1):
            self._say(f"round {number} of {self._settings.rounds}: {what}")
            try:
                await play(number)
            except MusterError as error:
                logger.warning("round {}, {}: {}", number, what, error)
                self.findings.complain(figures, number, str(error))
            await own.observer.delete_all()

    async def _peer(self) -> None:
        program = launcher()
        if program is None:
            self.notes.append("mlx.launch is not here to be measured beside.")
            return
        self._say(f"a rank of the peer is killed: {_PEER}")
        with anyio.fail_after(2 * _READY_SECONDS):
            seconds = await killed_seconds(program, self._directory / "launch")
        if seconds is None:
            self.notes.append("mlx.launch: its ranks did not come up.")
        elif math.isinf(seconds):
            self.notes.append(f"{_PEER}: did not end within {KILLED_SECONDS:g} s.")
        else:
            self.findings.peer_seconds = seconds
            self.notes.append(f"{_PEER}: {seconds:.2f} s, measured once.")


def _how(settings: RecoverySettings) -> tuple[str, ...]:
    """How the times are to be read."""
    return (
        "Times end when the event, sent by the coordinator, has arrived at an observer; bars hold for the worst round. "
        "The next attempt starts after the backoff, 0.2 s by default, which is counted in.",
        f"Heartbeat {settings.heartbeat_seconds:g} s, lease {settings.lease_seconds:g} s, "
        f"step deadline {settings.step_seconds:g} s, {settings.pool} warm runners on each node.",
    )
