"""Judges a model's directory from config.json and the headers of its safetensors files; reads no weights."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import msgspec

from muster.errors import ModelError
from muster.model.config import architecture_names, model_type_of, read_config, text_config, whole
from muster.model.headers import TensorInfo, read_header_bytes, read_tensors
from muster.model.hub import ALLOW_PATTERNS, commit_of
from muster.model.reading import is_text, open_regular, parse_json, read_small, shown, shown_name, too_long

__all__ = ["ModelFiles", "TensorInfo", "code_fingerprint", "fingerprint", "inspect", "sample", "weight_files"]

#: The only weights that mlx-lm reads. Source: the glob in mlx_lm.utils.load_model.
WEIGHTS_GLOB: Final = "model*.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
#: Beside the files of a copy of another node's directory: what it is a copy of, as `CopyNote` in JSON.
COPY_NOTE: Final = ".muster-copy"

#: At least one of these must exist, else the tokenizer encodes every prompt to nothing.
TOKENIZER_GLOBS: Final = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.*")

#: Every small file that changes what a rank computes; all of their bytes enter the fingerprint, where the file is one
#: that nodes give to each other: a copy has no others.
_FINGERPRINT_GLOBS: Final = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tiktoken.model",
    "*.tiktoken",
    "*.jinja",
    "chat_template*",
)

_WHOLE_FILE_BYTES: Final = 16 * 1024 * 1024  #: weights up to this size enter the fingerprint whole
_SAMPLES: Final = 64  #: blocks of a larger file, first and last included
_SAMPLE_BYTES: Final = 64 * 1024

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NAMES_SHOWN: Final = 3
#: More than any model has: each is worked on by itself.
_MOST_LAYERS: Final = 10_000
_MOST_LAYER_DIGITS: Final = 9
_NAME_CHARACTERS: Final = 500  #: of a tensor in the index
_FILE_NAME_BYTES: Final = 255
_SMALL_FILE_BYTES: Final = 1024 * 1024 * 1024  #: of a tokenizer and its like, which enter the fingerprint whole
_NOTE_BYTES: Final = 4 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024


class CopyNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory was copied from: the model's name, its fingerprint there, and the names of all its weights."""

    model: str
    identity: str
    weights: tuple[str, ...]


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say. `None` where config.json does not say it, or says it layer by layer.

    `config` is config.json as it stands; the other fields look into its `text_config` first. `layers` is 0 where
    neither config nor tensor names tell. `weights_bytes` counts the tensors, not the headers.
    """

    directory: str
    config: dict[str, Any]
    model_type: str
    architectures: tuple[str, ...]
    layers: int
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    head_size: int | None
    intermediate: int | None
    experts: int | None
    vocabulary: int | None
    context_tokens: int | None
    weights_bytes: int
    tensors: dict[str, TensorInfo]

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of `config` that describes the language model."""
        return text_config(self.config)


def inspect(path: Path, needed: Collection[str] | None = None) -> ModelFiles:
    """Read config.json and the safetensors headers of the model in `path`, and check that they fit together.

    `needed` are the weight files that must be here, where not all of them must: `tensors` and `weights_bytes` are then
    of those that are. With none needed it judges by config.json and the index alone.

    Raises:
        ModelError: a file is missing, truncated or malformed, or the model brings code of its own.
    """
    config = read_config(path)
    model_type_of(str(path), config)
    if (code := config.get("model_file")) is not None:
        raise ModelError(
            f"the model in {path} wants its own code {shown(code)} to run (model_file in config.json)",
            remedy="use a model whose architecture is part of mlx-lm; muster never runs a model's code",
        )
    if not any(file.is_file() for pattern in TOKENIZER_GLOBS for file in path.glob(pattern)):
        raise ModelError(
            f"{path} has no tokenizer (tokenizer.json or tokenizer.model)",
            remedy="copy the tokenizer's files beside config.json",
        )
    indexed = read_index(path)
    found = describe(str(path), config, _all_tensors(path, indexed, needed))
    return found if found.layers else msgspec.structs.replace(found, layers=_layers_named(str(path), indexed))


