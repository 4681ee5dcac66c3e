"""A cluster whose workers reach the coordinator over a link each that can be cut and healed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from kit.processes import free_ports
from muster.bench.relay import Relay
from muster.local import LocalCluster, Member


class RelayedCluster(LocalCluster):
    """The coordinator has the same ports each time it is started; node n reaches them at 127.0.0.(n + 2).

    `options` are further options of single workers, each time they are started. Needs more than one loopback address.
    """

    def __init__(
        self, directory: Path, nodes: Sequence[str], *, options: Mapping[str, Sequence[str]], **more: Any
    ) -> None:
        self._first = free_ports(4)
        super().__init__(directory, nodes, port=self._first, http_port=self._first + 3, **more)
        self.links: dict[str, Relay] = {}
        self._stack = contextlib.ExitStack()
        self._own_options = dict(options)

    def start(self) -> None:
        """Lay the links, then start all, and wait until every worker has joined."""
        self._portal = self._stack.enter_context(start_blocking_portal())
        for number, node in enumerate(self.nodes, 2):
            self.links[node] = Relay(f"127.0.0.{number}", range(self._first, self._first + 3))
            future, _ = self._portal.start_task(self.links[node].run)
            self._stack.callback(future.cancel)
        super().start()

    def cut(self, node: str) -> None:
        """Let nothing pass between the node and the coordinator; neither sees a closed connection."""
        self._portal.call(self.links[node].cut)

    def heal(self, node: str) -> None:
        """Let everything pass again, what was sent meanwhile first."""
        self._portal.call(self.links[node].heal)

    def start_worker(self, node: str, *, wait: bool = True, options: Sequence[str] = ()) -> Member:
        """Start one worker at the end of its link."""
        direct = self.address
        self.address = f"{self.links[node].host}:{self._first}"
        try:
            return super().start_worker(node, wait=wait, options=[*self._own_options.get(node, ()), *options])
        finally:
            self.address = direct

    def stop(self) -> None:
        """Heal all, stop all, and take the links away last: so the last events are logged."""
        try:
            for node in self.links:
                self.heal(node)
            super().stop()
        finally:
            self._stack.close()
