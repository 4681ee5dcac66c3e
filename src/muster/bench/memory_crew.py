"""The ranks of `muster bench memory`: processes of one ring group on loopback, which do job after job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from muster.bench.memory_rank import Answer, Job, Seat
from muster.bench.observer import BenchError
from muster.group.ports import reserve

_HOST: Final = "127.0.0.1"
#: For one job, on a machine that is busy with other things as well.
_SECONDS: Final = 300.0
_MOST_ANSWER_BYTES: Final = 2**24


class _Rank:
    """One process, and what it wrote."""

    def __init__(self, number: int, process: Process, errors: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._number = number
        self._process = process
        self._errors = errors
        self._jobs = process.stdin
        self._answers = BufferedByteReceiveStream(process.stdout)

    async def do(self, job: Job) -> Answer:
        try:
            with anyio.fail_after(_SECONDS):
                await self._jobs.send(msgspec.json.encode(job) + b"\n")
                line = await self._answers.receive_until(b"\n", _MOST_ANSWER_BYTES)
        except TimeoutError as error:
            raise BenchError(f"rank {self._number} did not answer within {_SECONDS:.0f} s") from error
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            said = self._errors.read_text(errors="replace").splitlines()
            raise BenchError(f"rank {self._number} ended: {' / '.join(said[-3:])}") from error
        answer = msgspec.json.decode(line, type=Answer)
        if answer.failed:
            raise BenchError(f"rank {self._number}: {answer.failed}")
        return answer

    async def end(self) -> None:
        """Nothing of it is worth waiting for."""
        with anyio.CancelScope(shield=True):
            if self._process.returncode is None:
                self._process.kill()
            await self._process.aclose()


class Crew:
    """As many processes as the group has ranks, started for the first job, and anew after one that failed.

    Used as an async context manager, whose end is theirs. `directory` is theirs as well.
    """

    def __init__(self, size: int, directory: Path) -> None:
        self._size = size
        self._directory = directory
        self._started = 0
        self._ranks: list[_Rank] = []
        self._ports = ExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def do(self, jobs: Sequence[Job]) -> list[Answer]:
        """What the first ranks answer, one for each job; they work at the same time.

        Raises:
            BenchError: a job failed, its process ended, or took too long.
        """
        if not self._ranks:
            await self._start()
        answers: dict[int, Answer] = {}

        async def ask(number: int, job: Job) -> None:
            answers[number] = await self._ranks[number].do(job)

        try:
            async with anyio.create_task_group() as group:
                for number, job in enumerate(jobs):
                    group.start_soon(ask, number, job)
        except* BenchError as errors:
            # The others may wait for the one that failed.
            await self._end()
            raise BenchError("; ".join(str(error) for error in errors.exceptions)) from errors
        return [answers[number] for number in range(len(jobs))]

    async def _start(self) -> None:
        directory = self._directory / f"crew-{self._started}"
        directory.mkdir()
        self._started += 1
        ports = self._ports.enter_context(reserve(_HOST, self._size))
        hosts = tuple((f"{_HOST}:{port}",) for port in ports.ports)
        for number in range(self._size):
            seat = Seat(rank=number, hosts=hosts, directory=str(directory))
            command = [sys.executable, "-m", "muster.bench.memory_rank", msgspec.json.encode(seat).decode()]
            errors = directory / f"rank-{number}.err"
            with errors.open("wb") as stderr:
                process = await anyio.open_process(command, stdin=subprocess.PIPE, stderr=stderr)
            self._ranks.append(_Rank(number, process, errors))

    async def _end(self) -> None:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._ports.pop_all())
            for rank in self._ranks:
                stack.push_async_callback(rank.end)
            self._ranks = []
