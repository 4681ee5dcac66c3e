"""Reads small files of a model that anybody may have written: whatever they hold, it takes little time and memory."""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

from muster.errors import ModelError

#: Largest config.json and index that are read; those of the largest models take a quarter of it.
MAX_JSON_BYTES: Final = 64 * 1024 * 1024
#: Above it a size is none of a real model, and sums and products of sizes might leave 64 bits.
MOST: Final = 2**53
#: Digits of a number in JSON. Python's own conversion takes quadratic time, and gives up at thousands of them.
_DIGITS: Final = 100
_VALUES: Final = 4_000_000  #: each takes many times its bytes in memory; the largest headers have a million
_DEPTH: Final = 64  #: of objects and lists in each other
_SHOWN: Final = 200  #: characters of a foreign text in a message

_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = _SHOWN


def shown(value: object) -> str:
    """`value` as Python writes it, shortened to what a message can hold."""
    return _REPR.repr(value)


def shown_name(name: str) -> str:
    """A name of a file or tensor in a message: short, and without bytes that are no UTF-8."""
    plain = name[: _SHOWN + 1].encode(errors="backslashreplace").decode()
    return plain if len(plain) <= _SHOWN else plain[:_SHOWN] + "…"


def is_text(name: str) -> bool:
    """Whether a name from the file system is UTF-8, so that it can be sent to others."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Never waits for another process, as a named pipe would.

    Raises:
        ModelError: it is a device, a pipe or a directory.
        OSError: it cannot be opened.
    """
    # Looked at before it is opened as well: to open a device may already do something.
    _check_regular(path, path.stat().st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_small(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """The whole of a file of at most `most` bytes.

    Raises:
        ModelError: it is longer, or no regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise too_long(path.name, most)
        data = file.read(most + 1)  # it may grow, and some of the system's own say that they are empty
    if len(data) > most:
        raise too_long(path.name, most)
    return data


def too_long(name: str, most: int) -> ModelError:
    """The refusal of a small file that is not small."""
    return ModelError(f"{shown_name(name)} is longer than {most} bytes", remedy="download or copy the file again")


def parse_json(data: bytes) -> Any:
    """What the JSON in `data` says.

    Raises:
        ValueError: it is no JSON in UTF-8, or nothing that a model's files have to say: numbers of hundreds of
            digits, dozens of objects in each other, half of a surrogate pair.
    """
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > _VALUES:
        raise ValueError(f"it has {values} values, expected at most {_VALUES}")
    try:
        value: Any = json.loads(data.decode("utf-8-sig"), parse_int=_whole, parse_float=_real)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("its objects lie too deep in each other") from error
    _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    level = _inside([value])
    for _ in range(_DEPTH):
        if not level:
            return
        level = _inside(inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
    raise ValueError(f"its objects lie more than {_DEPTH} deep in each other")


def _inside(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"{text[:20]}… is a number of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    if len(text) > 10 * _DIGITS:
        raise ValueError(f"{text[:20]}… is a number of {len(text)} digits")
    return float(text)


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ModelError(
            f"{shown_name(str(path))} is no regular file, but a directory, device or pipe",
            remedy="put the model's own file in its place",
        )