def describe(directory: str, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> ModelFiles:
    """What config.json and headers say together, wherever they were read.

    Raises:
        ModelError: a value of the config is of another kind than it must be.
    """
    text = text_config(config)
    model_type = model_type_of(directory, config)
    heads = whole(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = whole(text, *_LAYERS)
    for name in _LAYERS:  # mlx-lm may go by another one than the first
        _check_layers(directory, f"{name} in config.json", whole(text, name) or 0)
    return ModelFiles(
        directory=directory,
        config=config,
        model_type=model_type,
        architectures=architecture_names(config),
        layers=layers if layers is not None else _layers_named(directory, tensors),
        hidden_size=whole(text, "hidden_size", "n_embd", "d_model", "dim"),
        heads=heads,
        kv_heads=whole(text, "num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads,
        head_size=whole(text, "head_dim"),
        intermediate=whole(text, "intermediate_size", "n_inner", "ffn_dim"),
        experts=whole(text, "num_experts", "num_local_experts", "n_routed_experts"),
        vocabulary=whole(text, "vocab_size"),
        context_tokens=whole(text, "max_position_embeddings", "n_positions", "max_seq_len"),
        weights_bytes=sum(tensor.bytes for tensor in tensors.values()),
        tensors=tensors,
    )


def weight_files(path: Path) -> frozenset[str]:
    """The names of all weight files of the model in `path`, here or not: what the index names, or what there is.

    Raises:
        ModelError: the index cannot be read.
    """
    if note := copy_note(path):
        return frozenset(note.weights)
    return frozenset(read_index(path).values()) or frozenset(file.name for file in path.glob(WEIGHTS_GLOB))


def copy_note(path: Path) -> CopyNote | None:
    """What the directory is a copy of, where muster copied it from another node."""
    try:
        return msgspec.json.decode(read_small(path / COPY_NOTE, _NOTE_BYTES), type=CopyNote)
    except (OSError, ModelError, msgspec.DecodeError):
        return None


def _all_tensors(path: Path, indexed: dict[str, str], needed: Collection[str] | None) -> dict[str, TensorInfo]:
    files = sorted(path.glob(WEIGHTS_GLOB))
    for file in files:
        if not is_text(file.name):
            raise ModelError(
                f"{path} has a weight file {shown_name(file.name)}, whose name is no UTF-8",
                remedy="rename or remove it",
            )
    wanted = set(indexed.values()) if needed is None else set(needed)
    missing = sorted(file for file in wanted if not (path / file).is_file())
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} weight files that {INDEX_NAME} names: {_some(missing)}",
            remedy="download or copy the missing files",
        )
    if not files and needed is None:
        others = sorted(file.name for file in path.glob("*.safetensors"))
        if others:
            raise ModelError(
                f"{path} has {_some(others)}, but mlx-lm reads only {WEIGHTS_GLOB}",
                remedy="rename the files to match, or convert the model with mlx_lm.convert",
            )
        raise ModelError(
            f"{path} has no safetensors files", remedy="download the weights, or convert them with mlx_lm.convert"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_tensors(file).items():
            if (twin := tensors.get(name)) is not None:
                raise ModelError(
                    f"tensor {name} is in both {twin.file} and {info.file}",
                    remedy="remove the files that do not belong to this model",
                )
            tensors[name] = info
    absent = sorted(name for name, file in indexed.items() if file in wanted and name not in tensors)
    if absent:
        raise ModelError(
            f"{len(absent)} tensors that {INDEX_NAME} names are in no weight file: {_some(absent)}",
            remedy="download or copy the weight files again",
        )
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name, empty without an index."""
    file = path / INDEX_NAME
    if not file.is_file():
        return {}
    try:
        index: dict[object, object] = parse_json(read_small(file))["weight_map"]
        return {_indexed(name, _NAME_CHARACTERS): _indexed(where, _FILE_NAME_BYTES) for name, where in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{INDEX_NAME} of {path} cannot be read: {shown(error)}", remedy="download or copy the file again"
        ) from error


def _indexed(name: object, most: int) -> str:
    """The name of a tensor or file as the index has it."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name.encode()) <= most:
        raise ValueError(f"{shown(name)} is no name of a tensor or file")
    return name


def _layers_named(directory: str, tensors: Iterable[str]) -> int:
    last, found = -1, ""
    for name in tensors:
        if (match := _LAYER.search(name)) is not None:
            digits = match.group(1)
            number = int(digits) if len(digits) <= _MOST_LAYER_DIGITS else _MOST_LAYERS
            last, found = max((last, found), (number, name))
    _check_layers(directory, f"the layer of the tensor {shown_name(found)}", last + 1)
    return last + 1


def _check_layers(directory: str, field: str, layers: int) -> None:
    if layers > _MOST_LAYERS:
        raise ModelError(
            f"the model in {directory} has too many layers: {field} is {layers}, expected at most {_MOST_LAYERS}",
            remedy="repair config.json or the names of the tensors, or download the model again",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(shown_name(name) for name in names[:_NAMES_SHOWN]) + more


def fingerprint(path: Path) -> str:
    """SHA-256, in hex, that two nodes compare to know that they hold the same model, each of them perhaps a part of it.

    A snapshot of the hub is known by its commit, which stands for the content of all its files: each was checked by its
    hash when it came. A copy of another node's directory that is not whole is what it was copied from. Every
    other directory is known by `sample` of all its files.

    Raises:
        ModelError: a file cannot be read.
    """
    if (known := commit_of(path)) is not None:
        digest = hashlib.sha256()
        for part in known:
            _feed(digest, part.encode())
        # Somebody may have edited these; the others are links to files that are named by their hash.
        for name in ("config.json", "tokenizer.json"):
            _feed_file(digest, path / name)
        return digest.hexdigest()
    note = copy_note(path)
    if note is not None and not all((path / name).is_file() for name in note.weights):
        return note.identity
    return sample(path)


def code_fingerprint(path: Path) -> str:
    """SHA-256, in hex, over the Python files in `path`, which may run with the tokenizer.

    Empty for a snapshot of the hub, whose commit stands for them, and where there are none.

    Raises:
        ModelError: a file cannot be read.
    """
    here = path.glob("*.py") if commit_of(path) is None else ()
    found = sorted(file for file in here if file.is_file() and not file.name.startswith("."))
    digest = hashlib.sha256()
    for file in found:
        _feed(digest, os.fsencode(file.name))
        _feed_file(digest, file)
    return digest.hexdigest() if found else ""


def sample(path: Path, weights: Collection[str] | None = None) -> str:
    """SHA-256, in hex, over the model's files in `path`, of the weights only those named where some are.

    Takes in whole: config, generation settings, tokenizer, chat template, every safetensors header and file size,
    and every weight file of at most 16 MB. Of a larger weight file it takes 64 evenly spaced blocks of 64 KB, so
    that a 100 GB model costs milliseconds: a difference of equal size that lies between those blocks only (a few
    flipped bytes) is not found. Another quantisation, training step or a file cut and refilled is. Names count,
    paths do not.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256()
    small = {file for pattern in _FINGERPRINT_GLOBS for file in path.glob(pattern) if file.is_file()}
    small = {file for file in small if any(fnmatchcase(file.name, pattern) for pattern in ALLOW_PATTERNS)}
    small = {file for file in small if not file.name.startswith(".")}  # macOS's own, which are never copied
    try:
        for file in sorted(small):
            _feed(digest, os.fsencode(file.name))
            _feed_file(digest, file)
        for file in sorted(path.glob(WEIGHTS_GLOB)):
            if weights is not None and file.name not in weights:
                continue
            _feed(digest, os.fsencode(file.name))
            _feed(digest, read_header_bytes(file))
            _feed_samples(digest, file)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def _feed_file(digest: hashlib._Hash, file: Path) -> None:
    """Feed the whole file, as `_feed` does, but never holds all of it; one that is missing is empty."""
    try:
        with open_regular(file) as stream:
            left = os.fstat(stream.fileno()).st_size
            if left > _SMALL_FILE_BYTES:
                raise too_long(file.name, _SMALL_FILE_BYTES)
            digest.update(left.to_bytes(8, "little"))
            while left and (part := stream.read(min(left, _READ_BYTES))):
                digest.update(part)
                left -= len(part)
    except FileNotFoundError:
        _feed(digest, b"")
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(
        f"{shown_name(str(path))} cannot be read: {error.strerror}", remedy="check the file's permissions"
    )


def _feed_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    _feed(digest, str(size).encode())
    with open_regular(file) as stream:
        if size <= _WHOLE_FILE_BYTES:
            _feed(digest, stream.read())
            return
        last = size - _SAMPLE_BYTES
        for sample in range(_SAMPLES):
            stream.seek(last * sample // (_SAMPLES - 1))
            _feed(digest, stream.read(_SAMPLE_BYTES))


def _feed(digest: hashlib._Hash, part: bytes) -> None:
    # The length first: otherwise bytes could move from one part to the next unseen.
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
