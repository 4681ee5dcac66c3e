"""Reads what a safetensors file says about itself, without reading a single weight.

Source: the safetensors format: eight bytes of little-endian header length, a JSON header that maps each tensor's
name to its dtype, shape and byte range, then the tensors without a gap.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import msgspec

from muster.errors import ModelError
from muster.model.reading import MOST, open_regular, parse_json, shown, shown_name

#: Bits per element of every dtype that the format knows.
DTYPE_BITS: Final[dict[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

#: The format's own limit; a larger length is a file of another kind.
MAX_HEADER_BYTES: Final = 100_000_000

_DIMENSIONS: Final = 16
_NAME_CHARACTERS: Final = 500

_DOWNLOAD_AGAIN = "download or copy the file again"


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint: `dtype` as the file spells it, `file` relative to the model's directory."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    bytes: int


def read_header_bytes(path: Path) -> bytes:
    """The JSON header of `path`, undecoded.

    Raises:
        ModelError: the file cannot be read, is cut short, or is no safetensors file.
    """
    try:
        real_bytes = path.stat().st_size
        with open_regular(path) as file:
            prefix = file.read(8)
            if prefix == b"version ":
                raise ModelError(
                    f"{path.name} is a Git LFS pointer, not weights", remedy="run `git lfs pull` in its directory"
                )
            if len(prefix) < 8:
                raise _truncated(path, 8, real_bytes)
            length = int.from_bytes(prefix, "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ModelError(
                    f"{path.name} is no safetensors file: its header would be {length} bytes long",
                    remedy=_DOWNLOAD_AGAIN,
                )
            header = file.read(length)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", remedy=_DOWNLOAD_AGAIN) from error
    if len(header) < length:
        raise _truncated(path, 8 + length, real_bytes)
    return header


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """Every tensor that the header of `path` lists, after checking it against the file's real size.

    Raises:
        ModelError: as `read_header_bytes` and `parse_header`, or the file is longer or shorter than they say.
    """
    header = read_header_bytes(path)
    tensors, data_bytes = parse_header(path.name, header)
    _check_size(path.name, expected=8 + len(header) + data_bytes, real=path.stat().st_size)
    return tensors


def parse_header(name: str, header: bytes) -> tuple[dict[str, TensorInfo], int]:
    """Every tensor that the header of the file `name` lists, and how many bytes of data follow.

    Raises:
        ModelError: a tensor's range is not its dtype and shape's, leaves a gap, or overlaps another.
    """
    try:
        entries: Any = parse_json(header)
        if not isinstance(entries, dict):
            raise ValueError("it is not an object")
        entries.pop("__metadata__", None)
        ranges: list[tuple[int, int, str]] = []
        tensors: dict[str, TensorInfo] = {}
        for tensor, entry in entries.items():
            if len(tensor) > _NAME_CHARACTERS or not tensor.isprintable():
                raise ValueError(f"{shown(tensor)} is no name of a tensor")
            begin, end = _sizes(tensor, "data_offsets", entry["data_offsets"])
            shape = _sizes(tensor, "shape", entry["shape"])
            dtype = entry["dtype"]
            info = TensorInfo(dtype if isinstance(dtype, str) else shown(dtype), shape, name, end - begin)
            _check_bytes(tensor, info)
            ranges.append((begin, end, tensor))
            tensors[tensor] = info
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{name} has a header that cannot be read: {error}", remedy=_DOWNLOAD_AGAIN) from error
    return tensors, _check_ranges(name, ranges)


def _sizes(tensor: str, field: str, value: object) -> tuple[int, ...]:
    """A few whole numbers, before anything is computed with them."""
    sizes: list[Any] = value if isinstance(value, list) else [None]  # pyright: ignore[reportUnknownVariableType]
    if len(sizes) > _DIMENSIONS or not all(type(size) is int and abs(size) <= MOST for size in sizes):
        raise ValueError(
            f"{field} of tensor {tensor} is {shown(value)}, expected at most {_DIMENSIONS} whole numbers up to {MOST}"
        )
    return tuple(sizes)


def _check_bytes(name: str, info: TensorInfo) -> None:
    bits = DTYPE_BITS.get(info.dtype)
    if bits is None:
        raise ModelError(
            f"{info.file}: tensor {name} has the unknown dtype {shown_name(info.dtype)}", remedy=_DOWNLOAD_AGAIN
        )
    elements = math.prod(info.shape)
    if elements > MOST:
        raise ModelError(
            f"{info.file}: tensor {name} has the shape {list(info.shape)}, more than {MOST} values",
            remedy=_DOWNLOAD_AGAIN,
        )
    expected = elements * bits / 8
    if min(info.shape, default=0) < 0 or info.bytes != expected:
        raise ModelError(
            f"{info.file}: tensor {name} takes {info.bytes} bytes, but {info.dtype} of shape {list(info.shape)} "
            f"takes {expected:.0f}",
            remedy=_DOWNLOAD_AGAIN,
        )


def _check_ranges(file: str, ranges: list[tuple[int, int, str]]) -> int:
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            raise ModelError(
                f"{file}: tensor {name} begins at byte {begin} of the data, expected {position}",
                remedy=_DOWNLOAD_AGAIN,
            )
        position = end
    return position


def _check_size(file: str, *, expected: int, real: int) -> None:
    if real < expected:
        raise ModelError(f"{file} is truncated: expected {expected} bytes, found {real}", remedy=_DOWNLOAD_AGAIN)
    if real > expected:
        raise ModelError(
            f"{file} has {real - expected} bytes that belong to no tensor: expected {expected} bytes, found {real}",
            remedy=_DOWNLOAD_AGAIN,
        )


def _truncated(path: Path, expected: int, real: int) -> ModelError:
    return ModelError(f"{path.name} is truncated: expected {expected} bytes, found {real}", remedy=_DOWNLOAD_AGAIN)
