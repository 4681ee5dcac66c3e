"""One runner process as the worker sees it: its frames, its output, its end."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
from collections import deque

import anyio
import anyio.abc
import msgspec
import psutil
from anyio.streams.buffered import BufferedByteReceiveStream
from loguru import logger

from muster.errors import ProtocolError
from muster.rank_protocol import FromRank, Stop, ToRank, WarmFrame
from muster.runner.counter import StepCounter, counter_file
from muster.runner.frames import HEADER_BYTES, encode_frame, frame_length
from muster.worker.family import MARK, left_of
from muster.worker.footprint import footprint_bytes
from muster.worker.reaper import Reaper
from muster.worker.records import Records

#: How many of its last lines a failure quotes.
TAIL_LINES = 20
#: How much of each.
TAIL_CHARACTERS = 500
#: A longer line is cut, so that a workload cannot fill the worker's memory.
MAX_LINE_BYTES = 64 * 1024
#: Lines that wait for the coordinator before the runner's pipe is left to fill up, which makes the runner wait.
_QUEUED_LINES = 256

#: How long after the end of a runner something more is expected in its pipe.
_LAST_WORDS_SECONDS = 0.5
#: How long that may take to be handed on.
_DRAIN_SECONDS = 10.0

#: How long SIGKILL may take at least: the kernel frees memory first, and much of it takes its time.
LEAST_KILL_SECONDS = 5.0
#: Between two looks at what the runner has left; the first is short, for SIGKILL needs a moment.
_LEFT_POLL_SECONDS = 0.01

_numbers = itertools.count(1)
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class RunnerProcess:
    """A runner from its start to its certain end.

    `run` owns it: the process, its group and its descriptors are gone when `run` has returned, also on cancellation;
    but for `left`, which SIGKILL did not end.
    """

    def __init__(self, reaper: Reaper, records: Records, *, full: bool, measure: bool = False) -> None:
        self.full = full
        self.measure = measure  #: light, and says how fast memory is
        self.pid = 0
        self.started = 0.0  #: seconds since 1970; with the pid it names the process for good
        self.exit_code: int | None = None
        self.warm: WarmFrame | None = None
        self.left: list[psutil.Process] = []  #: of what it started, known when it has ended
        self.roams = False  #: it may have started processes in sessions of their own
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._mark = f"{reaper.mark}-{next(_numbers)}"
        self._counter: StepCounter | None = None
        self._reaper = reaper
        self._records = records
        self._ended = anyio.Event()
        self._drained = anyio.Event()
        self._reading: anyio.CancelScope | None = None  #: around the read of the output that is under way
        self._gone = False
        self._warmed = anyio.Event()
        self._frames_in, self.frames = anyio.create_memory_object_stream[FromRank](math.inf)
        self._lines_in, self.lines = anyio.create_memory_object_stream[str](_QUEUED_LINES)
        self._connection: anyio.abc.UNIXSocketStream | None = None

    @property
    def ended(self) -> bool:
        """Whether the process is gone and reaped."""
        return self._ended.is_set()

    async def wait_ended(self) -> int:
        """Wait until the process is gone; its exit code, minus the signal's number where a signal ended it."""
        await self._ended.wait()
        assert self.exit_code is not None
        return self.exit_code

    async def wait_warm(self) -> bool:
        """Wait until the process is warm, or gone: `False`."""
        await self._warmed.wait()
        return self.warm is not None

    async def send(self, frame: ToRank) -> None:
        """Send a frame; one for a process that is gone is dropped, its end is reported anyway."""
        if self._connection is not None:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._connection.send(encode_frame(frame))

    @property
    def step(self) -> int:
        """The step that a rank of a model is at, 0 before its first; of one that stands still as well."""
        return self._counter.step if self._counter is not None else 0

    def used_bytes(self) -> int:
        """Memory of the process: what is resident, or what MLX has allocated where that is more; 0 when it is gone.

        On a GPU, the Mac's own included, MLX's memory is no part of what is resident. A script notes nothing: on a Mac
        the system knows.
        """
        resident = self.resident_bytes()
        if not resident or self._counter is None:
            return resident
        return max(resident, self._counter.allocated_bytes, footprint_bytes(self.pid))

    def resident_bytes(self) -> int:
        """Resident memory of the process, 0 when it is gone."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start the process and stay until it is gone."""
        ours, process = await self._start()
        self.pid = process.pid
        self._reaper.watch(self.pid)
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.started = psutil.Process(self.pid).create_time()
            self._records.add(self.pid, self.started)
            self._connection = await anyio.abc.UNIXSocketStream.from_socket(ours)
            async with anyio.create_task_group() as group:
                group.start_soon(self._read_frames, self._connection)
                group.start_soon(self._read_lines, process)
                task_status.started()
                self.exit_code = await process.wait()
                await self._end_left()
                # What it wrote last is still in the pipe; a descendant may keep that open for ever.
                self._gone = True
                if self._reading is not None:
                    self._reading.deadline = anyio.current_time() + _LAST_WORDS_SECONDS
                with anyio.move_on_after(_DRAIN_SECONDS):
                    await self._drained.wait()
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._bury(process)

    async def _start(self) -> tuple[socket.socket, anyio.abc.Process]:
        """The process, and the worker's end of its line."""
        counter = counter_file()
        ours, theirs = socket.socketpair()
        try:
            self._counter = StepCounter(counter)
            command = [sys.executable, "-m", "muster.runner", str(theirs.fileno()), str(os.getpid())]
            process = await anyio.open_process(
                [*command, "full" if self.full else "probe" if self.measure else "light", str(counter)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno(), counter],
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", MARK: self._mark},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(counter)
        return ours, process

    async def end(self, *, ask: bool, patience_seconds: float) -> int | None:
        """The ladder: ask, SIGTERM, SIGKILL, each with `patience_seconds` to work. Answers the exit code.

        `None` where SIGKILL does not end it either, for the kernel holds it: `run` goes on waiting for its end. SIGKILL
        is given `LEAST_KILL_SECONDS` at least. `ask` makes sense only while the runner reads its frames.
        """
        if ask and not self.ended:
            with anyio.move_on_after(patience_seconds):
                await self.send(Stop())
                await self._ended.wait()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.ended:
                break
            self.signal(number)
            self.signal(signal.SIGCONT)  # a stopped process takes SIGTERM only when it goes on
            killed = number == signal.SIGKILL
            with anyio.move_on_after(max(patience_seconds, LEAST_KILL_SECONDS) if killed else patience_seconds):
                await self._ended.wait()
        return self.exit_code if self.ended else None

    def remains(self) -> list[psutil.Process]:
        """What is left when `end` has answered: the process itself, or what it started."""
        with contextlib.suppress(psutil.Error):
            return self.left if self.ended else [psutil.Process(self.pid)]
        return []

    async def _bury(self, process: anyio.abc.Process) -> None:
        if process.returncode is None:
            self.signal(signal.SIGKILL)
            with anyio.move_on_after(LEAST_KILL_SECONDS):
                self.exit_code = await process.wait()
                await self._end_left()
        for stream in (process.stdout, self._connection):
            if stream is not None:
                await stream.aclose()
        await anyio.lowlevel.checkpoint()  # lets asyncio close the pipe's transport while there is a loop
        self._frames_in.close()
        self._lines_in.close()
        self._warmed.set()
        if self._counter is not None:
            self._counter.close()
            self._counter = None
        if self.exit_code is None:
            logger.error("runner {} does not end; its record stays for the next worker", self.pid)
            return
        self._reaper.forget(self.pid)
        self._records.remove(self.pid)
        self._ended.set()

    def signal(self, number: int) -> None:
        """Signal the process and what it started."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def _end_left(self) -> None:
        """End what the runner has started and left behind, and see that it is gone."""
        self.signal(signal.SIGKILL)
        deadline = anyio.current_time() + LEAST_KILL_SECONDS
        pause = _LEFT_POLL_SECONDS
        while left := left_of(self.pid, self._mark if self.roams else None):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if anyio.current_time() >= deadline:
                break
            await anyio.sleep(pause)
            pause = min(2 * pause, 0.5)
        self.left = left

    async def _read_frames(self, connection: anyio.abc.UNIXSocketStream) -> None:
        stream = BufferedByteReceiveStream(connection)
        try:
            while True:
                header = await stream.receive_exactly(HEADER_BYTES)
                frame = _decoder.decode(await stream.receive_exactly(frame_length(header)))
                if isinstance(frame, WarmFrame):
                    self.warm = frame
                    self._warmed.set()
                else:
                    self._frames_in.send_nowait(frame)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass
        except (msgspec.DecodeError, ProtocolError) as error:
            logger.error("runner {} sent what is no frame ({}); it is killed", self.pid, error)
            self.signal(signal.SIGKILL)
        finally:
            self._frames_in.close()
            self._warmed.set()

    async def _read_lines(self, process: anyio.abc.Process) -> None:
        assert process.stdout is not None
        rest = b""
        try:
            while (chunk := await self._read(process.stdout)) is not None:
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    lines, rest = [*lines, rest[:MAX_LINE_BYTES]], rest[MAX_LINE_BYTES:]
                for line in lines:
                    await self._line(line)
            if rest:
                await self._line(rest)
        finally:
            self._drained.set()
            self._lines_in.close()

    async def _read(self, stream: anyio.abc.ByteReceiveStream) -> bytes | None:
        """What the process wrote; `None` at the end, or when it is gone and nothing more comes."""
        deadline = anyio.current_time() + _LAST_WORDS_SECONDS if self._gone else math.inf
        with anyio.CancelScope(deadline=deadline) as self._reading:
            try:
                return await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return None
        return None

    async def _line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self.tail.append(text if len(text) <= TAIL_CHARACTERS else text[:TAIL_CHARACTERS] + "…")
        with contextlib.suppress(anyio.BrokenResourceError):
            await self._lines_in.send(text)
