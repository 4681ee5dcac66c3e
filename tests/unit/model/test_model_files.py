"""`inspect` says what is wrong with a model's directory; `fingerprint` finds models that differ."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import write_model, write_raw, write_weights

from muster.errors import ModelError
from muster.model import files as files_module
from muster.model.files import TensorInfo, fingerprint, inspect


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as raised:
        inspect(path)
    assert raised.value.remedy
    return raised.value


def test_inspect_reads_config_and_headers(model: Path) -> None:
    found = inspect(model)
    assert (found.model_type, found.architectures) == ("qwen2", ("Qwen2ForCausalLM",))
    assert (found.layers, found.hidden_size, found.heads, found.kv_heads) == (4, 64, 8, 4)
    assert (found.intermediate, found.vocabulary, found.context_tokens) == (128, 260, 128)
    assert (found.experts, found.head_size) == (None, None)
    assert found.tensors["model.layers.2.w"] == TensorInfo("F32", (2, 3), "model.safetensors", 24)
    assert found.weights_bytes == 4 * 24


def test_a_text_config_is_looked_into(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", num_hidden_layers=None, text_config={"num_hidden_layers": 7, "num_experts": 16})
    assert (inspect(path).layers, inspect(path).experts) == (7, 16)


def test_layers_are_counted_from_names_where_the_config_is_silent(tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path / "m", num_hidden_layers=None)).layers == 4


def test_kv_heads_default_to_heads(tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path / "m", num_key_value_heads=None)).kv_heads == 8


def test_a_truncated_file_is_named_with_expected_and_real_size(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-10])
    assert f"model.safetensors is truncated: expected {whole} bytes, found {whole - 10}" in refusal(model).message


@pytest.mark.parametrize("kept", [0, 5, 8, 40])
def test_a_file_cut_inside_its_header_is_truncated(model: Path, kept: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"found {kept}" in refusal(model).message


BREAKAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no config", lambda m: (m / "config.json").unlink(), "has no config.json"),
    ("bad config", lambda m: (m / "config.json").write_text("{"), "config.json of .* cannot be read"),
    ("config is a list", lambda m: (m / "config.json").write_text("[]"), "holds no JSON object"),
    ("config is binary", lambda m: (m / "config.json").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    ("no model type", lambda m: write_model(m, model_type=None), "model_type None"),
    ("own code", lambda m: write_model(m, model_file="model.py"), "wants its own code 'model.py'"),
    ("a word for a number", lambda m: write_model(m, num_attention_heads="8"), "num_attention_heads '8'"),
    ("a negative number", lambda m: write_model(m, num_hidden_layers=-4), "num_hidden_layers -4"),
    ("no tokenizer", lambda m: (m / "tokenizer.json").unlink(), "has no tokenizer"),
    ("no weights", lambda m: (m / "model.safetensors").unlink(), "has no safetensors files"),
    (
        "weights of another name",
        lambda m: (m / "model.safetensors").rename(m / "weights.safetensors"),
        "mlx-lm reads only model",
    ),
    ("twins", lambda m: shutil.copy(m / "model.safetensors", m / "model-00001-of-00001.safetensors"), "is in both"),
    (
        "a file too few",
        lambda m: (m / "model.safetensors.index.json").write_text(
            json.dumps(
                {"weight_map": {"a": "model-00001-of-00002.safetensors", "model.layers.0.w": "model.safetensors"}}
            )
        ),
        "lacks 1 weight files .*model-00001-of-00002",
    ),
    (
        "a tensor too few",
        lambda m: (m / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"lm_head.weight": "model.safetensors"}})
        ),
        "1 tensors .*lm_head.weight",
    ),
    ("bad index", lambda m: (m / "model.safetensors.index.json").write_text("[]"), "cannot be read"),
    ("dangling link", lambda m: (m / "model-2.safetensors").symlink_to(m / "gone"), "cannot be read"),
    (
        "git lfs",
        lambda m: (m / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "Git LFS pointer",
    ),
    ("another kind of file", lambda m: (m / "model.safetensors").write_bytes(b"GGUF" * 40), "no safetensors file"),
]


@pytest.mark.parametrize(("change", "message"), [pytest.param(c, m, id=i) for i, c, m in BREAKAGES])
def test_what_is_broken_is_said(model: Path, change: Callable[[Path], object], message: str) -> None:
    change(model)
    with pytest.raises(ModelError, match=message) as raised:
        inspect(model)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        (b"not json", 0, "header that cannot be read"),
        (b"[1, 2]", 0, "header that cannot be read"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', 8, "header that cannot be read"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', 4, "takes 4 bytes, but F32"),
        (b'{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}', 8, "unknown dtype F99"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]}}', 8, "takes -4 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', 8, "begins at byte 4"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', 9, "5 bytes that belong to no tensor"),
    ],
)
def test_a_header_that_lies_is_refused(model: Path, header: bytes, data_bytes: int, message: str) -> None:
    write_raw(model / "model.safetensors", header, bytes(data_bytes))
    assert message in refusal(model).message


def test_fingerprint_depends_on_content_and_not_on_place(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    (copy / "README.md").write_text("notes")
    assert fingerprint(model) == fingerprint(copy)
    assert len(fingerprint(model)) == 64


CHANGES: list[Callable[[Path], object]] = [
    lambda m: write_model(m, rope_theta=5.0),
    lambda m: (m / "tokenizer.json").write_text("{ }"),
    lambda m: (m / "chat_template.jinja").write_text("x"),
    lambda m: (m / "generation_config.json").write_text("{}"),
    lambda m: write_weights(m / "model.safetensors", {f"model.layers.{n}.w": (2, 3) for n in range(4)}, fill=2),
    lambda m: write_weights(m / "model.safetensors", {f"model.layers.{n}.v": (2, 3) for n in range(4)}),
    lambda m: (m / "model.safetensors").rename(m / "model-1.safetensors"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_changes_with_every_file_that_counts(model: Path, change: Callable[[Path], object]) -> None:
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


def test_fingerprint_of_a_large_file_samples_it_from_end_to_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr(files_module, "_SAMPLE_BYTES", 200)
    file = model / "model.safetensors"
    write_weights(file, {"a": (10_000,)})
    whole, before = file.read_bytes(), fingerprint(model)
    for position in (-1, -40_000):  # the last byte and the first of the data, both inside a block
        changed = bytearray(whole)
        changed[position] ^= 255
        file.write_bytes(changed)
        assert fingerprint(model) != before
    changed = bytearray(whole)
    changed[len(whole) // 2 : len(whole) // 2 + 1000] = bytes(1000)
    file.write_bytes(changed)
    assert fingerprint(model) != before


def test_fingerprint_of_a_large_file_takes_in_its_whole_header(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr(files_module, "_SAMPLE_BYTES", 8)
    file = model / "model.safetensors"
    write_weights(file, {f"layer.{number}.weight": (2, 3) for number in range(200)})
    before = fingerprint(model)
    file.write_bytes(file.read_bytes().replace(b"layer.77.weight", b"layer.77.weighs"))
    assert fingerprint(model) != before


def test_judging_a_model_imports_neither_mlx_nor_mlx_lm() -> None:
    code = (
        "import sys; import muster.model.files, muster.model.plan, muster.model.hub; "
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'huggingface_hub', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"
