"""JACCL's side channel over TCP, as MLX has it: rank 0 gathers everybody's bytes and sends all to all.

Source: `mlx/distributed/jaccl/lib/jaccl/rdma.cpp` (`TCPAllGather`) and `tcp.cpp`, as of mlx 0.32: 4 tries with waits of
1, 2, 4 and 8 s, no timeout on accepting, and the first connections are believed to be the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import sys
import time
from typing import Final

_TRIES: Final = 4
_RANK: Final = struct.Struct("=i")


class TcpGather:
    """The exchange of one rank; calling it is one all-gather."""

    def __init__(self, rank: int, size: int, host: str, port: int) -> None:
        self._rank = rank
        self._size = size
        self._sockets = _accept(size, host, port) if rank == 0 else [_dial(rank, host, port)]

    def __call__(self, source: bytes, count: int) -> bytes:
        """The `count` bytes of every rank, in rank order.

        Raises:
            RuntimeError: a connection broke.
        """
        if self._rank == 0:
            told = source[:count] + b"".join(_receive(one, count) for one in self._sockets)
            for one in self._sockets:
                _send(one, told)
            return told
        (lead,) = self._sockets
        _send(lead, source[:count])
        return _receive(lead, count * self._size)


def _accept(size: int, host: str, port: int) -> list[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            server.bind((host, port))
        except OSError as error:
            raise RuntimeError(f"[jaccl] Couldn't bind socket (error: {error.errno})") from error
        server.listen(0)
        accepted = [server.accept()[0] for _ in range(size - 1)]
    by_rank = {_RANK.unpack(_receive(one, _RANK.size))[0]: one for one in accepted}
    if sorted(by_rank) != list(range(1, size)):
        raise RuntimeError(f"[jaccl] the ranks {sorted(by_rank)} came: MLX would read past its arrays")
    return [by_rank[rank] for rank in range(1, size)]


def _dial(rank: int, host: str, port: int) -> socket.socket:
    seconds, failure = 1.0, errno.ECONNREFUSED
    for attempt in range(_TRIES):
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.connect((host, port))
        except OSError as error:
            connection.close()
            failure = error.errno or failure
            with contextlib.suppress(OSError):
                sys.stderr.write(f"[jaccl] Connection attempt {attempt} waiting {seconds * 1000:.0f} ms\n")
            time.sleep(seconds)
            seconds *= 2
        else:
            _send(connection, _RANK.pack(rank))
            return connection
    raise RuntimeError(f"[jaccl] Couldn't connect (error: {failure})")


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError as error:
        raise RuntimeError(f"[jaccl] Send failed with errno={error.errno}") from error


def _receive(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        try:
            piece = connection.recv(count - len(found))
        except OSError as error:
            raise RuntimeError(f"[jaccl] Recv failed with errno={error.errno}") from error
        if not piece:
            raise RuntimeError("[jaccl] Recv failed: peer closed the side channel")
        found += piece
    return bytes(found)
