"""Gives the files of this node's models to other nodes: the answers to `ListFiles` and `FetchFile`.

Whoever reaches the peer port may ask. Given are only files that belong to a model which the node holds where models
lie: the hub's cache, the directories of `--models`, and copies from other nodes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

import anyio
import anyio.to_thread
import xxhash

from muster.bus.peer import PeerConnection
from muster.errors import ModelError, PeerError, RequestError
from muster.facts import HeldModel
from muster.fetch.held import file_of
from muster.model.files import fingerprint, weight_files
from muster.peer_protocol import FetchFile, FileFollows, Files, ListFiles, PeerFile
from muster.worker.peer import PeerServer

#: Files on their way at one time; others wait for their turn.
MAXIMUM_TRANSFERS: Final = 64
#: How long a receiver may take nothing.
_SILENCE_SECONDS: Final = 20.0
#: Bytes per system call. Linux moves at most 2 GiB at once; less lets the worker's end stop a transfer soon.
_PIECE_BYTES: Final = 64 * 2**20
_READ_BYTES: Final = 2 * 2**20

#: Size and time of the last change, with the digest of that time.
_Known = tuple[int, int, str]


class Digests:
    """XXH3-128 of files, found out once and kept while size and time of change stay. For use in threads."""

    def __init__(self) -> None:
        self._known: dict[Path, _Known] = {}
        self._locks: Counter[Path] = Counter()
        self._changed = threading.Condition()

    def known(self, file: Path) -> str:
        """The digest where it is known without reading, else empty."""
        stat = file.stat()
        known = self._known.get(file)
        return known[2] if known is not None and known[:2] == (stat.st_size, stat.st_mtime_ns) else ""

    def find(self, file: Path) -> str:
        """The digest, by reading the file where it must be; only one thread reads it."""
        with self._changed:
            while self._locks[file]:
                self._changed.wait()
            if digest := self.known(file):
                return digest
            self._locks[file] += 1
        try:
            stat = file.stat()
            digest = _read(file)
            self._known[file] = (stat.st_size, stat.st_mtime_ns, digest)
            return digest
        finally:
            with self._changed:
                del self._locks[file]
                self._changed.notify_all()


class Giving:
    """The two handlers. `held` is what the node holds now, cheap enough to be asked for every request."""

    def __init__(self, held: Callable[[], tuple[HeldModel, ...]]) -> None:
        self._held = held
        self._digests = Digests()
        self._transfers = anyio.Semaphore(MAXIMUM_TRANSFERS)
        # Threads of their own: transfers last minutes and must not keep others from theirs.
        self._threads = anyio.CapacityLimiter(MAXIMUM_TRANSFERS)

    def register(self, server: PeerServer) -> None:
        """Answer on this port."""
        server.handle(ListFiles, self.list_files)
        server.handle(FetchFile, self.fetch_file)

    async def list_files(self, request: ListFiles, connection: PeerConnection) -> Files:
        """The files of a model, with the digests that are known or asked for.

        Raises:
            RequestError: the node does not offer it.
            ModelError: a file of it cannot be read.
        """
        del connection
        return await anyio.to_thread.run_sync(self._list, request, abandon_on_cancel=True)

    async def fetch_file(self, request: FetchFile, connection: PeerConnection) -> None:
        """Send a file from `offset` on, by `sendfile` from a thread: the bytes do not pass through this process.

        Raises:
            RequestError: the node does not offer it.
            PeerError: the receiver is gone, or took nothing for a while.
        """
        file = await anyio.to_thread.run_sync(self._find, request)
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if not 0 <= request.offset <= size:
                raise RequestError(f"{request.name} has {size} bytes; byte {request.offset} was asked for")
            async with self._transfers:
                await connection.send(FileFollows(bytes=size - request.offset, size=size))
                await self._send(connection.socket, connection.other, stream, request.offset)

    async def _send(self, target: socket.socket, receiver: str, stream: BinaryIO, offset: int) -> None:
        target.settimeout(_SILENCE_SECONDS)
        done = anyio.Event()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_cut_when_cancelled, target, done)
                # Not abandoned: the thread has the file and the socket, and ends at once when the socket is cut.
                send = functools.partial(send_file, target, stream.fileno(), offset)
                await anyio.to_thread.run_sync(send, limiter=self._threads)
                done.set()
        except* OSError as errors:
            raise PeerError(f"{receiver} takes the file no more: {errors.exceptions[0]}") from errors
        target.setblocking(False)

    def _list(self, request: ListFiles) -> Files:
        held = self._model(request.path)
        directory = Path(held.path)
        found: list[PeerFile] = []
        try:
            for path in sorted(directory.iterdir()):
                file = file_of(held, path.name)
                if file is None:
                    continue
                wanted = path.name in request.digests
                digest = self._digests.find(file) if wanted else self._digests.known(file)
                found.append(PeerFile(name=path.name, bytes=file.stat().st_size, xxh3=digest))
            identity = fingerprint(directory)
        except OSError as error:
            raise ModelError(f"{held.path} cannot be read: {error.strerror}", remedy="see that node's disk") from error
        weights = tuple(sorted(weight_files(directory)))
        return Files(files=tuple(found), revision=held.revision, identity=identity, weights=weights)

    def _find(self, request: FetchFile) -> Path:
        file = file_of(self._model(request.path), request.name)
        if file is None:
            raise RequestError(f"{request.name!r} is no file of the model in {request.path} that is given to others")
        return file

    def _model(self, path: str) -> HeldModel:
        for held in self._held():
            if held.path == path and held.shareable:
                return held
        raise RequestError(
            f"no model in {path} is given to other nodes",
            remedy="see `muster nodes` for what is, and start the worker with --models and its place",
        )


async def _cut_when_cancelled(target: socket.socket, done: anyio.Event) -> None:
    """Shut the socket when this is cancelled, so that the thread that sends on it ends."""
    try:
        await done.wait()
    finally:
        if not done.is_set():
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)


def send_file(target: socket.socket, source: int, offset: int) -> None:
    """Send the descriptor `source` from byte `offset` to its end; `target` has a timeout, which holds for each piece.

    Raises:
        OSError: the receiver is gone or too slow.
    """
    timeout, size = target.gettimeout(), os.fstat(source).st_size
    while offset < size:
        try:
            sent = os.sendfile(target.fileno(), source, offset, min(_PIECE_BYTES, size - offset))
        except BlockingIOError:
            _wait_writable(target, timeout)
            continue
        if not sent:
            raise OSError("the file became shorter while it was sent")
        offset += sent


def _wait_writable(target: socket.socket, seconds: float | None) -> None:
    poller = select.poll()
    poller.register(target, select.POLLOUT)
    if not poller.poll(None if seconds is None else seconds * 1000):
        raise TimeoutError(f"it took nothing for {seconds:g} s")


def _read(file: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
