"""RDMA over Thunderbolt on a Mac, from `rdma_ctl`, `ibv_devices` and `ibv_devinfo -v`. Pure."""

from __future__ import annotations

import re

from muster.facts import RdmaDevice
from muster.probe.reading import Unread, unlike

_GID = re.compile(r"GID\[\s*\d+\]:\s*([0-9a-fA-F:.]+)")
#: An IPv4 address as a GID, in the short and in the long form (RFC 4291, 2.5.5.2).
_MAPPED = re.compile(r"::ffff:(\d+\.){3}\d+|(0{1,4}:){5}ffff:[0-9a-f]{1,4}:[0-9a-f]{1,4}", re.IGNORECASE)


def parse_rdma_ctl(text: str) -> bool | Unread:
    """Whether RDMA is enabled, from `rdma_ctl status`: "enabled" or "disabled".

    A Mac without Thunderbolt 5 says "enabled" too, once it was; it has no devices then.
    """
    words = set(re.findall(r"[a-z]+", text.lower()))
    if "disabled" in words:
        return False
    return True if "enabled" in words and "not" not in words else unlike("rdma_ctl status", text)


def parse_ibv_devices(text: str) -> tuple[str, ...] | Unread:
    """Names of the devices of `ibv_devices`; none where it prints no more than its head, as with RDMA disabled."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines or lines[0][0] != "device":
        return unlike("ibv_devices", text)
    return tuple(line[0] for line in lines[1:] if not line[0].startswith("-"))


def parse_ibv_devinfo(text: str) -> tuple[RdmaDevice, ...] | Unread:
    """The devices of `ibv_devinfo -v`: whether the port is active, and whether a GID maps an IPv4 address.

    A port is down until both ends are cabled and have RDMA enabled. It has such a GID only while its interface has an
    IPv4 address, and MLX uses no other (mlx/distributed/jaccl/lib/jaccl/rdma.cpp). Without `-v` no GIDs are printed,
    and nothing is known of them.
    """
    blocks = re.split(r"^\s*hca_id:", text, flags=re.MULTILINE)[1:]
    found = [_device(block) for block in blocks if block.split()]
    return tuple(found) or unlike("ibv_devinfo", text)


def _device(block: str) -> RdmaDevice:
    name = block.split()[0]
    gids = [match[1] for match in _GID.finditer(block)]
    return RdmaDevice(
        name=name,
        interface=name.removeprefix("rdma_"),
        active=re.search(r"state:\s*PORT_ACTIVE", block) is not None,
        ipv4_gid=any(_MAPPED.fullmatch(gid) for gid in gids) if gids or "gid_tbl_len" in block else None,
    )
