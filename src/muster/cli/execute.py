"""`muster exec`: a script instance from its creation to nothing left, whatever happens in between."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import msgspec

from muster.bus import ControlClient, RefusedError
from muster.cli.client import CALL_SECONDS
from muster.cli.errors import EXIT_FAILED, SIGNAL_EXIT_BASE, show_failure, show_note
from muster.cli.instance_commands import remove
from muster.cli.log_reading import read_output, stream_output
from muster.cli.watch import Watcher, is_over, watching
from muster.errors import RequestError, UnreachableError
from muster.protocol import Create
from muster.replies import Created, OutputLine
from muster.spec import InstanceId
from muster.state import Broken, Instance

#: How long the deletion in the end may take: asking politely, SIGTERM, SIGKILL, and a lease.
_REMOVE_SECONDS = 30.0
#: Failures of the script itself, which it has shown already; others are explained.
_OWN_KINDS = ("script-failed", "rank-killed")

T = TypeVar("T")


async def execute_script(client: ControlClient, request: Create) -> int:
    """Run it and print what it prints. The exit code; the instance is gone, also after an error or a signal.

    Raises:
        RefusedError: the coordinator refused to create it.
        UnreachableError: the coordinator is gone.
    """
    # A signal between the request and its answer must not leave an instance that nobody knows of.
    created = await _shielded(lambda: client.ask(request, CALL_SECONDS, Created))
    removed = EXIT_FAILED
    try:
        async with watching(client) as watcher:
            ended = await _attend(client, watcher, created)
    finally:
        removed = await _shielded(lambda: remove(client, [created.instance], _REMOVE_SECONDS, quiet=True))
    if ended is None:
        show_note(f"{created.instance} was deleted by somebody else")
        return EXIT_FAILED
    return _exit_code(ended) or removed


async def _shielded(function: Callable[[], Awaitable[T]]) -> T:
    """Run to the end, whatever is cancelled meanwhile."""
    result: list[T] = []
    with anyio.CancelScope(shield=True):
        result.append(await function())
    return result[0]


async def _attend(client: ControlClient, watcher: Watcher, created: Created) -> Instance | None:
    """Print until the instance is over; its last state, or `None` if somebody deleted it."""
    name = created.instance
    latest: Instance | None = None

    async def over() -> None:
        await watcher.until(lambda state: watcher.reached(created.sequence, name) and is_over(state, name))
        nonlocal latest
        latest = watcher.state.instances.get(name)
        group.cancel_scope.cancel()

    printer = _Printer(client, watcher, name)
    async with anyio.create_task_group() as group:
        group.start_soon(over)
        group.start_soon(printer.run)
    # Every rank's output is reported before its end, so all of it is there by now.
    if latest is not None:
        await printer.finish()
    return latest


class _Printer:
    """Prints what the ranks print, each line once."""

    def __init__(self, client: ControlClient, watcher: Watcher, instance: InstanceId) -> None:
        self._client = client
        self._watcher = watcher
        self._instance = instance
        self._position = 0
        self._boot = watcher.boot

    async def run(self) -> None:
        """Print until cancelled, also over a restart of the coordinator."""
        while True:
            if self._watcher.boot != self._boot:
                # The new one has none of the lines that the old one had.
                self._boot, self._position = self._watcher.boot, 0
            try:
                self._position = await stream_output(self._client, self._instance, None, self._show, self._position)
            except UnreachableError:
                continue  # the watcher says so, and waits for it
            except RefusedError as error:
                if error.failure.kind != RequestError.kind:
                    raise
                return  # deleted

    async def finish(self) -> None:
        """Print the rest."""
        try:
            self._position = await read_output(self._client, self._instance, None, self._show, self._position)
        except RefusedError as error:
            if error.failure.kind != RequestError.kind:
                raise

    def _show(self, lines: tuple[OutputLine, ...]) -> None:
        sys.stdout.writelines(f"[{line.rank}] {line.text}\n" for line in lines)
        sys.stdout.flush()


def _exit_code(instance: Instance) -> int:
    """The script's own exit code, or 1 with the reason on standard error."""
    if not isinstance(instance.status, Broken):
        return 0
    failure = instance.status.failure
    if failure.kind in _OWN_KINDS:  # its output was printed a moment ago, and is gone with the instance
        remedy = "" if failure.kind == "script-failed" and "muster logs" in failure.remedy else failure.remedy
        failure = msgspec.structs.replace(failure, log_tail=(), remedy=remedy)
    show_failure(failure)
    if failure.exit_code is None or failure.kind not in _OWN_KINDS:
        return EXIT_FAILED
    return failure.exit_code if failure.exit_code >= 0 else SIGNAL_EXIT_BASE - failure.exit_code
