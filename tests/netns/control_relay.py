"""A client on a host of the bed: `control_relay.py ADDRESS` takes requests on stdin and writes replies to stdout.

Both are frames of four bytes of length and msgpack. Each request is answered by one frame, the list of its replies.
"""

from __future__ import annotations

import sys
from typing import IO

import anyio
import anyio.to_thread
import msgspec

from muster.bus import ControlClient
from muster.errors import MusterError
from muster.protocol import AnyRequest
from muster.replies import AnyReply, Refused
from muster.spec import Failure

#: The longest silence that a request waits through.
_SECONDS = 20.0


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame, `None` at the end."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "big")) if len(head) == 4 else None


def write_frame(stream: IO[bytes], payload: bytes) -> None:
    """Write one frame."""
    stream.write(len(payload).to_bytes(4, "big") + payload)
    stream.flush()


async def _replies(client: ControlClient, request: AnyRequest) -> list[AnyReply]:
    try:
        async with client.stream(request, timeout_seconds=_SECONDS) as replies:
            return [reply async for reply in replies]
    except MusterError as error:
        return [Refused(failure=Failure(kind=error.kind, message=error.message, remedy=error.remedy))]


async def _relay(address: str) -> None:
    decoder = msgspec.msgpack.Decoder(AnyRequest)
    async with ControlClient(address) as client:
        while (frame := await anyio.to_thread.run_sync(read_frame, sys.stdin.buffer)) is not None:
            replies = await _replies(client, decoder.decode(frame))
            write_frame(sys.stdout.buffer, msgspec.msgpack.encode(replies))


if __name__ == "__main__":
    anyio.run(_relay, sys.argv[1])
