"""Where the matrix is played: a cluster of four nodes on the loopback, or on hosts with links of their own."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator
from pathlib import Path
from typing import Final, Protocol

from bed import Bed, unavailable
from bed_faults import Disk
from bed_kernel import BedError, prefix_of
from cells import HEARTBEAT_SECONDS, LEASE_SECONDS, RANKS, Cell, Fault
from kit import free_ports
from net_cluster import NetCluster

from muster.errors import PortError
from muster.group.ports import reserve_at
from muster.local import LocalCluster
from muster.spec import Address

#: Coordinator and one worker have a disk of their own: much more than they need, little enough to fill at once.
_DISK_BYTES: Final = 64 * 2**20
_CLONE_NEWNET: Final = 0x40000000
_NO_DISK: Final = "a small disk needs root on Linux, and the right to mount"
#: Nodes beside the three of the instance: where it goes on when it has lost one.
_SPARES: Final = 1


class Ground(Protocol):
    """A cluster, and what can be done to it. Members are named "coordinator" or as their node."""

    cluster: LocalCluster
    nodes: tuple[str, ...]

    def beside_coordinator(self) -> contextlib.AbstractContextManager[None]:
        """Threads that are started within the block are on the coordinator's host."""
        ...

    def lacks(self, cell: Cell) -> str | None:
        """Why a cell cannot be played here; `None` where it can."""
        ...

    def fill(self, member: str) -> None:
        """Leave no byte on the disk of the coordinator, or of the second node."""
        ...

    def free(self, member: str) -> None:
        """Undo `fill`."""
        ...

    def cut(self, member: str, fault: Fault) -> None:
        """Cut the link of the member's host: both ways, or one."""
        ...

    def heal(self, member: str) -> None:
        """Undo `cut`."""
        ...

    def is_taken(self, node: str, address: Address) -> bool:
        """Whether any process of the node has the port."""
        ...


# --- loopback -----------------------------------------------------------------------------------------------


class Loopback:
    """Processes of this machine only: no links to cut, and full disks only where root may mount."""

    def __init__(self, directory: Path) -> None:
        self.nodes = tuple("abcd"[: RANKS + _SPARES])
        self._directory = directory
        self._disks: dict[str, Disk] = {}
        self.cluster = LocalCluster(
            directory,
            self.nodes,
            port=free_ports(3),
            http_port=None,
            coordinator_options=("--heartbeat", str(HEARTBEAT_SECONDS), "--lease", str(LEASE_SECONDS)),
            node_options=("--pool", "0"),
        )

    @contextlib.contextmanager
    def opened(self) -> Generator[Ground]:
        """The cluster is up within the block."""
        with contextlib.ExitStack() as stack:
            for number, member in enumerate(("coordinator", self.nodes[1])):
                with contextlib.suppress(BedError):
                    disk = Disk(f"{prefix_of(0)}-disk{number}", self._directory / member, _DISK_BYTES)
                    stack.callback(disk.remove)
                    self._disks[member] = disk
            stack.enter_context(self.cluster)
            yield self

    def beside_coordinator(self) -> contextlib.AbstractContextManager[None]:
        """See `Ground`."""
        return contextlib.nullcontext()

    def lacks(self, cell: Cell) -> str | None:
        """See `Ground`."""
        if cell.fault in (Fault.CUT, Fault.DEAF, Fault.MUTE):
            return "loopback has no links to cut"
        if cell.fault is Fault.FULL and len(self._disks) < 2:
            return _NO_DISK
        return None

    def fill(self, member: str) -> None:
        """See `Ground`."""
        self._disks[member].fill()

    def free(self, member: str) -> None:
        """See `Ground`."""
        self._disks[member].free()

    def cut(self, member: str, fault: Fault) -> None:
        """See `Ground`."""
        raise NotImplementedError(f"{fault} of {member}: loopback has no links")

    def heal(self, member: str) -> None:
        """See `Ground`."""

    def is_taken(self, node: str, address: Address) -> bool:
        """See `Ground`."""
        del node
        try:
            reserve_at(address.host, address.port).close()
        except PortError:
            return True
        return False


# --- hosts --------------------------------------------------------------------------------------------------


class Hosts:
    """Network namespaces: the coordinator and its client are on h0, the workers on h1 and so on."""

    def __init__(self, directory: Path) -> None:
        self._bed = Bed(hosts=1 + RANKS + _SPARES)
        self.nodes = self._bed.hosts[1:]
        self._disks: set[str] = set()
        self.cluster: LocalCluster = NetCluster(self._bed, directory)
        self._directory = directory

    @contextlib.contextmanager
    def opened(self) -> Generator[Ground]:
        """The hosts are there and the cluster is up within the block."""
        with self._bed as bed:
            for member in ("coordinator", self.nodes[1]):
                with contextlib.suppress(BedError):
                    bed.disk(self._host(member), self._directory / member, _DISK_BYTES)
                    self._disks.add(member)
            with self.cluster:
                yield self

    def beside_coordinator(self) -> contextlib.AbstractContextManager[None]:
        """See `Ground`."""
        return on_host(self._bed, self._bed.hosts[0])

    def lacks(self, cell: Cell) -> str | None:
        """See `Ground`."""
        if cell.fault is Fault.FULL and len(self._disks) < 2:
            return _NO_DISK
        return self._bed.refusal("drop") if cell.fault in (Fault.DEAF, Fault.MUTE) else None

    def fill(self, member: str) -> None:
        """See `Ground`."""
        self._bed.fill(self._host(member))

    def free(self, member: str) -> None:
        """See `Ground`."""
        self._bed.free(self._host(member))

    def cut(self, member: str, fault: Fault) -> None:
        """See `Ground`."""
        match fault:
            case Fault.DEAF:
                self._bed.cut(self._host(member), way="to")
            case Fault.MUTE:
                self._bed.cut(self._host(member), way="from")
            case _:
                self._bed.cut(self._host(member))

    def heal(self, member: str) -> None:
        """See `Ground`."""
        self._bed.heal(self._host(member))

    def is_taken(self, node: str, address: Address) -> bool:
        """See `Ground`."""
        return any(one.pids and one.local == f"{address.host}:{address.port}" for one in self._bed.sockets(node))

    def _host(self, member: str) -> str:
        return self._bed.hosts[0] if member == "coordinator" else member


@contextlib.contextmanager
def on_host(bed: Bed, host: str) -> Generator[None]:
    """Threads that are started within the block are on the host, for as long as they live."""
    with Path("/proc/self/ns/net").open() as home, Path(f"/run/netns/{bed._namespace(host)}").open() as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def best_ground(directory: Path) -> tuple[Loopback | Hosts, str | None]:
    """Hosts where this machine can have them, else loopback and the reason."""
    reason = unavailable()
    return (Hosts(directory), None) if reason is None else (Loopback(directory), reason)
