"""What a coordinator was when it was last heard of: a small file beside its log."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from muster.coordinator.voting import Standing
from muster.errors import LogError

_NAME = "standing.json"

_decoder = msgspec.json.Decoder(Standing)


def load_standing(directory: Path) -> Standing:
    """What the file says; where there is none, that of a new coordinator, with a name of its own.

    Raises:
        LogError: the file is damaged, or cannot be read.
    """
    path = directory / _NAME
    try:
        standing = _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        standing = Standing(role="standby")
    except (OSError, msgspec.DecodeError) as error:
        raise LogError(
            f"{path} says which coordinator this is, and cannot be read: {error}",
            remedy="Restore it from a backup, or delete it; then make sure that no other coordinator is active.",
        ) from error
    return standing if standing.holder else msgspec.structs.replace(standing, holder=secrets.token_hex(8))


def save_standing(directory: Path, standing: Standing) -> None:
    """Write the file, so that it is there whole or as it was, whenever this process or the machine ends.

    Raises:
        LogError: it cannot be written.
    """
    write_durably(directory / _NAME, msgspec.json.encode(standing))


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file by one with this content, mode 0600.

    Raises:
        LogError: it cannot be written; it is as it was.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # the new name, too
        finally:
            os.close(directory)
    except OSError as error:
        raise LogError(
            f"{path} cannot be written: {error.strerror}",
            remedy=f"Check that there is room in {path.parent} and that this user may write to it.",
        ) from error
