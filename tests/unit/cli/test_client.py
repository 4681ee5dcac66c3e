"""The connection of a command: who is not there, and what signals do."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest

from muster.bus import ControlClient
from muster.cli.client import instance_names, node_names, run, view
from muster.cli.errors import InterruptedBySignalError
from muster.errors import ProtocolError, UnreachableError


@pytest.fixture
def deaf() -> Iterator[str]:
    """The address of somebody who accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_who_never_answers_is_unreachable(deaf: str) -> None:
    with pytest.raises(UnreachableError) as caught:
        run(deaf, lambda client: view(client, 0.2))
    assert "muster up" in caught.value.remedy


def test_nobody_there_is_found_out_at_once() -> None:
    with pytest.raises(UnreachableError, match="connection refused") as caught:
        run("127.0.0.1:1", view)
    assert "--coordinator" in caught.value.remedy


def test_an_error_comes_out_as_it_is(deaf: str) -> None:
    async def fail(client: ControlClient) -> None:
        async with anyio.create_task_group():
            raise ProtocolError("x")

    with pytest.raises(ProtocolError):
        run(deaf, fail)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_and_lets_shielded_cleanup_end(deaf: str, number: signal.Signals) -> None:
    cleaned: list[bool] = []

    async def work(client: ControlClient) -> None:
        try:
            os.kill(os.getpid(), number)
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                # The client still works: a call that nobody answers ends with its own time, not with the signal.
                with pytest.raises(UnreachableError):
                    await view(client, 0.05)
                cleaned.append(True)

    with pytest.raises(InterruptedBySignalError) as caught:
        run(deaf, work)
    assert caught.value.number == number
    assert cleaned == [True]


def test_completion_says_nothing_where_nobody_answers(deaf: str) -> None:
    assert instance_names(deaf, "a") == []
    for names in (instance_names, node_names):
        assert names("127.0.0.1:1", "a") == []
        assert names("a:b:c", "a") == []
