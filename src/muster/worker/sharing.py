"""Gives files of a hub's model while this node downloads them: the answer to `FollowBlob`.

Whoever reaches the peer port may ask. Given is only what lies in the hub's cache, and in muster's own of that layout,
under the name of a hash among the blobs of the model.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from muster.bus.peer import PeerConnection
from muster.errors import RequestError
from muster.fetch.held import LOCKS
from muster.fetch.lock import Underway, underway
from muster.fetch.looks import Looks
from muster.fetch.sinks import PART_SUFFIX
from muster.model.hub import blob_path, repository_directory
from muster.peer_protocol import BlobFollows, FollowBlob, Prospect
from muster.spec import is_hub_id
from muster.worker.giving import Transfers, opened
from muster.worker.peer import PeerServer

#: Followers that wait at one time.
_FOLLOWERS: Final = 64
#: How long an answer waits for something new, and how often it looks.
_WAIT_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.05
#: How long one look may take: a file system may hang.
_HANG_SECONDS: Final = 8.0
#: So much is sent at once; of less, what comes within a look more is waited for.
_ENOUGH_BYTES: Final = 4 * 2**20
#: SHA-256, or SHA-1 of a git blob.
_HASH: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is there of a file: `stream` is open where there is more than was asked from, up to byte `end`."""

    stream: FileIO | None = None
    end: int = 0
    whole: bool = False


class Sharing:
    """The handler. `roots` are the caches of the hub's layout on this node, asked for at every request."""

    def __init__(self, roots: Callable[[], tuple[Path, ...]], transfers: Transfers) -> None:
        self._roots = roots
        self._transfers = transfers
        self._looks = Looks(_FOLLOWERS)

    def register(self, server: PeerServer) -> None:
        """Answer on this port."""
        server.handle(FollowBlob, self.follow_blob)

    async def follow_blob(self, request: FollowBlob, connection: PeerConnection) -> BlobFollows | None:
        """Send what there is of a file beyond `offset`, after a moment where that is nothing yet.

        Raises:
            RequestError: what is asked for is no file of a hub's model.
            FetchError: the disk does not answer in time, or too many wait.
            PeerError: the asker is gone, or takes nothing.
        """
        if not is_hub_id(request.model) or not _HASH.fullmatch(request.hash) or request.offset < 0:
            raise RequestError(
                f"model {request.model[:200]!r}, hash {request.hash[:80]!r} and offset {request.offset} name no file "
                "of a hub's model",
                remedy="use the same version of muster on all nodes",
            )
        left = threading.Event()

        def watch() -> tuple[_Seen, BlobFollows]:
            return self._watch(request, left)

        try:
            what = f"{request.hash[:12]} of {request.model}"
            seen, reply = await self._looks.find(watch, what, seconds=_WAIT_SECONDS + _HANG_SECONDS, asker=connection)
        finally:
            left.set()
        if seen.stream is None:
            return reply
        with seen.stream as stream:
            await self._transfers.send(connection, reply, stream, request.offset, seen.end)
        return None

    # --- in a thread --------------------------------------------------------------------------------------

    def _watch(self, request: FollowBlob, left: threading.Event) -> tuple[_Seen, BlobFollows]:
        """Look until there is something to say, or nobody waits for it any more."""
        until = time.monotonic() + _WAIT_SECONDS
        first = True
        while True:
            seen = self._see(request)
            prospect, moved = self._prospect(request)
            count = seen.end - request.offset if seen.stream is not None else 0
            enough = seen.whole or count >= _ENOUGH_BYTES or (count > 0 and not first)
            if left.is_set():
                _close(seen)
                return _Seen(), BlobFollows(bytes=0)
            # A file may have come between the two looks: what is not here is looked for once more.
            settled = prospect == "elsewhere" and count == 0 and not first
            if enough or settled or time.monotonic() >= until:
                return seen, BlobFollows(bytes=count, prospect=prospect, moved=moved)
            _close(seen)
            first = False
            left.wait(_LOOK_SECONDS)

    def _see(self, request: FollowBlob) -> _Seen:
        for root in self._roots():
            blob = blob_path(root, request.model, request.hash)
            part = blob.with_name(blob.name + PART_SUFFIX)
            # Twice: it gets its name between two looks.
            for path in (blob, part, blob):
                seen = self._open(path, repository_directory(root, request.model), request.offset)
                if seen is not None:
                    return msgspec.structs.replace(seen, whole=path is blob)
        return _Seen()

    def _open(self, path: Path, home: Path, offset: int) -> _Seen | None:
        """The file where it has more than `offset` bytes; links do not lead out of where the model lies."""
        try:
            if not path.resolve().is_relative_to(home.resolve()):
                return None
            stream = opened(path)
        except (OSError, RuntimeError, ValueError):  # not there, not ours to read, links in a circle, no name at all
            return None
        end = stream.seek(0, 2)
        if end > offset:
            return _Seen(stream=stream, end=end)
        stream.close()
        return None

    def _prospect(self, request: FollowBlob) -> tuple[Prospect, int]:
        """Whether the file is going to come, and how far the download has come that goes on here."""
        found: list[Underway] = []
        for root in self._roots():
            try:
                there = underway(root / LOCKS, request.model)
            except OSError:
                continue
            if there is not None:
                found.append(there)
        moved = sum(one.moved for one in found)
        if any(one.claims is None or request.hash in one.claims for one in found):
            return "coming", moved
        return ("elsewhere" if found else "open"), moved


def _close(seen: _Seen) -> None:
    if seen.stream is not None:
        seen.stream.close()
