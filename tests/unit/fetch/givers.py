"""A node that gives its models to others, in a test's own process."""

from __future__ import annotations

import functools
from pathlib import Path

import anyio
import anyio.abc

from muster.bus.peer import PeerConnection
from muster.fetch.held import held_models
from muster.layout import ModelSource
from muster.peer_protocol import FetchFile
from muster.spec import BootId, NodeAddress, NodeId
from muster.worker.giving import Giving
from muster.worker.peer import PeerServer


class Giver:
    """A node whose worker gives the models below `directory`, and its hub's cache below `cache`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "given"
        self.cache = directory / "own"
        self.port = 0
        self.fetched: list[FetchFile] = []
        self.giving = Giving(functools.partial(held_models, (self.directory,), self.cache))

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        server = PeerServer(NodeId("b"), BootId("b1"))
        self.giving.register(server)
        fetch = self.giving.fetch_file

        async def noting(request: FetchFile, connection: PeerConnection) -> None:
            self.fetched.append(request)
            await fetch(request, connection)

        server.handle(FetchFile, noting)
        self.port = server.listen([NodeAddress(host="127.0.0.1", network="127.0.0.0/8")])
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            task_status.started()

    def source(self, path: Path, node: str = "b", port: int | None = None) -> ModelSource:
        port = self.port if port is None else port
        return ModelSource(node=NodeId(node), host="127.0.0.1", port=port, path=str(path))
