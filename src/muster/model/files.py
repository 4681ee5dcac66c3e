"""Judges a model's directory from config.json and the headers of its safetensors files; reads no weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from muster.errors import ModelError
from muster.model.headers import TensorInfo, read_header_bytes, read_tensors
from muster.model.hub import commit_of

__all__ = ["ModelFiles", "TensorInfo", "fingerprint", "inspect", "sample", "weight_files"]

#: The only weights that mlx-lm reads. Source: the glob in mlx_lm.utils.load_model.
WEIGHTS_GLOB: Final = "model*.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
#: Beside the files of a copy of another node's directory: what it is a copy of, as `CopyNote` in JSON.
COPY_NOTE: Final = ".muster-copy"

#: At least one of these must exist, else the tokenizer encodes every prompt to nothing.
TOKENIZER_GLOBS: Final = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.*")

#: Every small file that changes what a rank computes; all of their bytes enter the fingerprint.
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

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NAMES_SHOWN: Final = 3


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
    _model_type(str(path), config)
    if (code := config.get("model_file")) is not None:
        raise ModelError(
            f"the model in {path} wants its own code {code!r} to run (model_file in config.json)",
            remedy="use a model whose architecture is part of mlx-lm; muster never runs a model's code",
        )
    if not any(file.is_file() for pattern in TOKENIZER_GLOBS for file in path.glob(pattern)):
        raise ModelError(
            f"{path} has no tokenizer (tokenizer.json or tokenizer.model)",
            remedy="copy the tokenizer's files beside config.json",
        )
    indexed = read_index(path)
    found = describe(str(path), config, _all_tensors(path, indexed, needed))
    return found if found.layers else msgspec.structs.replace(found, layers=_layers_named(indexed))


def describe(directory: str, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> ModelFiles:
    """What config.json and headers say together, wherever they were read.

    Raises:
        ModelError: a value of the config is of another kind than it must be.
    """
    text = text_config(config)
    model_type = _model_type(directory, config)
    architectures = config.get("architectures") or ()
    if isinstance(architectures, str):
        architectures = (architectures,)
    heads = whole(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = whole(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return ModelFiles(
        directory=directory,
        config=config,
        model_type=model_type,
        architectures=tuple(str(name) for name in architectures),
        layers=layers if layers is not None else _layers_named(tensors),
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


def _model_type(directory: str, config: dict[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            f"config.json of {directory} has model_type {model_type!r}", remedy="use a model that mlx-lm can load"
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
        config: Any = json.loads((path / "config.json").read_bytes())
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
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"config.json has {name} {value!r}, expected a whole number", remedy="repair config.json")
        if value > 0:
            return value
    return None


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
        return msgspec.json.decode((path / COPY_NOTE).read_bytes(), type=CopyNote)
    except (OSError, msgspec.DecodeError):
        return None


def _all_tensors(path: Path, indexed: dict[str, str], needed: Collection[str] | None) -> dict[str, TensorInfo]:
    files = sorted(path.glob(WEIGHTS_GLOB))
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
        index = json.loads(file.read_bytes())["weight_map"]
        return {str(name): str(where) for name, where in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{INDEX_NAME} of {path} cannot be read: {error!r}", remedy="download or copy the file again"
        ) from error


def _layers_named(tensors: Iterable[str]) -> int:
    numbers = (int(match.group(1)) for name in tensors if (match := _LAYER.search(name)))
    return max(numbers, default=-1) + 1


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


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
            _feed(digest, _bytes_of(path / name))
        return digest.hexdigest()
    note = copy_note(path)
    if note is not None and not all((path / name).is_file() for name in note.weights):
        return note.identity
    return sample(path)


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
    try:
        for file in sorted(small):
            _feed(digest, file.name.encode())
            _feed(digest, file.read_bytes())
        for file in sorted(path.glob(WEIGHTS_GLOB)):
            if weights is not None and file.name not in weights:
                continue
            _feed(digest, file.name.encode())
            _feed(digest, read_header_bytes(file))
            _feed_samples(digest, file)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(
        f"{error.filename or path} cannot be read: {error.strerror}", remedy="check the file's permissions"
    )


def _feed_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    _feed(digest, str(size).encode())
    with file.open("rb") as stream:
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
