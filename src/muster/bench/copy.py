"""`muster bench copy`: how fast a model's file comes from another node, beside the standard library's `sendfile`.

Both come from one other process over loopback and are written to the same disk; muster's is hashed and checked, and
could be gone on with. Nothing is forced to the disk by either.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio.to_thread
import msgspec

from muster.bench.copy_giver import Ports
from muster.bench.machine import this_machine
from muster.bench.observer import BenchError
from muster.bench.report import AtLeastTimesPeer, Report, Round, figure, median_or_none
from muster.fetch import peers
from muster.fetch.progress import Meter
from muster.layout import ModelSource
from muster.spec import NodeId

_NAME: Final = "model.safetensors"
_BAR: Final = 0.7
_PIECE_BYTES: Final = 2**20
_UNIT: Final = "MB/s"
_PEER: Final = "socket.sendfile"


class CopySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How many bytes are copied, and how often."""

    file_bytes: int = 2**30
    rounds: int = 5


#: To see that it works.
QUICK: Final = CopySettings(file_bytes=64 * 2**20, rounds=1)


async def measure(settings: CopySettings, directory: Path, say: Callable[[str], None]) -> Report:
    """Copy by both ways in turn.

    Raises:
        BenchError: the other process did not start.
    """
    return await anyio.to_thread.run_sync(_measure, settings, directory, say, abandon_on_cancel=True)


def _measure(settings: CopySettings, directory: Path, say: Callable[[str], None]) -> Report:
    say("a file is made")
    model = directory / "given"
    file = _make(model, settings.file_bytes)
    size = file.stat().st_size
    command = [sys.executable, "-m", "muster.bench.copy_giver", str(model), str(file)]
    rounds: list[Round] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as giver:
        assert giver.stdin is not None
        assert giver.stdout is not None
        if not (line := giver.stdout.readline()):
            raise BenchError("the process that gives the file did not start")
        ports = msgspec.json.decode(line, type=Ports)
        source = ModelSource(node=NodeId("giver"), host="127.0.0.1", port=ports.peer, path=str(model.resolve()))
        say("the first copy, whose hash the giver has to find out")
        as_nodes = functools.partial(_copy, source, directory, size)
        plainly = functools.partial(_copy_plainly, ports.plain, directory, size)
        first = as_nodes()
        for number in range(1, settings.rounds + 1):
            say(f"round {number} of {settings.rounds}")
            speeds: dict[Callable[[], float], float] = {}
            # In turn first: neither has all the moments after the other.
            for way in (plainly, as_nodes)[:: 1 if number % 2 else -1]:
                speeds[way] = way()
            rounds.append(Round(name="copy", number=number, unit=_UNIT, muster=speeds[as_nodes], peer=speeds[plainly]))
        giver.stdin.close()
    ours, plain = (median_or_none([getattr(one, side) for one in rounds]) for side in ("muster", "peer"))
    figures = (
        figure(
            f"copy of {size / 2**20:.0f} MiB from a node",
            _UNIT,
            ours,
            peer=plain,
            peer_name=_PEER,
            bar=AtLeastTimesPeer(factor=_BAR),
        ),
        figure("the first copy of a file, hashed at both ends", _UNIT, first, peer=plain, peer_name=_PEER),
    )
    return Report(machine=this_machine(), figures=figures, rounds=tuple(rounds))


def _make(model: Path, size: int) -> Path:
    """A model of one tensor of random bytes: the smallest thing that a node gives."""
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (model / _NAME).open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        left = size
        while left:
            left -= stream.write(os.urandom(min(left, 16 * _PIECE_BYTES)))
    return model / _NAME


def _copy(source: ModelSource, directory: Path, size: int) -> float:
    """MB/s of muster's way, the question what there is included."""
    os.sync()
    target = directory / "copied"
    target.mkdir(exist_ok=True)
    begin = time.perf_counter()
    listed = next(file for file in peers.listing(source).files if file.name == _NAME)
    peers.copy(source, listed, target, Meter(lambda moved: None, "", size))
    seconds = time.perf_counter() - begin
    (target / _NAME).unlink()
    return size / seconds / 1e6


def _copy_plainly(port: int, directory: Path, size: int) -> float:
    """MB/s of `socket.sendfile` at one end, `recv_into` and `write` at the other, up to the disk as muster's are."""
    os.sync()
    target = directory / "plain"
    buffer = memoryview(bytearray(_PIECE_BYTES))
    begin = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection, target.open("wb", buffering=0) as stream:
        left = size
        while left:
            if not (count := connection.recv_into(buffer[: min(left, len(buffer))])):
                raise BenchError("the plain copy was cut")
            left -= stream.write(buffer[:count])
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - begin
    target.unlink()
    return size / seconds / 1e6
