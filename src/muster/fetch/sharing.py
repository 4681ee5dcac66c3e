"""Takes files of a hub's model from the node that downloads them for others too, while they are still coming there.

What comes is checked by the hub's own hash, so that nothing has to be believed of the other node; and whatever goes
wrong with it, the hub is left.
"""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Final

from muster.errors import FetchError
from muster.fetch import hub, peers
from muster.fetch.progress import Meter
from muster.fetch.sinks import BLOCK_BYTES, Sink
from muster.layout import Sharer
from muster.peer_protocol import BlobFollows, FollowBlob

#: How long an owner may neither send a byte nor move on with what it downloads before it.
SILENCE_SECONDS: Final = 20.0
#: How long in all it may have nothing to say of what it brings: its rank may start later than this one.
PATIENCE_SECONDS: Final = 15.0
#: Between two questions at least.
_PAUSE_SECONDS: Final = 0.1


class Owner:
    """A node that downloads files of the model for this one too. One that has failed once is asked no more."""

    def __init__(self, sharer: Sharer, model: str) -> None:
        self.node = sharer.node
        self.failure: FetchError | None = None
        self._sharer = sharer
        self._model = model
        self._patience = PATIENCE_SECONDS

    def bring(self, root: Path, listed: hub.Listing, file: hub.HubFile, meter: Meter) -> bool:
        """Bring the file into the cache in `root`; whether it came. What came of it stays for whoever goes on.

        Raises:
            DiskFullError: there is no room any more.
        """
        if self.failure is not None:
            return False
        try:
            with hub.placed(root, listed, file) as blob:
                return blob.exists() or self._bring(blob, file, meter)
        except FetchError as error:
            self.failure = error
            return False

    def _bring(self, blob: Path, file: hub.HubFile, meter: Meter) -> bool:
        sink = Sink(blob, hub.hash_of(file), meter)
        try:
            if sink.offset > file.bytes:
                sink.restart()
            # What is wrong may be the part that was here before.
            for _ in range(2 if sink.offset else 1):
                self._stream(file, sink, meter)
                if sink.digest() == file.hash:
                    sink.keep()
                    return True
                sink.restart()
            raise peers.suspect(self._sharer, f"{file.name} came and has another hash than the hub says")
        finally:
            sink.close()

    def _stream(self, file: hub.HubFile, sink: Sink, meter: Meter) -> None:
        while sink.offset < file.bytes:
            before = sink.offset
            try:
                with peers.connected(self._sharer) as connection:
                    self._follow(connection, file, sink, meter)
            except FetchError:
                if sink.offset == before:
                    raise

    def _follow(self, connection: socket.socket, file: hub.HubFile, sink: Sink, meter: Meter) -> None:
        since, moved = time.monotonic(), -1
        while sink.offset < file.bytes:
            asked = time.monotonic()
            peers.send(connection, FollowBlob(model=self._model, hash=file.hash, offset=sink.offset))
            reply = peers.answer(connection, self._sharer)
            if not isinstance(reply, BlobFollows) or not 0 <= reply.bytes <= file.bytes - sink.offset:
                raise peers.suspect(self._sharer, f"it answers {reply!r:.200} to the question for {file.name}")
            if reply.bytes:
                self._receive(connection, reply.bytes, sink)
                since = time.monotonic()
                continue
            threading.Event().wait(max(0.0, asked + _PAUSE_SECONDS - time.monotonic()))
            now = time.monotonic()
            if reply.prospect == "coming" and reply.moved != moved:
                since, moved = now, reply.moved
                meter.wait(f"waits for node {self.node}, which downloads it")
            self._judge(reply, file, now - asked, now - since)

    def _judge(self, reply: BlobFollows, file: hub.HubFile, waited: float, silent: float) -> None:
        """Whether to ask once more.

        Raises:
            FetchError: it does not bring the file, or not in time.
        """
        if reply.prospect == "elsewhere":
            raise peers.broken(self._sharer, f"another download goes on there, which does not bring {file.name}")
        if reply.prospect == "open":
            self._patience -= waited
            if self._patience <= 0:
                raise peers.broken(self._sharer, f"nobody downloads {file.name} there within {PATIENCE_SECONDS:g} s")
        if silent > SILENCE_SECONDS:
            raise peers.broken(self._sharer, f"nothing more of {file.name} comes for {SILENCE_SECONDS:g} s")

    def _receive(self, connection: socket.socket, count: int, sink: Sink) -> None:
        buffer = memoryview(bytearray(min(BLOCK_BYTES, count)))
        while count:
            if not (got := connection.recv_into(buffer[:count])):
                raise peers.broken(self._sharer, "it cut the connection")
            sink.write(buffer[:got])
            count -= got
