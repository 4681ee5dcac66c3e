"""A process that follows a coordinator until an instance of a given name is there, then prints its state."""

from __future__ import annotations

import sys

import anyio
from bus_coordinator import encoded

from muster.bus import Applied, ControlClient, Follower, Synchronised


async def main(endpoint: str, last_name: str) -> None:
    async with ControlClient(endpoint) as client, Follower(client) as follower:
        async for change in follower.changes():
            if isinstance(change, Synchronised | Applied):
                if isinstance(change, Synchronised):
                    print("synchronised", change.state.sequence, flush=True)  # noqa: T201 - the test reads it
                if any(instance.spec.name == last_name for instance in change.state.instances.values()):
                    print("state", encoded(change.state).hex(), flush=True)  # noqa: T201 - the test reads it
                    return


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
