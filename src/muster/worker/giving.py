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
import stat as file_stat
import threading
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import xxhash

from muster.bus.peer import PeerConnection
from muster.errors import ModelError, PeerError, RequestError
from muster.facts import HeldModel
from muster.fetch.held import file_of
from muster.fetch.looks import LOOK_SECONDS, Looks
from muster.model.files import fingerprint, weight_files
from muster.peer_protocol import AnyPeerReply, FetchFile, FileFollows, Files, ListFiles, PeerFile
from muster.worker.peer import PeerServer

#: Files on their way at one time; others wait for their turn.
MAXIMUM_TRANSFERS: Final = 64
#: How long a receiver may take nothing.
_SILENCE_SECONDS: Final = 20.0
#: Bytes per system call. Linux moves at most 2 GiB at once; less lets the worker's end stop a transfer soon.
_PIECE_BYTES: Final = 64 * 2**20
_READ_BYTES: Final = 2 * 2**20
#: Looks at one time, and how fast the slowest disk reads files for their digests.
_LOOKS: Final = 32
_DIGEST_BYTES_PER_SECOND: Final = 50e6

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


class Transfers:
    """Sends pieces of files, so many at a time as there may be."""

    def __init__(self) -> None:
        self._turns = anyio.Semaphore(MAXIMUM_TRANSFERS)
        # Threads of their own: transfers last minutes and must not keep others from theirs.
        self._threads = anyio.CapacityLimiter(MAXIMUM_TRANSFERS)

    async def send(self, connection: PeerConnection, head: AnyPeerReply, stream: FileIO, offset: int, end: int) -> None:
        """Send `head`, then the file from `offset` to `end` by `sendfile` from a thread, around this process.

        Raises:
            PeerError: the receiver is gone, or took nothing for a while.
        """
        async with self._turns:
            await connection.send(head)
            await self._send(connection, stream, offset, end)

    async def _send(self, connection: PeerConnection, stream: FileIO, offset: int, end: int) -> None:
        target, receiver = connection.socket, connection.other
        target.settimeout(_SILENCE_SECONDS)
        done = anyio.Event()
        # The thread has its own descriptors: one that hangs in a disk is given up when the receiver is gone.
        own = target.dup()
        own.settimeout(_SILENCE_SECONDS)
        source = os.fdopen(os.dup(stream.fileno()), "rb", buffering=0)

        def send() -> None:
            with own, source:
                send_file(own, source.fileno(), offset, end)

        async def watch() -> None:
            await connection.until_gone()
            group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_cut_when_cancelled, target, done)
                group.start_soon(watch)
                await anyio.to_thread.run_sync(send, abandon_on_cancel=True, limiter=self._threads)
                done.set()
                group.cancel_scope.cancel()
        except* OSError as errors:
            raise PeerError(f"{receiver} takes the file no more: {errors.exceptions[0]}") from errors
        if not done.is_set():
            raise PeerError(f"{receiver} takes the file no more: it closed the connection")
        target.setblocking(False)


class Giving:
    """The two handlers. `held` is what the node holds now, cheap enough to be asked for every request."""

    def __init__(self, held: Callable[[], tuple[HeldModel, ...]], transfers: Transfers | None = None) -> None:
        self._held = held
        self._digests = Digests()
        # Apart: files that are read for their digests take minutes.
        self._looks, self._reads = Looks(_LOOKS), Looks(_LOOKS)
        self._transfers = Transfers() if transfers is None else transfers

    def register(self, server: PeerServer) -> None:
        """Answer on this port."""
        server.handle(ListFiles, self.list_files)
        server.handle(FetchFile, self.fetch_file)

    async def list_files(self, request: ListFiles, connection: PeerConnection) -> Files:
        """The files of a model, with the digests that are known or asked for.

        Raises:
            RequestError: the node does not offer it.
            ModelError: a file of it cannot be read.
            FetchError: its files cannot be read in time.
        """
        what = f"the model in {request.path}"
        listed = await self._looks.find(lambda: self._list(request), what, asker=connection)
        wanted = [file for file in listed.files if file.name in request.digests and not file.xxh3]
        if not wanted:
            return listed
        seconds = LOOK_SECONDS + sum(file.bytes for file in wanted) / _DIGEST_BYTES_PER_SECOND
        read = functools.partial(self._read_digests, request.path, wanted)
        digests = await self._reads.find(read, what, seconds=seconds, asker=connection)
        files = (msgspec.structs.replace(file, xxh3=digests.get(file.name, file.xxh3)) for file in listed.files)
        return msgspec.structs.replace(listed, files=tuple(files))

    async def fetch_file(self, request: FetchFile, connection: PeerConnection) -> None:
        """Send a file from `offset` on, by `sendfile` from a thread: the bytes do not pass through this process.

        Raises:
            RequestError: the node does not offer it.
            FetchError: it cannot be opened in time.
            PeerError: the receiver is gone, or took nothing for a while.
        """
        found = await self._looks.find(lambda: self._open(request), f"{request.name} in {request.path}")
        with found as stream:
            size = os.fstat(stream.fileno()).st_size
            if not 0 <= request.offset <= size:
                raise RequestError(f"{request.name} has {size} bytes; byte {request.offset} was asked for")
            await self._transfers.send(
                connection, FileFollows(bytes=size - request.offset, size=size), stream, request.offset, size
            )

    def _list(self, request: ListFiles) -> Files:
        held = self._model(request.path)
        directory = Path(held.path)
        found: list[PeerFile] = []
        try:
            for path in sorted(directory.iterdir()):
                file = file_of(held, path.name)
                if file is None:
                    continue
                found.append(PeerFile(name=path.name, bytes=file.stat().st_size, xxh3=self._digests.known(file)))
            identity = fingerprint(directory)
        except OSError as error:
            raise ModelError(f"{held.path} cannot be read: {error.strerror}", remedy="see that node's disk") from error
        weights = tuple(sorted(weight_files(directory)))
        return Files(files=tuple(found), revision=held.revision, identity=identity, weights=weights)

    def _read_digests(self, path: str, wanted: list[PeerFile]) -> dict[str, str]:
        held = self._model(path)
        files = {one.name: file_of(held, one.name) for one in wanted}
        try:
            return {name: self._digests.find(file) for name, file in files.items() if file is not None}
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}", remedy="see that node's disk") from error

    def _open(self, request: FetchFile) -> FileIO:
        try:
            file = file_of(self._model(request.path), request.name)
            if file is not None:
                return opened(file)
        except (OSError, ValueError) as error:  # gone meanwhile, no permission, or no name at all
            raise RequestError(f"{request.name!r} in {request.path} cannot be opened: {error}") from error
        raise RequestError(f"{request.name!r} is no file of the model in {request.path} that is given to others")

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


def send_file(target: socket.socket, source: int, offset: int, end: int) -> None:
    """Send bytes `offset` to `end` of the descriptor `source`; `target` has a timeout, which holds for each piece.

    Raises:
        OSError: the receiver is gone or too slow.
    """
    timeout = target.gettimeout()
    while offset < end:
        try:
            sent = os.sendfile(target.fileno(), source, offset, min(_PIECE_BYTES, end - offset))
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


def opened(file: Path) -> FileIO:
    """The file, where it is a regular one; to open a pipe would wait for whoever writes to it.

    Raises:
        OSError: it is none, or cannot be opened.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not file_stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def _read(file: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    with opened(file) as stream:
        while count := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
