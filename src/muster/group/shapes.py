"""The values that a coordination payload is made of. Import them from `muster.group.payload`."""

from __future__ import annotations

import msgspec

from muster.layout import Devices
from muster.spec import Address as RankAddress
from muster.spec import SideChannel


class PreparedRank(msgspec.Struct, frozen=True):
    """A rank's endpoints, one per network, in its own order of preference."""

    rank: int
    addresses: tuple[RankAddress, ...]


class RingPayload(msgspec.Struct, frozen=True, tag="ring"):
    """MLX's hostfile as one rank needs it.

    Attributes:
        hosts: By rank, the `ip:port` texts on which that rank listens for its left neighbour. A rank listens
            on its own entry and dials the entry to its right; MLX parses the others and ignores them.
    """

    instance: str
    attempt: int
    rank: int
    world_size: int
    hosts: tuple[tuple[str, ...], ...]


class JacclPayload(msgspec.Struct, frozen=True, tag="jaccl"):
    """MLX's device file, and where rank 0 gathers the connection data.

    Attributes:
        devices: Square matrix of RDMA device names.
        coordinator: `ip:port` of rank 0 as seen by this rank; rank 0 listens there. Not used with the bus.
        prefer_ring: Use the ring when the matrix is both a valid ring and a valid mesh.
        side_channel: How the ranks exchange their connection data.
    """

    instance: str
    attempt: int
    rank: int
    world_size: int
    devices: Devices
    coordinator: str
    prefer_ring: bool = False
    side_channel: SideChannel = "tcp"


Payload = RingPayload | JacclPayload
