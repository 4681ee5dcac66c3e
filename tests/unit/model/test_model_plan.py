"""Plans cover every layer exactly once, and whatever does not divide is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from checkpoints import CONFIG
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import ShardingError
from muster.model.config import text_config, whole
from muster.model.files import ModelFiles
from muster.model.plan import ShardPlan, Supports, plan
from muster.needs import even_split
from muster.spec import ShardingWish

BOTH = Supports(tensor=True, pipeline=True)
TENSOR = Supports(tensor=True, pipeline=False)
PIPELINE = Supports(tensor=False, pipeline=True)
NEITHER = Supports(tensor=False, pipeline=False)


def model(**changes: Any) -> ModelFiles:
    config = CONFIG | changes
    text = text_config(config)
    return ModelFiles(
        directory="m",
        config=config,
        model_type="qwen2",
        architectures=(),
        layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_size=whole(text, "head_dim"),
        intermediate=whole(text, "intermediate_size"),
        experts=None,
        vocabulary=text["vocab_size"],
        context_tokens=None,
        weights_bytes=0,
        tensors={},
    )


def refusal(
    files: ModelFiles, sharding: ShardingWish, ranks: int, found: Supports = BOTH, **more: Any
) -> ShardingError:
    with pytest.raises(ShardingError) as raised:
        plan(files, sharding, ranks, found, **more)
    assert raised.value.remedy
    return raised.value


@given(layers=st.integers(1, 300), ranks=st.integers(2, 64))
def test_an_even_pipeline_covers_every_layer_exactly_once(layers: int, ranks: int) -> None:
    files = model(num_hidden_layers=layers)
    if layers < ranks:
        assert f"num_hidden_layers is {layers}, fewer than {ranks} ranks" in str(refusal(files, "pipeline", ranks))
        return
    made = plan(files, "pipeline", ranks, BOTH)
    held = [layer for rank in range(ranks) for layer in made.layers_of(rank)]
    assert sorted(held) == list(range(layers))
    assert max(made.split) - min(made.split) <= 1
    assert made.layers_of(0).stop == layers, "rank 0 holds the last layers"
    assert made.layers_of(ranks - 1).start == 0
    assert msgspec.json.decode(msgspec.json.encode(made), type=ShardPlan) == made


@given(split=st.lists(st.integers(1, 40), min_size=2, max_size=12).map(tuple))
def test_a_chosen_split_covers_every_layer_exactly_once(split: tuple[int, ...]) -> None:
    made = plan(model(num_hidden_layers=sum(split)), "auto", len(split), BOTH, split=split)
    assert [len(made.layers_of(rank)) for rank in range(len(split))] == list(split)
    held = [layer for rank in reversed(range(len(split))) for layer in made.layers_of(rank)]
    assert held == list(range(sum(split)))


@given(
    split=st.lists(st.integers(-2, 6), min_size=1, max_size=5).map(tuple),
    ranks=st.integers(2, 4),
)
def test_a_split_that_does_not_cover_is_refused(split: tuple[int, ...], ranks: int) -> None:
    if len(split) == ranks and min(split) > 0 and sum(split) == 4:
        assert plan(model(), "pipeline", ranks, BOTH, split=split).split == split
    else:
        assert "the split" in str(refusal(model(), "pipeline", ranks, split=split))


def test_the_split_of_the_low_ranks_is_larger() -> None:
    assert even_split(5, 3) == (2, 2, 1)


def test_a_plan_that_loses_a_layer_cannot_be_made() -> None:
    for split in ((2, 1), (2, 3), (4, 0), (4,)):
        with pytest.raises(AssertionError):
            ShardPlan(sharding="pipeline", world_size=2, layers=4, split=split)


@pytest.mark.parametrize("sharding", ["auto", "tensor", "pipeline"])
def test_one_rank_is_never_sharded(sharding: ShardingWish) -> None:
    made = plan(model(), sharding, 1, NEITHER)
    assert (made.sharding, list(made.layers_of(0))) == ("none", [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("found", "ranks", "sharding"),
    [(BOTH, 2, "tensor"), (BOTH, 4, "tensor"), (BOTH, 3, "pipeline"), (PIPELINE, 2, "pipeline"), (TENSOR, 2, "tensor")],
)
def test_auto_takes_tensor_where_it_divides_and_a_pipeline_otherwise(
    found: Supports, ranks: int, sharding: str
) -> None:
    made = plan(model(), "auto", ranks, found)
    assert made.sharding == sharding
    if sharding == "tensor":
        assert all(made.layers_of(rank) == range(4) for rank in range(ranks))


def test_auto_gives_both_reasons() -> None:
    error = str(refusal(model(), "auto", 8, BOTH))
    assert "num_key_value_heads is 4, which does not divide by 8 ranks" in error
    assert "num_hidden_layers is 4, fewer than 8 ranks" in error
    assert "Use 4 ranks" in error


def test_the_remedy_names_what_works() -> None:
    error = refusal(model(num_attention_heads=14, num_key_value_heads=2, hidden_size=896), "tensor", 4)
    assert "num_attention_heads is 14, which does not divide by 4 ranks" in error.message
    assert error.remedy == "Use 2 ranks or --sharding pipeline."
    assert refusal(model(), "pipeline", 2, TENSOR).remedy == "Use 1 rank or --sharding tensor."
    assert refusal(model(), "auto", 2, NEITHER).remedy == "Use 1 rank."


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({"num_attention_heads": 9}, 2, "num_attention_heads is 9"),
        ({"num_key_value_heads": 1}, 2, "num_key_value_heads is 1"),
        ({"intermediate_size": 127}, 2, "intermediate_size is 127"),
        ({"moe_intermediate_size": 90}, 4, "moe_intermediate_size is 90"),
        ({"shared_expert_intermediate_size": 33}, 2, "shared_expert_intermediate_size is 33"),
        ({"linear_num_value_heads": 6}, 4, "linear_num_value_heads is 6"),
        ({"text_config": {"num_attention_heads": 6}}, 4, "num_attention_heads is 6"),
        ({"quantization": {"group_size": 64, "bits": 4}}, 4, "intermediate_size is 128, whose 32 on each rank"),
        ({"quantization": {"group_size": 64}, "intermediate_size": 512}, 4, "hidden_size is 64, whose 16 on each rank"),
        (
            {"quantization": {"group_size": 64}, "head_dim": 24},
            2,
            "num_attention_heads 8 x head size 24 is 192, whose 96",
        ),
        (
            {"quantization": {"group_size": 32, "model.layers.0.mlp.down_proj": {"group_size": 128}}},
            2,
            "no multiple of the quantisation's group_size 128",
        ),
    ],
)
def test_whatever_does_not_divide_is_named(changes: dict[str, Any], ranks: int, reason: str) -> None:
    assert reason in str(refusal(model(**changes), "tensor", ranks))


def test_the_vocabulary_counts_only_where_it_is_split() -> None:
    files = model(vocab_size=261)
    assert plan(files, "tensor", 2, BOTH).sharding == "tensor"
    split_head = Supports(tensor=True, pipeline=True, vocabulary=True)
    assert "vocab_size is 261" in str(refusal(files, "tensor", 2, split_head))


def test_kv_heads_do_not_count_with_latent_attention() -> None:
    assert plan(model(num_key_value_heads=3, kv_lora_rank=512), "tensor", 2, BOTH).sharding == "tensor"


def test_a_quantised_model_that_divides_is_accepted() -> None:
    assert plan(model(quantization={"group_size": 32, "bits": 4}), "tensor", 2, BOTH).sharding == "tensor"


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_are_refused(ranks: int) -> None:
    refusal(model(), "auto", ranks)
