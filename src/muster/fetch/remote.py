"""What the hub says of a model without giving its weights: config.json and the headers of its safetensors files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from itertools import repeat
from typing import Any, Final, cast

from muster.errors import ModelError
from muster.fetch.hub import ANSWER_SECONDS, HubFile, Listing, endpoint, listing, offline, told
from muster.model.files import WEIGHTS_GLOB, ModelFiles, describe
from muster.model.headers import MAX_HEADER_BYTES, TensorInfo, parse_header
from muster.model.hub import is_offline
from muster.model.reading import MAX_JSON_BYTES, parse_json, too_long

#: Most headers are shorter, so that one request is enough for a file.
_FIRST_BYTES: Final = 128 * 1024
#: Files that are asked for at once.
_TOGETHER: Final = 16


def remote_files(model: str, revision: str | None) -> tuple[ModelFiles, str]:
    """The model as the hub describes it, and the commit. Blocks: a few requests, and one for each weight file.

    Raises:
        FetchError: the hub cannot be reached, or does not answer as it should.
        ModelError: there is no such model, not for this user, it must not be asked, or what is there is no model.
    """
    if is_offline():
        raise offline(model, revision)
    listed = listing(model, revision)
    weights = [file for file in listed.files if fnmatchcase(file.name, WEIGHTS_GLOB)]
    if not weights or not any(file.name == "config.json" for file in listed.files):
        missing = "safetensors files" if not weights else "config.json"
        raise ModelError(
            f"{model} on the hub has no {missing}",
            remedy="use a model that mlx-lm can load, or convert it with mlx_lm.convert",
        )
    config = _config(listed)
    with ThreadPoolExecutor(_TOGETHER, thread_name_prefix="headers") as pool:
        parts = list(pool.map(_tensors, repeat(listed), weights))
    tensors = {name: info for part in parts for name, info in part.items()}
    return describe(model, config, tensors), listed.commit


def _config(listed: Listing) -> dict[str, Any]:
    try:
        config: Any = parse_json(_get(listed, "config.json", 0, None))
    except ValueError as error:
        raise ModelError(
            f"config.json of {listed.model} on the hub cannot be read: {error}", remedy="use another model or revision"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"config.json of {listed.model} on the hub holds no JSON object", remedy="use another model")
    return cast("dict[str, Any]", config)


def _tensors(listed: Listing, file: HubFile) -> dict[str, TensorInfo]:
    begun = _get(listed, file.name, 0, _FIRST_BYTES)
    length = int.from_bytes(begun[:8], "little")
    if len(begun) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise ModelError(f"{file.name} of {listed.model} on the hub is no safetensors file", remedy="use another model")
    header = begun[8 : 8 + length]
    if len(header) < length:
        header += _get(listed, file.name, 8 + len(header), 8 + length)
    return parse_header(file.name, header)[0]


def _get(listed: Listing, name: str, begin: int, end: int | None) -> bytes:
    """Bytes `begin` to `end` of a file, all of it without an end; fewer where the file is shorter.

    Raises:
        ModelError: without an end: the file is longer than a config may be.
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if end is not None:
        headers["Range"] = f"bytes={begin}-{end - 1}"
    url = hf_hub_url(listed.model, name, revision=listed.commit, endpoint=endpoint())
    with (
        told(listed.model, listed.commit),
        get_session().stream("GET", url, headers=headers, timeout=ANSWER_SECONDS, follow_redirects=True) as response,
    ):
        hf_raise_for_status(response)
        # A server that knows no ranges sends everything from the beginning: only what is wanted is read of it.
        skipped = begin if end is not None and response.status_code != 206 else 0
        wanted = MAX_JSON_BYTES + 1 if end is None else skipped + end - begin
        received = bytearray()
        for chunk in response.iter_raw():
            received += chunk
            if len(received) >= wanted:
                break
    if end is None and len(received) > MAX_JSON_BYTES:
        raise too_long(name, MAX_JSON_BYTES)
    return bytes(received[skipped:wanted])
