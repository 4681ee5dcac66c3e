"""Loading in this process: what is refused, and that nothing is ever invented. No group is formed here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny_models import LLAMA, QWEN2, QWEN3_MOE, make_model

from muster.bench.families import config_of
from muster.errors import ModelError, ShardingError
from muster.model.files import inspect
from muster.model.load import LoadedModel, load_shard
from muster.model.plan import ShardPlan, Supports, plan, supports

pytestmark = pytest.mark.mlx


class FakeGroup:
    """What sharding asks of a group. No collective operation works on it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def load_as(path: Path, shards: ShardPlan, rank: int) -> LoadedModel:
    group = cast("Any", FakeGroup(rank, shards.world_size)) if shards.world_size > 1 else None
    return load_shard(path, shards, rank, group, on_layer=lambda done, total: None)


def whole_plan(path: Path) -> ShardPlan:
    return plan(inspect(path), "auto", 1, Supports(tensor=False, pipeline=False))


def alone(path: Path) -> LoadedModel:
    return load_as(path, whole_plan(path), 0)


def rewrite(path: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    file = str(path / "model.safetensors")
    weights: Any = mx.load(file)
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(file, weights)


def test_one_rank_loads_everything(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", LLAMA)
    loaded = alone(path)
    assert loaded.bytes == pytest.approx(inspect(path).weights_bytes, rel=0.05)
    assert (loaded.context_tokens, loaded.vocabulary) == (128, 260)
    assert loaded.tokenizer.eos_token_ids == {256}


def test_missing_weights_are_named_and_counted(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", LLAMA)

    def drop(weights: dict[str, mx.array]) -> None:
        for name in [name for name in weights if ".1.self_attn" in name]:
            del weights[name]

    rewrite(path, drop)
    with pytest.raises(ModelError, match=r"4 weights are missing: model\.layers\.1\.self_attn\.k_proj.* and 1 more"):
        alone(path)


def test_foreign_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", LLAMA)

    def change(weights: dict[str, mx.array]) -> None:
        weights["model.layers.9.mlp.up_proj.weight"] = mx.zeros((2, 2))
        weights["model.norm.weight"] = mx.zeros((32,))

    rewrite(path, change)
    with pytest.raises(ModelError) as raised:
        alone(path)
    assert "1 weights are unknown to the architecture: model.layers.9.mlp.up_proj.weight" in str(raised.value)
    assert "1 weights are of the wrong shape: model.norm.weight [32] instead of [64]" in str(raised.value)


def test_an_expert_that_is_missing_is_a_model_error(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", QWEN3_MOE)

    def unstack(weights: dict[str, mx.array]) -> None:  # as the architecture's first publisher stores experts
        for name in [name for name in weights if ".switch_mlp." in name]:
            stacked = weights.pop(name)
            for expert in range(3):  # of 4
                weights[name.replace("switch_mlp", f"experts.{expert}")] = stacked[expert]

    rewrite(path, unstack)
    with pytest.raises(ModelError, match="mlx-lm cannot load the model"):
        alone(path)


def test_an_unknown_architecture_is_a_model_error(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", LLAMA)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "abacus"}))
    with pytest.raises(ModelError, match="model type 'abacus'"):
        supports(inspect(path))
    with pytest.raises(ModelError, match="abacus"):
        alone(path)


def test_a_broken_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", LLAMA)
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"):
        alone(path)


@pytest.mark.parametrize(("trusted", "remedy"), [(False, "--trust-remote-code"), (True, "copy the tokenizer's files")])
def test_a_tokenizer_with_code_of_its_own_names_what_lets_it_run(tmp_path: Path, trusted: bool, remedy: str) -> None:
    path = make_model(tmp_path / "m", LLAMA)
    (path / "tokenizer.json").write_text("{")
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="tokenizer") as raised:
        load_shard(path, whole_plan(path), 0, None, on_layer=lambda done, total: None, trust_remote_code=trusted)
    assert remedy in raised.value.remedy
    assert ("tokenization_own.py" in raised.value.remedy) is not trusted


@pytest.mark.parametrize(("config", "tensor", "pipeline"), [(QWEN2, True, True), (LLAMA, True, False)])
def test_supports_asks_mlx_lm(tmp_path: Path, config: dict[str, Any], tensor: bool, pipeline: bool) -> None:
    found = supports(inspect(make_model(tmp_path / "m", config)))
    assert found == Supports(tensor=tensor, pipeline=pipeline)


def test_an_uneven_division_that_mlx_lm_accepts_is_refused(tmp_path: Path) -> None:
    """3 KV heads of size 16 are 48 rows: mlx-lm gives each of 2 ranks 24 rows and 1 head, and wrong tokens."""
    path = make_model(tmp_path / "m", LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16})
    shards = ShardPlan(sharding="tensor", world_size=2, layers=5, split=(5, 5))
    with pytest.raises(ShardingError, match=r"n_kv_heads is 3 whole and 1 on a rank"):
        load_as(path, shards, 0)


def test_a_pipeline_that_differs_from_the_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models.qwen2 import Qwen2Model

    def pipeline(self: Any, group: Any) -> None:
        self.start_idx, self.end_idx = 0, 3
        self.layers = self.layers[:3]

    monkeypatch.setattr(Qwen2Model, "pipeline", pipeline)
    path = make_model(tmp_path / "m", QWEN2)
    shards = ShardPlan(sharding="pipeline", world_size=2, layers=5, split=(3, 2))
    with pytest.raises(ShardingError, match="gives rank 0 the layers 0 to 2, the plan says 2 to 4"):
        load_as(path, shards, 0)


def test_weights_cut_short_after_the_check_are_a_model_error(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", LLAMA)
    shards = plan(inspect(path), "auto", 1, Supports(tensor=False, pipeline=False))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError):
        load_as(path, shards, 0)


def test_every_slice_of_a_tensor_shard_adds_up_to_the_whole(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", LLAMA)
    shards = ShardPlan(sharding="tensor", world_size=4, layers=5, split=(5,) * 4)
    whole = alone(path).model.model.layers[0].self_attn
    parts = [load_as(path, shards, rank).model.model.layers[0].self_attn for rank in range(4)]
    assert mx.array_equal(mx.concatenate([part.q_proj.weight for part in parts]), whole.q_proj.weight)
    assert mx.array_equal(mx.concatenate([part.o_proj.weight for part in parts], axis=-1), whole.o_proj.weight)


def test_a_slice_does_not_keep_what_it_was_cut_from_in_memory(tmp_path: Path) -> None:
    """mlx-lm cuts DeepSeek's latent projections as views of the whole."""
    path = make_model(tmp_path / "m", config_of("deepseek_v3", num_hidden_layers=2, vocab_size=260))
    loaded = load_as(path, plan(inspect(path), "tensor", 2, Supports(tensor=True, pipeline=False)), 1)
    weights: Any = tree_flatten(loaded.model.parameters())
    kept = sum(weight.nbytes for _, weight in weights)
    latent = sum(weight.nbytes for name, weight in weights if "embed_q" in name or "unembed_out" in name)
    assert latent > 500_000
    assert loaded.bytes < kept + latent // 4
