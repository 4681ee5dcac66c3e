"""What a node knows of its machine: the vocabulary of its facts. Pure; `muster.probe` finds them out.

Facts are telemetry: the latest value counts, and none of them is logged. A field that could not be found out is
`None` (or "unknown"), and `NodeFacts.unknown` says why.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from muster.spec import BootId, NodeAddress, NodeId

InterfaceKind = Literal["thunderbolt", "ethernet", "wifi", "vpn", "loopback", "bridge", "virtual", "other"]
Pressure = Literal["normal", "warning", "critical", "unknown"]
Switch = Literal["on", "off", "unknown"]
Device = Literal["", "cpu", "gpu"]

#: The branch of a hub's model that is meant where no revision is named.
DEFAULT_REVISION: Final = "main"


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface. `mbps` is the speed that it claims, in Mbit/s, `mtu` is in bytes."""

    name: str
    kind: InterfaceKind
    up: bool
    addresses: tuple[NodeAddress, ...] = ()
    mbps: int | None = None
    mtu: int | None = None
    mac: str = ""
    members: tuple[str, ...] = ()  #: of a bridge


class ThunderboltPort(msgspec.Struct, frozen=True, kw_only=True):
    """A Thunderbolt receptacle. Two ports are on one cable when each one's `peer_domain` is the other's `domain`."""

    port: str  #: the receptacle's number, as the system prints it
    domain: str  #: UUID of the port's own bus
    peer_domain: str = ""  #: UUID of the bus at the other end of the cable; empty without another computer there
    peer_name: str = ""
    generation: int | None = None  #: 3, 4 or 5; RDMA needs 5
    gbps: int | None = None
    interface: str = ""  #: the network interface, such as "en2"


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device as `ibv_devices` and `ibv_devinfo` show it. `ipv4_gid`: whether a GID maps an IPv4 address."""

    name: str  #: such as "rdma_en2"
    interface: str
    active: bool
    ipv4_gid: bool | None = None


class Rdma(msgspec.Struct, frozen=True, kw_only=True):
    """RDMA on this machine. `enabled` is what `rdma_ctl status` says; `None` where there is no such tool."""

    enabled: bool | None = None
    devices: tuple[RdmaDevice, ...] = ()


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU. `memory_bytes` is its own memory, `None` where it shares the machine's, and `free_bytes` is left of it."""

    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The file system under a directory that muster writes to."""

    path: str
    total_bytes: int
    free_bytes: int


class HeldModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose files are on the node. `model` is what users call it: a hub id, or the directory itself.

    `names` are the branches and tags that lead to `revision` on this node.
    """

    model: str
    path: str
    revision: str = ""  #: the commit of a hub snapshot
    names: tuple[str, ...] = ()
    bytes: int = 0
    complete: bool = True  #: whether every weight file that it names is there
    shareable: bool = True  #: whether the worker gives its files to other nodes

    def is_at(self, revision: str | None) -> bool:
        """Whether a rank on the node would take these files for that branch, tag or commit; `None` is the main branch.

        A directory, and a hub's model of unknown commit, have no revision.
        """
        if not self.revision:
            return revision is None
        return (revision or DEFAULT_REVISION) in (self.revision, *self.names)


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the machine that decide whether groups stay up."""

    python: str = ""
    open_files: int | None = None  #: soft limit of the worker's process
    firewall: Switch = "unknown"
    firewall_detail: str = ""
    sleep_minutes: int | None = None  #: after so long the machine sleeps; 0 is never
    clock_synchronised: bool | None = None
    blas: str = ""  #: what MLX's CPU backend multiplies with, where that is known


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a boot of a node knows of its machine. `n` grows with every change."""

    node: NodeId
    boot: BootId
    n: int = 1
    chip: str = ""
    architecture: str = ""
    cores: int = 0
    os: str = ""  #: "macOS", "Debian GNU/Linux", …
    os_version: str = ""
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    memory_pressure: Pressure = "unknown"
    wired_limit_bytes: int | None = None  #: what the GPU may wire, on Apple silicon
    memory_gbps: float | None = None  #: measured: GB/s that one stream copies on MLX's default device
    device: Device = ""  #: what MLX computes on unless it is told otherwise; empty where that is not known
    gpus: tuple[Gpu, ...] = ()
    gpu_ranks_bytes: int | None = None  #: what the node's ranks had in use when this was free of its GPUs
    disks: tuple[Disk, ...] = ()
    versions: dict[str, str] = {}
    backends: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    thunderbolt: tuple[ThunderboltPort, ...] = ()
    rdma: Rdma = Rdma()
    models: tuple[HeldModel, ...] = ()
    system: System = System()
    unknown: dict[str, str] = {}  #: what could not be found out, and why


def without_gpu(facts: NodeFacts | None) -> bool:
    """Whether MLX computes on the node's CPU: it says so, or it was looked for a GPU, and there is none."""
    if facts is not None and facts.device:
        return facts.device == "cpu"
    return facts is not None and facts.os != "" and not facts.gpus and "gpus" not in facts.unknown


def filled_gpu(facts: NodeFacts | None) -> Gpu | None:
    """The GPU with memory of its own that MLX fills on the node: the largest, as CUDA counts the fastest first."""
    if facts is None or facts.device == "cpu":
        return None
    return max((gpu for gpu in facts.gpus if gpu.memory_bytes), key=lambda gpu: gpu.memory_bytes or 0, default=None)
