"""A model's files may come from anybody: whatever they say is refused by name, at once, and without much memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import CONFIG, write_model, write_raw
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import ModelError
from muster.model.config import whole
from muster.model.files import INDEX_NAME, describe, fingerprint, inspect
from muster.model.headers import TensorInfo, parse_header
from muster.model.hub import directory_of, snapshot
from muster.model.needs import needs_of
from muster.model.reading import MOST, parse_json, read_small

#: A busy machine's; what is wrong takes minutes, or for ever.
SECONDS = 2.0
NINES = "9" * 4000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def little_memory() -> Generator[None]:
    """What takes 16 GB must fail here, and not take this machine's."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def header(entry: str) -> Callable[[Path], object]:
    return lambda m: write_raw(m / "model.safetensors", entry.encode(), b"")


def tensor(shape: str, name: str = "a", dtype: str = '"F32"', offsets: str = "[0,4]") -> Callable[[Path], object]:
    return header(f'{{"{name}":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}')


def config(**values: Any) -> Callable[[Path], object]:
    return lambda m: write_model(m, **values)


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda m: (m / name).write_text(content)


def replaced(name: str, by: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        (model / name).unlink()
        by(model / name)

    return change


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
SOME_DEEP = '{"model_type":"qwen2","a":' + "[" * 500 + "]" * 500 + "}"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shape of many long numbers": (tensor(f"[{','.join([NINES] * 400)}]"), r"model\.safetensors .*4000 digits"),
    "shape of many dimensions": (tensor(f"[{','.join(['9' * 15] * 400)}]"), r"shape of tensor a is .* at most 16"),
    "shape of large numbers": (tensor(f"[{10**60},{10**60}]"), r"shape of tensor a is \[1000000"),
    "large product": (tensor(f"[{2**50},{2**50}]"), r"tensor a has the shape \[1125899906842624"),
    "beyond Python's own limit": (tensor(f"[{'9' * 5000}]"), "5000 digits"),
    "shape of infinity": (tensor("[1e999]"), r"shape of tensor a is \[inf\]"),
    "shape is a number": (tensor("5"), "shape of tensor a is 5"),
    "offset of infinity": (tensor("[1]", offsets="[0,1e999]"), "data_offsets of tensor a"),
    "dtype is a map": (tensor("[1]", dtype="{}"), "unknown dtype {}"),
    "deep header": (header(DEEP), r"model\.safetensors has a header .*deep"),
    "long name of a tensor": (tensor("[1]", name=f"model.layers.{'9' * 5000}.x"), "no name of a tensor"),
    "half a pair in a name": (tensor("[1]", name="\\ud800"), "surrogates not allowed"),
    "deep config": (text("config.json", DEEP), "config.json of .* deep"),
    "rather deep config": (text("config.json", SOME_DEEP), "config.json of .* deep"),
    "many values": (text("config.json", "[" + "[]," * 8_000_000 + "1]"), "config.json of .* 16000001 values"),
    "number without end": (text("config.json", f'{{"vocab_size":{"9" * 5000}}}'), "config.json .*5000 digits"),
    "half a pair": (text("config.json", '{"model_type":"qwen2","a":"\\ud800"}'), "surrogates not allowed"),
    "deep index": (text(INDEX_NAME, DEEP), f"{INDEX_NAME} .*deep"),
    "index of numbers": (text(INDEX_NAME, '{"weight_map":{"a":5}}'), f"{INDEX_NAME} .*5 is no name"),
    "index of a long file name": (
        text(INDEX_NAME, f'{{"weight_map":{{"a":"{"x" * 300}"}}}}'),
        "is no name of a tensor",
    ),
    "many layers": (config(num_hidden_layers=10**9), "num_hidden_layers in config.json is 1000000000"),
    "many layers by another name": (config(n_layers=10**9), "n_layers in config.json is 1000000000"),
    "a distant layer": (
        lambda m: (
            config(num_hidden_layers=None)(m),
            tensor("[0]", name="model.layers.999999999.x", offsets="[0,0]")(m),
        ),
        r"model\.layers\.999999999\.x",
    ),
    "a layer of many digits": (
        lambda m: (
            config(num_hidden_layers=None)(m),
            tensor("[0]", name=f"model.layers.{'9' * 400}.x", offsets="[0,0]")(m),
        ),
        "too many layers",
    ),
    "groups that share little": (
        config(quantization={str(n): {"group_size": 2**40 + n} for n in range(2000)}),
        "group_size together is",
    ),
    "heads that are no number": (config(num_attention_heads=float("nan")), "num_attention_heads nan"),
    "architectures is a number": (config(architectures=5), "architectures 5"),
    "architectures of maps": (config(architectures=[{}]), r"architectures \[{}\]"),
    "long model type": (config(model_type="x" * 1_000_000), "model_type 'xxx"),
    "model type of another script": (config(model_type="\u00e9" * 200), "has no model type"),
    "code of its own, long": (config(model_file="x" * 1_000_000), "wants its own code 'xxx"),
    "config is a device": (replaced("config.json", lambda f: f.symlink_to("/dev/zero")), "config.json is no regular"),
    "config is a pipe": (replaced("config.json", os.mkfifo), "config.json is no regular"),
    "weights are a pipe": (replaced("model.safetensors", os.mkfifo), "no regular|safetensors"),
    "config without end": (lambda m: os.truncate(m / "config.json", 2**40), "config.json is longer than"),
    "index without end": (
        lambda m: ((m / INDEX_NAME).touch(), os.truncate(m / INDEX_NAME, 2**40)),
        f"{INDEX_NAME} is longer than",
    ),
    "weights of another encoding": (
        lambda m: (m / os.fsdecode(b"model-\xff.safetensors")).touch(),
        r"model-\\udcff\.safetensors, whose name is no UTF-8",
    ),
    "sizes that only multiply badly": (
        config(num_attention_heads=2**52, head_dim=2**52, num_key_value_heads=1),
        "expected at most",
    ),
}
SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "num_experts",
    "max_position_embeddings",
    "head_dim",
)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_model_is_refused_by_name(model: Path, case: str) -> None:
    change, message = HOSTILE[case]
    change(model)
    begun = time.perf_counter()
    with pytest.raises(ModelError, match=message) as raised:
        needs_of(inspect(model))
    assert time.perf_counter() - begun < SECONDS
    assert raised.value.remedy
    assert len(str(raised.value).encode()) < 1500, "a message that can be sent and read"


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [MOST + 1, 2**64, 10**90])
def test_a_size_that_no_model_has_is_refused(model: Path, name: str, size: int) -> None:
    write_model(model, **{name: size})
    with pytest.raises(ModelError, match=rf"config\.json has {name} {size}, expected a number up to"):
        inspect(model)


