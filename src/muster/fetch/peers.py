"""Copies files of a model from another node's worker, by `muster.peer_protocol` over a plain socket."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from muster.errors import FetchError, ModelError
from muster.fetch.choice import is_plain
from muster.fetch.progress import Meter
from muster.fetch.sinks import BLOCK_BYTES, Sink
from muster.layout import ModelSource, Sharer
from muster.peer_protocol import (
    MAXIMUM_BYTES,
    AnyPeerReply,
    AnyPeerRequest,
    FetchFile,
    FileFollows,
    Files,
    ListFiles,
    PeerFile,
    PeerRefused,
)

#: How long a node may take to be connected to, and how long it may send nothing.
CONNECT_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 20.0
#: A node that has to read a file for its hash is given as long as a slow disk takes.
_DIGEST_BYTES_PER_SECOND: Final = 50e6
#: Meanwhile it is told so often that this is waited for: else the rank would count as stuck.
_WAIT_SECONDS: Final = 1.0
#: Tries without a single byte more, after which a source is given up.
_TRIES: Final = 3
_HEX: Final = re.compile(r"[0-9a-f]*")

#: Whom files are taken from.
Giver = ModelSource | Sharer

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[AnyPeerReply] = msgspec.msgpack.Decoder(AnyPeerReply)


def listing(source: ModelSource) -> Files:
    """The files that the node offers of the model.

    Raises:
        FetchError: it cannot be reached, does not offer the model any more, or names files outside of its directory.
    """
    return _files(source, ListFiles(path=source.path), SILENCE_SECONDS)


def copy(source: ModelSource, file: PeerFile, directory: Path, meter: Meter) -> None:
    """Copy one file into `directory`, going on with the part that is there.

    Raises:
        FetchError: the node is gone, silent, or cut the connection, and no try brought a byte more.
        ModelError: the file came twice and differs from the node's own.
        DiskFullError: there is no room any more.
    """
    sink = Sink(directory / file.name, xxhash.xxh3_128, meter)
    wrong = ""
    try:
        if sink.offset > file.bytes:
            sink.restart()
        for _ in range(2):
            _stream(source, file, sink)
            found, wanted = sink.digest(), file.xxh3 or _digest(source, file, meter)
            if found == wanted:
                sink.keep()
                return
            sink.restart()
            wrong = f"its XXH3 is {found[:12]}… and not {wanted[:12]}…"
        sink.discard()
        raise ModelError(
            f"{file.name} came from node {source.node} twice and is corrupted: {wrong}",
            remedy=f"check disk and memory of node {source.node} and of this one, and download the model there again",
        )
    finally:
        sink.close()


def _stream(source: ModelSource, file: PeerFile, sink: Sink) -> None:
    vain = 0
    while sink.offset < file.bytes:
        before = sink.offset
        try:
            _receive(source, file, sink)
        except FetchError:
            vain = vain + 1 if sink.offset == before else 0
            if vain >= _TRIES:
                raise


def _receive(source: ModelSource, file: PeerFile, sink: Sink) -> None:
    with connected(source) as connection:
        send(connection, FetchFile(path=source.path, name=file.name, offset=sink.offset))
        reply = answer(connection, source)
        if not isinstance(reply, FileFollows) or reply.size != file.bytes or reply.bytes != file.bytes - sink.offset:
            raise FetchError(
                f"{file.name} changed on node {source.node} while it was copied",
                remedy="leave a model's files alone while an instance comes up, and create it again",
            )
        buffer = memoryview(bytearray(min(BLOCK_BYTES, reply.bytes)))
        while left := file.bytes - sink.offset:
            if not (count := connection.recv_into(buffer[:left])):
                raise broken(source, f"it cut the connection at byte {sink.offset} of {file.bytes} of {file.name}")
            sink.write(buffer[:count])


def _digest(source: ModelSource, file: PeerFile, meter: Meter) -> str:
    seconds = SILENCE_SECONDS + file.bytes / _DIGEST_BYTES_PER_SECOND
    request = ListFiles(path=source.path, digests=(file.name,))

    def waits() -> None:
        meter.wait(f"waits for node {source.node}, which reads {file.name} for its hash")

    for found in _files(source, request, seconds, waits).files:
        if found.name == file.name and found.xxh3:
            return found.xxh3
    raise broken(source, f"it does not say what {file.name} must be")


def _files(source: ModelSource, request: ListFiles, seconds: float, waits: Callable[[], None] | None = None) -> Files:
    """What the node answers within so many seconds; `waits` is called each second until then."""
    with connected(source) as connection:
        connection.settimeout(seconds)
        send(connection, request)
        if waits is not None:
            _await(connection, seconds, waits)
        reply = answer(connection, source)
    if not isinstance(reply, Files):
        raise broken(source, f"it answers {type(reply).__name__}")
    # Names become paths here: a node that is not what it seems must not choose where is written.
    for name in (*(file.name for file in reply.files), *reply.weights):
        if not is_plain(name):
            raise suspect(source, f"it lists {_quoted(name)}, which is no name of a file in the model's directory")
    for what, value in (("identity", reply.identity), ("revision", reply.revision)):
        if not _HEX.fullmatch(value):
            raise suspect(source, f"it gives {_quoted(value)} as the model's {what}")
    if any(file.bytes < 0 for file in reply.files):
        raise suspect(source, "it lists a file of less than no bytes")
    return reply


def _await(connection: socket.socket, seconds: float, waits: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while not poller.poll(_WAIT_SECONDS * 1000):
        if time.monotonic() > until:
            raise TimeoutError
        waits()


@contextlib.contextmanager
def connected(source: Giver) -> Generator[socket.socket]:
    """A connection to the node's peer port, closed on exit.

    Raises:
        FetchError: nobody is there, or what happens in the block finds it gone or silent.
    """
    try:
        with socket.create_connection((source.host, source.port), timeout=CONNECT_SECONDS) as connection:
            connection.settimeout(SILENCE_SECONDS)
            yield connection
    except TimeoutError as error:
        raise broken(source, f"it sends nothing for {SILENCE_SECONDS:g} s") from error
    except OSError as error:
        raise broken(source, error.strerror or str(error)) from error


def send(connection: socket.socket, request: AnyPeerRequest) -> None:
    """Ask for something."""
    body = _encode(request)
    connection.sendall(len(body).to_bytes(4, "big") + body)


def answer(connection: socket.socket, source: Giver) -> AnyPeerReply:
    """The answer to what was asked last.

    Raises:
        FetchError: the node refuses, or what it says is none.
    """
    length = int.from_bytes(_exactly(connection, 4, source), "big")
    if length > MAXIMUM_BYTES:
        raise broken(source, f"it announces a message of {length} bytes")
    try:
        reply = _decoder.decode(_exactly(connection, length, source))
    except msgspec.DecodeError as error:
        raise broken(source, f"its answer cannot be decoded: {error}") from error
    if isinstance(reply, PeerRefused):
        raise FetchError(f"node {source.node} gives no files: {reply.failure.message}", remedy=reply.failure.remedy)
    return reply


def _exactly(connection: socket.socket, count: int, source: Giver) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise broken(source, "it closed the connection")
        data += piece
    return bytes(data)


def _quoted(text: str) -> str:
    return ascii(text if len(text) <= 200 else f"{text[:200]}…")


def suspect(source: Giver, why: str) -> FetchError:
    """What to raise where a node is not what it seems."""
    return FetchError(
        f"nothing is copied from node {source.node} at {source.host}:{source.port}: {why}",
        remedy=f"see what runs on node {source.node}, and what its worker's --models has in it",
    )


def broken(source: Giver, why: str) -> FetchError:
    """What to raise where a node does not give what it should."""
    return FetchError(
        f"the model cannot be copied from node {source.node} at {source.host}:{source.port}: {why}",
        remedy="see whether its worker runs and is reached: muster links; what came is kept and gone on with",
    )
