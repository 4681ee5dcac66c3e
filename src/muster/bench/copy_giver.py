"""The other node of `muster bench copy`: gives a model by muster's peer port, and a file by `socket.sendfile` alone.

Run as `python -m muster.bench.copy_giver DIRECTORY FILE`; prints both ports as JSON, and ends with its standard input.
"""

from __future__ import annotations

import functools
import socket
import sys
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from muster.fetch.held import held_models
from muster.spec import BootId, NodeAddress, NodeId
from muster.worker.giving import Giving
from muster.worker.peer import PeerServer

_LOOPBACK = NodeAddress(host="127.0.0.1", network="127.0.0.0/8")


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Where both are given."""

    peer: int
    plain: int


async def give(directory: Path, file: Path) -> None:
    """Give until the standard input ends."""
    peers = PeerServer(NodeId("giver"), BootId("giver"))
    Giving(functools.partial(held_models, (directory,))).register(peers)
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_give_plainly, args=(plain, file), daemon=True).start()
    ports = Ports(peer=peers.listen([_LOOPBACK]), plain=plain.getsockname()[1])
    sys.stdout.write(msgspec.json.encode(ports).decode() + "\n")
    sys.stdout.flush()
    async with anyio.create_task_group() as group:
        group.start_soon(peers.run)
        await anyio.to_thread.run_sync(sys.stdin.read)
        group.cancel_scope.cancel()


def _give_plainly(listener: socket.socket, file: Path) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, file.open("rb") as stream:
            connection.sendfile(stream)


if __name__ == "__main__":
    anyio.run(give, Path(sys.argv[1]), Path(sys.argv[2]))
