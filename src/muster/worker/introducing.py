"""What a worker says of its node when it joins, and what it has found out for that."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import anyio
from loguru import logger

from muster.errors import UnreachableError
from muster.model.hub import cache_directory
from muster.probe.collect import Subject
from muster.probe.interfaces import interfaces
from muster.spec import BootId, NodeAddress, NodeId, NodeInfo
from muster.worker import facts
from muster.worker.peer import PeerServer
from muster.worker.pool import RunnerPool
from muster.worker.settings import WorkerSettings
from muster.worker.telling import TESTING_FACTS

#: Between two looks for a route to the coordinator.
_ROUTE_RETRY_SECONDS = 1.0


async def introduce(
    settings: WorkerSettings, boot: BootId, pool: RunnerPool, peers: PeerServer
) -> tuple[NodeInfo, Subject]:
    """Find out what this node is, listen for others, and remember this boot on disk for the next one to replace.

    Raises:
        BackendError: MLX does not work here.
        RequestError: an address that the operator gave is not this machine's.
    """
    probe = await pool.probe()
    assert probe.warm is not None
    memo = settings.directory / "boot"
    replaces = memo.read_text().strip() if memo.exists() else ""
    addresses, given = await _find_addresses(settings), bool(settings.addresses)
    candidates = facts.candidates(addresses, interfaces(), given=given)
    info = NodeInfo(
        node=settings.node,
        boot=boot,
        hostname=socket.gethostname(),
        machine=_testing_machine(settings.node) or facts.machine_id(),
        pid=os.getpid(),
        addresses=addresses,
        addresses_given=given,
        candidates=candidates,
        peer_port=peers.listen((*addresses, *candidates), settings.ports),
        network_id=facts.network_id(),
        backends=probe.warm.backends,
        memory_bytes=settings.memory_bytes or facts.default_memory_bytes(),
        max_ranks=settings.max_ranks,
        versions=probe.warm.versions,
        replaces=BootId(replaces) if replaces else None,
    )
    memo.write_text(boot)
    subject = Subject(
        node=settings.node,
        boot=boot,
        versions=probe.warm.versions,
        backends=probe.warm.backends,
        memory_gbps=probe.warm.memory_gbps,
        device=probe.warm.device,
        blas=pool.blas,
        directories=(settings.directory, settings.copies_directory, cache_directory()),
    )
    return info, subject


def _testing_machine(node: NodeId) -> str:
    """Its name, where a test gives the node Thunderbolt ports: other nodes of this machine must not share them."""
    path = Path(os.environ.get(TESTING_FACTS, "").replace("{node}", node))
    try:
        return node if '"thunderbolt"' in path.read_text() else ""
    except OSError:
        return ""


async def _find_addresses(settings: WorkerSettings) -> tuple[NodeAddress, ...]:
    """The addresses of this node, once its network is up: a worker may start before it."""
    said = False
    while True:
        for coordinator in settings.coordinators:
            try:
                return facts.addresses(settings.addresses, coordinator)
            except UnreachableError as error:
                if not said:
                    logger.warning("{}; trying again until there is one", error.message)
                said = True
        await anyio.sleep(_ROUTE_RETRY_SECONDS)
