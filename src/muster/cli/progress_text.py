"""How far a rank is, in words: layers counted, bytes with their rate and where they come from."""

from __future__ import annotations

from collections.abc import Iterable

from muster.cli.render import printable, size
from muster.protocol import Beat, Progress
from muster.spec import InstanceId


def amount(progress: Progress) -> str:
    """As in "3/24 layers", or "1.2 GiB of 4.0 GiB, 96 MiB/s, from the hub"."""
    if progress.unit != "bytes":
        return f"{progress.done}/{progress.total} {progress.unit}" if progress.total > 0 else ""
    parts = [f"{size(progress.done)} of {size(progress.total)}"] if progress.total > 0 else []
    if progress.rate > 0:
        parts.append(f"{size(int(progress.rate))}/s")
    return ", ".join(filter(None, (*parts, printable(progress.note))))


def milestone(progress: Progress) -> tuple[str, int]:
    """What changes when a line in a log is due: each unit, of bytes each tenth."""
    if progress.unit != "bytes":
        return progress.note, progress.done
    return progress.note.rpartition(",")[2], 10 * progress.done // max(progress.total, 1)


def progress_lines(beats: Iterable[Beat], instance: InstanceId | None = None) -> list[str]:
    """A line for each rank that has something to tell of, of one instance or of all."""
    told = (progress for beat in beats for progress in beat.progress if instance in (None, progress.instance))
    ordered = sorted(told, key=lambda progress: (progress.instance, progress.rank))
    return [f"{one.instance} rank {one.rank} is {one.phase.value}: {text}" for one in ordered if (text := amount(one))]
