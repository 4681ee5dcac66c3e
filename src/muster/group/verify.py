"""The ranks of a formed group prove to each other that they belong together.

MLX takes whoever connects first for the neighbour, so a formed group may mix instances, attempts or versions.
One small all_gather shows it. A stranger that does not speak MLX's protocol makes it wait for ever: the worker
enforces the deadline from outside this process.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Final, cast

import msgspec

from muster import __version__
from muster.errors import FormationError, MembershipError
from muster.group.remedies import translate

if TYPE_CHECKING:
    import mlx.core as mx

#: Bytes of one rank's row: mark, length, message, zeros.
ROW_BYTES: Final = 1024
_MARK: Final = b"muster1\0"
_HEAD_BYTES: Final = len(_MARK) + 2

#: In the order in which a difference says most about the cause.
_SHARED_FIELDS: Final = ("instance", "attempt", "world_size", "muster", "mlx", "mlx_lm", "python", "workload")
_REMEDIES: Final = {
    "instance": "another instance's rank took this port; start another attempt",
    "attempt": "a rank of an older attempt still runs; see that it ended, then start another attempt",
    "world_size": "another group's rank took this port; start another attempt",
    "workload": "make the model or script files equal on all nodes",
}


class Identity(msgspec.Struct, frozen=True):
    """What a rank believes that it is part of.

    Attributes:
        workload: Fingerprint of the model's or script's files; equal text means equal files.
    """

    instance: str
    attempt: int
    rank: int
    world_size: int
    muster: str
    mlx: str
    mlx_lm: str
    python: str
    workload: str


def own_identity(instance: str, attempt: int, rank: int, world_size: int, workload: str) -> Identity:
    """The identity of this process, with the versions that are installed here."""
    return Identity(
        instance=instance,
        attempt=attempt,
        rank=rank,
        world_size=world_size,
        muster=__version__,
        mlx=_version("mlx"),
        mlx_lm=_version("mlx-lm"),
        python=platform.python_version(),
        workload=workload,
    )


def exchange(group: mx.distributed.Group, identity: Identity) -> tuple[Identity, ...]:
    """Gathers the identities of all ranks, in order of rank. Blocks until every rank has called it.

    Has no deadline of its own, and a rank that waits here cannot end itself; see the module's text.

    Raises:
        MembershipError: A row is not an identity, or this rank's own does not fit into a row.
        FormationError: A neighbour was lost meanwhile.
    """
    import mlx.core as mx

    row = encode(identity)
    try:
        rows = mx.distributed.all_gather(mx.array(list(row), mx.uint8), group=group, stream=mx.cpu)
        mx.eval(rows)
    except RuntimeError as error:
        cause, remedy = translate(str(error))
        raise FormationError(
            f"rank {identity.rank} of {identity.world_size}: {cause}; MLX says: {error}", remedy=remedy
        ) from error
    return decode(bytes(cast("list[int]", rows.tolist())))


def check(mine: Identity, everyone: Sequence[Identity]) -> None:
    """Compares every rank's identity with this rank's. Python versions may differ in the last number.

    Raises:
        MembershipError: Names the rank, the field and both values, for every difference.
    """
    if len(everyone) != mine.world_size:
        raise MembershipError(
            f"{len(everyone)} ranks answered, world size is {mine.world_size}", remedy="start another attempt"
        )
    faults: list[str] = []
    first: str | None = None
    for rank, other in enumerate(everyone):
        if other.rank != rank:
            faults.append(f"rank {rank} says that it is rank {other.rank}")
            first = first or "rank"
        for field in _SHARED_FIELDS:
            here, there = _comparable(mine, field), _comparable(other, field)
            if here != there:
                faults.append(
                    f"rank {rank} has {field} {getattr(other, field)!r}, rank {mine.rank} has {getattr(mine, field)!r}"
                )
                first = first or field
    if first is not None:
        remedy = _REMEDIES.get(
            first, "start another attempt" if first == "rank" else f"install one {first} on all nodes"
        )
        raise MembershipError("; ".join(faults), remedy=remedy)


def encode(identity: Identity) -> bytes:
    """One row of `ROW_BYTES`.

    Raises:
        MembershipError: The identity's texts are too long.
    """
    message = msgspec.msgpack.encode(identity)
    if len(message) > ROW_BYTES - _HEAD_BYTES:
        raise MembershipError(
            f"rank {identity.rank}: its identity takes {len(message)} bytes, {ROW_BYTES - _HEAD_BYTES} fit",
            remedy="use a shorter instance id",
        )
    return (_MARK + len(message).to_bytes(2, "big") + message).ljust(ROW_BYTES, b"\0")


def decode(rows: bytes) -> tuple[Identity, ...]:
    """The inverse of `encode`, for the rows of all ranks.

    Raises:
        MembershipError: Names the rank whose row is not an identity.
    """
    if not rows or len(rows) % ROW_BYTES:
        raise MembershipError(f"{len(rows)} bytes are not rows of {ROW_BYTES}", remedy="start another attempt")
    return tuple(
        _decode_row(number, rows[start : start + ROW_BYTES])
        for number, start in enumerate(range(0, len(rows), ROW_BYTES))
    )


def _decode_row(rank: int, row: bytes) -> Identity:
    length = int.from_bytes(row[len(_MARK) : _HEAD_BYTES], "big")
    body = row[_HEAD_BYTES : _HEAD_BYTES + length]
    try:
        if not row.startswith(_MARK) or len(body) != length or row[_HEAD_BYTES + length :].strip(b"\0"):
            raise ValueError("not a row of this protocol")
        return msgspec.msgpack.decode(body, type=Identity)
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise MembershipError(
            f"rank {rank} sent something that is no identity: {row[:16]!r}… ({error})",
            remedy="a stranger or another version of muster took part; start another attempt",
        ) from error


def _comparable(identity: Identity, field: str) -> object:
    value: object = getattr(identity, field)
    return str(value).rsplit(".", 1)[0] if field == "python" else value


@functools.cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
