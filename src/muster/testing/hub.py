"""A small stand-in for the Hugging Face hub on loopback, with the hub's faults at hand.

It answers what the hub's library and muster ask for a model: its commit with all files (`/api/models/ID/revision/R`)
and the files (`/ID/resolve/R/FILE`), large ones by way of a redirect, with ranges, hashes and commit headers as the
hub sends them. Point `HF_ENDPOINT` at `endpoint`, and `HF_HOME` at a directory of the test's.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

#: Files of this size and more are "large": named by SHA-256, and redirected.
LARGE_BYTES: Final = 100_000
_PIECE_BYTES: Final = 64 * 1024
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")
_API: Final = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_FILE: Final = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_LARGE: Final = re.compile(r"/large/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)")


@dataclass
class Fault:
    """What is wrong with a file: applied `times` times that it is asked for up to its end, then it is well.

    `status` is answered instead; `cut_after` bytes of the body the connection is closed, or nothing more comes where
    it `stalls`; `corrupt` turns the last byte round; `bytes_per_second` slows it down.
    With a `gate` the rest comes once that is set.
    """

    times: int = 1_000_000
    status: int = 0
    code: str = ""  #: the hub's X-Error-Code
    cut_after: int | None = None
    stalls: bool = False
    corrupt: bool = False
    bytes_per_second: float = 0.0
    gate: threading.Event | None = None


@dataclass
class Asked:
    """A request that came: of which file, from which byte, and whether up to its end and not a piece of it."""

    method: str
    path: str
    name: str = ""
    offset: int = 0
    to_end: bool = True


@dataclass
class Hub:
    """The stand-in. `models` maps ids to their files; `faults` maps a file's name, or "api", to what is wrong."""

    port: int = 0
    models: dict[str, dict[str, bytes]] = field(default_factory=dict[str, "dict[str, bytes]"])
    faults: dict[str, Fault] = field(default_factory=dict[str, Fault])
    asked: list[Asked] = field(default_factory=list[Asked])
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        """What `HF_ENDPOINT` must be."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, model: str, directory: Path) -> str:
        """Serve the files of `directory` under this id; answers the commit."""
        files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
        self.models[model] = files
        return commit_of(files)

    def downloads(self) -> list[str]:
        """The names of the files that were asked for up to their end, in order."""
        return [asked.name for asked in self.asked if asked.method == "GET" and asked.name and asked.to_end]

    def offsets(self, name: str) -> list[int]:
        """From which bytes on the file was asked for, up to its end."""
        return [asked.offset for asked in self.asked if asked.method == "GET" and asked.name == name and asked.to_end]

    def fault(self, name: str) -> Fault | None:
        """What is wrong with the file this time."""
        found = self.faults.get(name)
        if found is None or found.times <= 0:
            return None
        found.times -= 1
        return found


@contextmanager
def hub() -> Generator[Hub]:
    """A hub that runs until the end of the block."""
    made = Hub()

    class Handler(_Handler):
        stand_in = made

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="stand-in-hub", daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()


def commit_of(files: Mapping[str, bytes]) -> str:
    """The commit that stands for these files: 40 hexadecimal digits."""
    digest = hashlib.sha1(usedforsecurity=False)
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    return digest.hexdigest()


def blob_id(content: bytes) -> str:
    """The name that git gives a file's content."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  #: headers and body are two writes: the second waits 40 ms for the first otherwise
    stand_in: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := _API.fullmatch(path):
            self.stand_in.asked.append(Asked(self.command, path))
            self._api(match.group(1), match.group(2) or "main")
        elif match := _FILE.fullmatch(path) or _LARGE.fullmatch(path):
            self._file(*match.groups(), redirects=path.startswith("/large/") is False)
        else:
            self._refuse(404, "")

    def _found(self, model: str, revision: str) -> dict[str, bytes] | None:
        files = self.stand_in.models.get(model)
        if files is None:
            self._refuse(404, "RepoNotFound")
        elif revision not in ("main", commit_of(files)):
            self._refuse(404, "RevisionNotFound")
        else:
            return files
        return None

    def _api(self, model: str, revision: str) -> None:
        fault = self.stand_in.fault("api")
        if fault is not None and fault.stalls:
            self._stall()
            return
        if fault is not None and fault.status:
            self._refuse(fault.status, fault.code)
            return
        if (files := self._found(model, revision)) is None:
            return
        siblings: list[dict[str, object]] = []
        for name, content in files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob_id(content)}
            if len(content) >= LARGE_BYTES:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        self._send_whole(json.dumps({"id": model, "sha": commit_of(files), "siblings": siblings}).encode())

    def _file(self, model: str, revision: str, name: str, *, redirects: bool) -> None:
        if (files := self._found(model, revision)) is None:
            return
        if (content := files.get(name)) is None:
            self._refuse(404, "EntryNotFound")
            return
        large = len(content) >= LARGE_BYTES
        commit = commit_of(files)
        etag = hashlib.sha256(content).hexdigest() if large else blob_id(content)
        if large and redirects:
            self.send_response(302)
            self.send_header("Location", f"/large/{model}/{commit}/{name}")
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-Etag", f'"{etag}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        match = _RANGE.match(self.headers.get("Range") or "")
        offset = int(match.group(1)) if match else 0
        end = min(int(match.group(2)) + 1, len(content)) if match and match.group(2) else len(content)
        to_end = not (match and match.group(2))
        self.stand_in.asked.append(Asked(self.command, self.path, name, offset, to_end))
        fault = self.stand_in.fault(name) if self.command == "GET" and to_end else None
        if fault is not None and fault.status:
            self._refuse(fault.status, fault.code)
            return
        if fault is not None and fault.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.send_response(206 if match else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(end - offset))
        self.end_headers()
        if self.command == "GET":
            self._send_body(content[offset:end], fault or Fault())

    def _send_body(self, body: bytes, fault: Fault) -> None:
        sent, end = 0, len(body) if fault.cut_after is None else min(fault.cut_after, len(body))
        piece = int(fault.bytes_per_second / 10) or _PIECE_BYTES
        try:
            while sent < end and not self.stand_in.stopping.is_set():
                self.wfile.write(body[sent : min(sent + piece, end)])
                sent += piece
                if fault.bytes_per_second:
                    self.stand_in.stopping.wait(0.1)
        except OSError:  # whoever asked is gone
            self.close_connection = True
            return
        if end < len(body) and fault.gate is not None:
            while not fault.gate.wait(0.02) and not self.stand_in.stopping.is_set():
                pass
            self._send_body(body[end:], Fault())
        elif end < len(body):
            if fault.stalls:
                self._stall()
            self.close_connection = True

    def _stall(self) -> None:
        self.stand_in.stopping.wait()
        self.close_connection = True

    def _send_whole(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
