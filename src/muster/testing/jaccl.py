"""A strict stand-in for MLX's JACCL, for machines without RDMA: everything but the RDMA itself is real.

`install` makes `mx.distributed` of this process know a backend "jaccl". Its `init` reads the variables and the device
file by MLX's rules, opens only devices that it was told of, exchanges connection data between the processes over TCP or
`all_gather_factory`, in the same exchanges as MLX, and then forms MLX's own ring over loopback. All ranks must run on
one machine. It fails on demand as JACCL does, and never by a deadline of its own, since JACCL has none.

Source: `mlx/distributed/jaccl/lib/jaccl/` (`rdma.cpp`, `mesh.cpp`, `ring.cpp`), as of mlx 0.32.
"""

from __future__ import annotations

import os
import signal
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from muster.errors import RequestError
from muster.group.listening import is_listening
from muster.group.ports import reserve
from muster.testing.jaccl_rules import JacclConfig, read_config
from muster.testing.side_channel import TcpGather

if TYPE_CHECKING:
    import mlx.core as mx

#: Queue pairs of one device.
_QUEUE_PAIRS: Final = 10
_LOOPBACK: Final = "127.0.0.1"
#: How often rank n-1 looks whether the others listen; the kernel has no event for it.
_POLL_SECONDS: Final = 0.001
#: MLX's `Destination`: local id, number of the queue pair, sequence number, GID. Here they carry the process and port.
_DESTINATION: Final = struct.Struct("=iii16s")
_GID: Final = bytes(10) + b"\xff\xff" + bytes((127, 0, 0, 1))
_COUNT: Final = struct.Struct("=i")

Gather = Callable[[bytes, int], bytes]
Step = Literal[
    "absent", "open", "protection-domain", "queue-pair", "memory-region", "gid", "INIT", "RTR", "RTS", "crash"
]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Fail at this step, as JACCL does: with `errno` where it names one, by hanging, or by a crash.

    `ranks` are those that fail; empty for all. "absent" never comes to the exchange.
    """

    step: Step
    errno: int = 22
    hang: bool = False
    ranks: tuple[int, ...] = ()


class StandIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the stand-in's file holds: the devices that exist on this machine, and what is to fail."""

    devices: tuple[str, ...]
    faults: tuple[Fault, ...] = ()


def install(path: Path) -> None:
    """Have `mx.distributed` of this process know "jaccl", as the file `path` (JSON of `StandIn`) describes it.

    The file is read again at each `init`, so that a test can let the next attempt succeed.

    Raises:
        RequestError: there is no such file, or it is no `StandIn`.
    """
    import mlx.core as mx

    _read(path)
    real_init, real_available = mx.distributed.init, mx.distributed.is_available
    formed: list[mx.distributed.Group] = []

    def is_available(backend: str = "any") -> bool:
        return backend == "jaccl" or real_available(backend)

    def init(strict: bool = False, backend: str = "any", *, all_gather_factory: Any = None) -> mx.distributed.Group:
        if backend != "jaccl":
            if all_gather_factory is not None:
                raise ValueError("[distributed] An all gather factory is only supported with the 'jaccl' backend")
            return formed[0] if formed and backend == "any" else real_init(strict, backend)
        if not formed:
            formed.append(_Forming(_read(path), real_init, all_gather_factory).form())
        return formed[0]

    # The module is MLX's own: the type checker knows its functions as they are, and not that they can be replaced.
    setattr(mx.distributed, "is_available", is_available)  # noqa: B010
    setattr(mx.distributed, "init", init)  # noqa: B010


def _read(path: Path) -> StandIn:
    try:
        return msgspec.json.decode(path.read_bytes(), type=StandIn)
    except (OSError, msgspec.DecodeError) as error:
        raise RequestError(f"the stand-in for JACCL cannot read {path}: {error}") from error


