"""The listeners of this machine, asked of the Linux kernel directly.

`/proc/net/tcp` (and so psutil) walks every connection of the machine, 1.5 ms with 500 of them; this asks for
listeners alone and takes some 30 µs, cheap enough to be polled each millisecond.

Source: `include/uapi/linux/inet_diag.h` and `sock_diag(7)` of Linux.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Final

_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE: Final = 3
_ERROR: Final = 2
_LISTEN_STATE: Final = 10
_RECEIVE_BYTES: Final = 1 << 16

_HEADER: Final = struct.Struct("=IHHII")
#: Family, protocol, extensions, padding, states; then a socket id of zeros, which matches all.
_REQUEST: Final = struct.Struct("=BBBxI48x")
#: After family, state, timer and retransmissions: source and destination port, source address (first 4 of 16
#: bytes for IPv4), the rest of the socket id, four counters, inode.
_ANSWER: Final = struct.Struct("=4x2s2x4s40x16xI")


def listening_inodes() -> dict[int, tuple[str, int]] | None:
    """By inode, the (IPv4 address, port) of each TCP listener in this process's network namespace.

    Returns:
        None where the kernel cannot be asked: not Linux, or a sandbox without netlink.
    """
    if sys.platform != "linux":
        return None
    request = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 1 << _LISTEN_STATE)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
    found: dict[int, tuple[str, int]] = {}
    try:
        # 4 is NETLINK_SOCK_DIAG, for which the socket module has no name.
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:
            kernel.settimeout(1.0)
            kernel.send(header + request)
            while True:
                for kind, body in _messages(kernel.recv(_RECEIVE_BYTES)):
                    if kind == _DONE:
                        return found
                    if kind == _ERROR:
                        return None
                    port, address, inode = _ANSWER.unpack_from(body)
                    found[inode] = (socket.inet_ntoa(address), int.from_bytes(port, "big"))
    except OSError:
        return None


def socket_inodes(pid: int) -> set[int]:
    """The inodes of the sockets that `pid` has open; empty when it is gone.

    Raises:
        PermissionError: Another user's process.
    """
    folder = f"/proc/{pid}/fd"
    inodes: set[int] = set()
    try:
        names = os.listdir(folder)  # noqa: PTH208 - a poll; Path objects cost as much as the kernel's answer
    except (FileNotFoundError, ProcessLookupError):
        return inodes
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
        yield kind, data[offset + _HEADER.size : offset + length]
        offset += max((length + 3) & ~3, _HEADER.size)