VALUES = st.sampled_from(
    [0, 1, 7, 2**20, 2**40, MOST, MOST + 1, -1, 10**90, 1.5, float("nan"), True, "8", [], [1], [{}], {}, {"a": 1}, ""]
)
NAMES = (
    *SIZES,
    *("num_hidden_layers", "architectures", "model_type", "text_config", "tie_word_embeddings", "quantization"),
    *("kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "sliding_window", "layer_types", "sliding_window_pattern"),
    *("compress_ratios", "kv_source_layer_ids", "linear_attn_config", "num_experts_per_tok", "state_size"),
    *("moe_intermediate_size", "linear_num_value_heads", "quantization_config", "model_max_length"),
)
LEAVES = ("k_proj", "v_proj", "q_proj", "o_proj", "kv_a_proj_with_mqa", "A_log", "g_norm", "conv1d", "wk", "dt_bias")
TENSORS = st.dictionaries(
    st.builds("model.layers.{}.{}.weight".format, st.integers(0, 3), st.sampled_from(LEAVES)),
    st.lists(st.sampled_from([0, 1, 8, 2**20, 2**50]), max_size=3).map(
        lambda shape: TensorInfo("F32", tuple(shape), "model.safetensors", 4)
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5),
    kind=st.sampled_from(["qwen2", "deepseek_v3", "mamba2", "gpt_oss", "qwen3_next", "kimi_linear", "deepseek_v41"]),
    tensors=TENSORS,
)
def test_whatever_a_config_says_the_needs_can_be_sent_or_are_refused(
    changes: dict[str, Any], kind: str, tensors: dict[str, TensorInfo]
) -> None:
    try:
        needs = needs_of(describe("m", CONFIG | {"model_type": kind} | changes, tensors))
    except ModelError as error:
        assert error.remedy
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(needs), type=type(needs)) == needs


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,\\ud80019eE-.+nullNaIfity', max_size=40).map(str.encode))
def test_bytes_are_json_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        json.dumps(parse_json(data), ensure_ascii=False).encode()
    with contextlib.suppress(ModelError):
        parse_header("a", data)


def test_what_models_do_have_is_still_read() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": [1e999, 1000000000000000019884624838656, "\\ud83d\\ude00"]}')
    assert whole({"max_position_embeddings": MOST}, "max_position_embeddings") == MOST


def test_a_small_file_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_small(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ModelError, match="a is longer than 4 bytes"):
        read_small(tmp_path / "a", 4)
    assert read_small(Path("/proc/self/stat")), "a file that says that it is empty"


def test_names_of_any_bytes_have_a_fingerprint(model: Path) -> None:
    before = fingerprint(model)
    (model / os.fsdecode(b"tokenizer-\xff.txt")).write_text("x")
    assert fingerprint(model) != before


def test_a_tokenizer_without_end_is_refused(model: Path) -> None:
    os.truncate(model / "tokenizer.json", 2**40)
    with pytest.raises(ModelError, match=r"tokenizer\.json is longer"):
        fingerprint(model)


@pytest.mark.parametrize("name", ["~nobodyx", "~nobodyx/m", "x" * 5000, "/" + "x/" * 5000])
def test_a_name_that_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="is no path that this node can look at") as raised:
        directory_of(name)
    assert len(str(raised.value)) < 500


def test_a_directory_of_another_encoding_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / os.fsdecode(b"m\xff"))
    with pytest.raises(ModelError, match="no UTF-8") as raised:
        directory_of(str(path))
    assert str(raised.value).encode()


def test_a_branch_that_is_a_device_is_none(tmp_path: Path) -> None:
    assert snapshot(tmp_path, "owner/name", "/dev/zero") is None
    assert snapshot(tmp_path, "owner/" + "x" * 500, "a" * 40) is None
