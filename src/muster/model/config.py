"""Reads config.json, which anybody may have written: a value is of the kind that it must be, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from muster.errors import ModelError
from muster.model.reading import MOST, parse_json, read_small, shown

_TYPE_CHARACTERS: Final = 200  #: of a model_type
#: A class in a module that lies beside the file that names it.
_CLASS: Final = re.compile(r"(\w{1,200})\.\w+")


def architecture_names(config: dict[str, Any]) -> tuple[str, ...]:
    """What `config` gives as `architectures`: one name, several or none.

    Raises:
        ModelError: it is something else.
    """
    names: Any = config.get("architectures") or ()
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):  # pyright: ignore[reportUnknownVariableType]
        raise ModelError(
            f"config.json has architectures {shown(names)}, expected a list of names", remedy="repair config.json"
        )
    return tuple(cast("Sequence[str]", names))


def model_type_of(directory: str, config: dict[str, Any]) -> str:
    """What `config` gives as `model_type`.

    Raises:
        ModelError: it gives none, or what cannot be a name.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not 1 <= len(model_type) <= _TYPE_CHARACTERS or not model_type.isprintable():
        raise ModelError(
            f"config.json of {directory} has model_type {shown(model_type)}", remedy="use a model that mlx-lm can load"
        )
    return model_type


def read_config(path: Path) -> dict[str, Any]:
    """config.json of the model in `path`.

    Raises:
        ModelError: it is missing or no JSON object.
    """
    if not path.is_dir():
        raise ModelError(f"{path} is no directory", remedy="give the directory of the model")
    try:
        config: Any = parse_json(read_small(path / "config.json"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} has no config.json", remedy="give the directory that holds the model's files"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"config.json of {path} cannot be read: {error}", remedy="download or copy the file again"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"config.json of {path} holds no JSON object", remedy="download or copy the file again")
    return cast("dict[str, Any]", config)


def tokenizer_code(path: Path) -> tuple[str, ...]:
    """The Python files beside the tokenizer's in `path` that its settings want to run (auto_map); often none."""
    try:
        settings: Any = parse_json(read_small(path / "tokenizer_config.json"))
        entries: Any = settings["auto_map"]["AutoTokenizer"]
    except (OSError, ValueError, ModelError, KeyError, TypeError):
        return ()
    # One class, or two of which the second is the fast one; "OWNER/NAME--" before it would be another repository's.
    named = (entries,) if isinstance(entries, str) else entries if isinstance(entries, list) else ()
    found = (_CLASS.fullmatch(entry) for entry in cast("Sequence[object]", named) if isinstance(entry, str))
    return tuple(dict.fromkeys(f"{match.group(1)}.py" for match in found if match is not None))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the entries of its `text_config`, if it has one, laid over it."""
    inner = config.get("text_config")
    return {**config, **cast("dict[str, Any]", inner)} if isinstance(inner, dict) else config


def whole(config: dict[str, Any], *names: str) -> int | None:
    """The first of `names` that `config` gives as a positive whole number; a list (one per layer) is passed over.

    Raises:
        ModelError: a value is of another kind.
    """
    for name in names:
        value = config.get(name)
        if value is None or isinstance(value, list):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
            wanted = f"a number up to {MOST}" if type(value) is int and value > 0 else "a whole number"
            raise ModelError(f"config.json has {name} {shown(value)}, expected {wanted}", remedy="repair config.json")
        if value > 0:
            return value
    return None