class _Forming:
    """One call of `init`."""

    def __init__(self, stand_in: StandIn, real_init: Callable[..., mx.distributed.Group], factory: Any) -> None:
        self._stand_in = stand_in
        self._real_init = real_init
        self._factory = factory
        self._config: JacclConfig = read_config(
            os.environ, lambda file: Path(file).read_text(), has_factory=factory is not None
        )

    def form(self) -> mx.distributed.Group:
        """In MLX's order: side channel, devices, queue pairs, exchange, connections, barrier."""
        config = self._config
        self._reach("absent", "")
        gather = self._gather()
        self._open_devices()
        with reserve(_LOOPBACK) as reservation:
            own = _DESTINATION.pack(1, os.getpid(), reservation.port, _GID)
            peers = self._exchange(gather, own)
            for state in ("INIT", "RTR", "RTS"):
                self._reach(state, f"[jaccl] Changing queue pair to {state} failed with errno {{errno}}")
            gather(_COUNT.pack(config.rank), _COUNT.size)
            self._reach("crash", "")
            return self._ring(peers)

    def _gather(self) -> Gather:
        config = self._config
        if config.coordinator is None:
            return self._factory(config.rank, config.size)
        host, port = config.coordinator
        return TcpGather(config.rank, config.size, host, int(port))

    def _open_devices(self) -> None:
        taken = Counter(name for _, name in self._config.connections)
        self._reach("open", f"[jaccl] Could not open device {next(iter(taken))}")
        for name, count in taken.items():
            if name not in self._stand_in.devices:
                raise RuntimeError(f"[jaccl] Could not find device {name} ({len(self._stand_in.devices)} available)")
            if count > _QUEUE_PAIRS:
                raise RuntimeError("[jaccl] Creating the queue pair failed with errno 16.")
        self._reach("protection-domain", "[jaccl] Couldn't allocate protection domain")
        self._reach("queue-pair", "[jaccl] Creating the queue pair failed with errno 16.")
        self._reach("memory-region", "[jaccl] Register memory region failed")
        self._reach("gid", "[jaccl] No IPv4-mapped GID for this device.")

    def _exchange(self, gather: Gather, own: bytes) -> list[tuple[int, int]]:
        """Process and port of every rank, from what MLX would send of each connection."""
        config = self._config
        nobody = _DESTINATION.pack(-1, 0, 0, bytes(16))
        if config.topology == "mesh":
            mine = [own if peer != config.rank else nobody for peer in range(config.size)]
            infos = [self._gather_list(gather, mine)]
        else:
            infos = [self._gather_list(gather, [own] * len(names)) for names in (config.left, config.right)]
        for peer, _ in config.connections:
            for info in infos:
                told = info[peer][config.rank if config.topology == "mesh" else 0]
                if _DESTINATION.unpack(told)[0] < 0:
                    raise ValueError("[jaccl] Changing queue pair to RTR failed with errno 22")
        found: list[tuple[int, int]] = []
        for rank, told in enumerate(infos[0]):
            if rank == config.rank:
                told = [own]
            _, pid, port, _ = _DESTINATION.unpack(next(one for one in told if one != nobody))
            found.append((pid, port))
        return found

    def _gather_list(self, gather: Gather, mine: Sequence[bytes]) -> list[list[bytes]]:
        """First how many, then as many as the longest list has: so MLX exchanges lists."""
        size = self._config.size
        counts = gather(_COUNT.pack(len(mine)), _COUNT.size)
        longest = max(count for (count,) in _COUNT.iter_unpack(counts))
        told = gather(b"".join(mine).ljust(longest * _DESTINATION.size, b"\0"), longest * _DESTINATION.size)
        if len(told) != size * longest * _DESTINATION.size:
            raise RuntimeError(f"[jaccl] the exchange brought {len(told)} bytes")
        each = [told[start : start + _DESTINATION.size] for start in range(0, len(told), _DESTINATION.size)]
        return [each[rank * longest : (rank + 1) * longest] for rank in range(size)]

    def _ring(self, peers: Sequence[tuple[int, int]]) -> mx.distributed.Group:
        """MLX's own ring over loopback; the last rank dials once the others listen."""
        if self._config.rank == self._config.size - 1:
            for pid, port in peers[:-1]:
                while not is_listening(pid, [(_LOOPBACK, port)]):
                    time.sleep(_POLL_SECONDS)
        hosts = [[f"{_LOOPBACK}:{port}"] for _, port in peers]
        found = {name: os.environ.get(name) for name in ("MLX_HOSTFILE", "MLX_RANK")}
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(msgspec.json.encode(hosts))
            file.flush()
            os.environ.update({"MLX_HOSTFILE": file.name, "MLX_RANK": str(self._config.rank)})
            try:
                return self._real_init(strict=True, backend="ring")
            finally:
                for name, value in found.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value

    def _reach(self, step: str, text: str) -> None:
        """Fail here, where that is asked for."""
        for fault in self._stand_in.faults:
            if fault.step != step or (fault.ranks and self._config.rank not in fault.ranks):
                continue
            if fault.hang or step == "absent":
                threading.Event().wait()
            if step == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            kind = ValueError if "errno {errno}" in text else RuntimeError
            raise kind(text.format(errno=fault.errno))
