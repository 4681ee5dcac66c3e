"""MLX's own reading of a jaccl configuration, done again in Python: what it takes, refuses, and makes of it.

This shares no code with `muster.device_matrix`, which decides beforehand: tests hold the one against the other.

Source: `mlx/distributed/jaccl/lib/jaccl/jaccl.cpp` (`Config::from_env`, `parse_devices_json`, `is_valid_mesh`,
`is_valid_ring`, `init`), `mesh.cpp`, `ring.cpp` (limits), `tcp.cpp` (`parse_address`), as of mlx 0.32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Final, Literal, cast

import msgspec

_MESH_PEERS: Final = 8
_RING_WIRES: Final = 4

Connections = tuple[tuple[tuple[str, ...], ...], ...]


class JacclConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What MLX has read: `devices[i][j]` are the devices of rank i to rank j; `coordinator` is empty with a factory."""

    rank: int
    devices: Connections
    coordinator: tuple[str, str] | None
    prefer_ring: bool

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.devices)

    @property
    def topology(self) -> Literal["mesh", "ring"]:
        """What MLX forms.

        Raises:
            RuntimeError: neither is valid, or it is too large.
        """
        if self.prefer_ring and self._is_ring():
            found: Literal["mesh", "ring"] = "ring"
        elif self._is_mesh():
            found = "mesh"
        elif self._is_ring():
            found = "ring"
        else:
            raise RuntimeError("[jaccl] The configuration should define a valid mesh or a valid ring.")
        if found == "mesh" and self.size > _MESH_PEERS:
            raise RuntimeError(f"[jaccl] The JACCL mesh supports up to {_MESH_PEERS} peers but {self.size} were given.")
        if found == "ring" and len(self.left) > _RING_WIRES:
            raise RuntimeError(f"[jaccl] Up to {_RING_WIRES} per direction supported but {len(self.left)} were given.")
        return found

    @property
    def left(self) -> tuple[str, ...]:
        """The devices to the rank before this one."""
        return self.devices[self.rank][(self.rank - 1) % self.size]

    @property
    def right(self) -> tuple[str, ...]:
        """The devices to the rank after this one."""
        return self.devices[self.rank][(self.rank + 1) % self.size]

    @property
    def connections(self) -> tuple[tuple[int, str], ...]:
        """The queue pairs that this rank makes, in MLX's order: the peer and the device of each."""
        if self.topology == "mesh":
            row = self.devices[self.rank]
            return tuple((peer, row[peer][0]) for peer in range(self.size) if peer != self.rank)
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        return (*((before, name) for name in self.left), *((after, name) for name in self.right))

    def _is_mesh(self) -> bool:
        ranks = range(self.size)
        return self.size >= 2 and all(bool(self.devices[i][j]) == (i != j) for i in ranks for j in ranks)

    def _is_ring(self) -> bool:
        if self.size < 2:
            return False
        wires = len(self.devices[0][1])
        # MLX takes a ring without any wire for valid, and then waits for ever.
        return wires > 0 and all(
            len(row[(rank + step) % self.size]) == wires for rank, row in enumerate(self.devices) for step in (-1, 1)
        )


def read_config(environ: Mapping[str, str], read: Callable[[str], str], *, has_factory: bool = False) -> JacclConfig:
    """Read variables and device file as `mx.distributed.init(strict=True, backend="jaccl")` does.

    Raises:
        RuntimeError, ValueError: MLX would raise, or would go on with nonsense: a rank that is no number, or one
            outside of the matrix.
    """
    file = _variable(environ, "JACCL_IBV_DEVICES", "MLX_IBV_DEVICES")
    rank = _variable(environ, "JACCL_RANK", "MLX_RANK")
    coordinator = _variable(environ, "JACCL_COORDINATOR", "MLX_JACCL_COORDINATOR")
    if file is None or rank is None or (coordinator is None and not has_factory):
        raise RuntimeError(
            "[jaccl] You need to provide via environment variables a rank, a device file and a coordinator ip/port"
        )
    devices = _parse_devices(read(file))
    if re.fullmatch(r"\d+", rank) is None or int(rank) >= len(devices):
        raise RuntimeError(f"[jaccl] rank {rank!r} of {len(devices)}: MLX would read past its arrays")
    config = JacclConfig(
        rank=int(rank),
        devices=devices,
        coordinator=None if has_factory else _parse_address(cast(str, coordinator)),
        prefer_ring=_variable(environ, "JACCL_RING", "MLX_JACCL_RING") is not None,
    )
    config.topology  # noqa: B018  (raises where MLX would)
    return config


def _variable(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if name in environ), None)


def _parse_devices(text: str) -> Connections:
    try:
        rows: object = json.loads(text)
    except ValueError as error:
        raise RuntimeError(f"[json.exception.parse_error.101] {error}") from error
    if not isinstance(rows, list):
        raise RuntimeError("[jaccl] The device file should start with an array")
    listed = cast("list[object]", rows)
    return tuple(_parse_row(rank, row, len(listed)) for rank, row in enumerate(listed))


def _parse_row(rank: int, row: object, size: int) -> tuple[tuple[str, ...], ...]:
    if not isinstance(row, list):
        raise RuntimeError("[jaccl] The device file should have an array of arrays")
    entries = cast("list[object]", row)
    if len(entries) != size:
        raise RuntimeError(f"[jaccl] The device file should contain all ranks but rank {rank} has {len(entries)}")
    return tuple(_parse_entry(entry) for entry in entries)


def _parse_entry(entry: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    names = cast("list[object]", entry) if isinstance(entry, list) else [entry]
    if not all(isinstance(name, str) for name in names):
        raise RuntimeError("[jaccl] Device names should be null, a string or array of strings.")
    return tuple(cast("list[str]", names))


def _parse_address(text: str) -> tuple[str, str]:
    host, colon, port = text.partition(":")
    if not colon or not host or re.fullmatch(r"\d{1,5}", port) is None or ":" in port:
        raise RuntimeError(f"Can't parse address {text}")
    return host, port
