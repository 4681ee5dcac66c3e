"""Memory of ranks: what is divided, what is whole, and that nothing is lost or counted twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from muster.needs import (
    LayerNeeds,
    ModelNeeds,
    SharedSize,
    against_pipeline,
    against_tensor,
    even_split,
    layers_of,
    on_cpu,
    split_fault,
)
from muster.predict import (
    PREFILL_SEQUENCES,
    layer_cache,
    outside_weights,
    rank_cache,
    rank_memory,
    rank_weights,
    workspace,
)

layers = st.builds(
    LayerNeeds,
    weights_bytes=st.integers(1000, 10**9),
    tensor_bytes=st.integers(0, 1000),
    kv_token_bytes=st.integers(0, 10**5),
    kv_divides=st.booleans(),
    window=st.sampled_from([0, 128, 4096]),
    state_bytes=st.integers(0, 10**6),
    kv_whole_bytes=st.integers(0, 1000),
)
models = st.builds(
    ModelNeeds,
    model=st.just("m"),
    model_type=st.just("t"),
    layers=st.lists(layers, min_size=2, max_size=6).map(tuple),
    outside_bytes=st.integers(3000, 10**6),
    embedding_bytes=st.integers(0, 1000),
    head_bytes=st.integers(0, 1000),
    tied=st.booleans(),
)


@settings(max_examples=40)
@given(needs=models, ranks=st.integers(2, 6))
def test_a_pipeline_holds_everything_once_but_the_embedding_of_a_tied_head(needs: ModelNeeds, ranks: int) -> None:
    ranks = min(ranks, len(needs.layers))
    split = even_split(len(needs.layers), ranks)
    held = [rank_weights(needs, "pipeline", ranks, layers_of(split, rank)) for rank in range(ranks)]
    rest = needs.outside_bytes - needs.embedding_bytes - needs.head_bytes
    again = (ranks - 1) * rest + (needs.embedding_bytes if needs.tied else 0)
    assert sum(held) == needs.weights_bytes + again
    caches = [rank_cache(needs, "pipeline", ranks, layers_of(split, rank), 1000, 3) for rank in range(ranks)]
    assert sum(caches) == rank_cache(needs, "none", 1, range(len(needs.layers)), 1000, 3)


@settings(max_examples=40)
@given(needs=models, ranks=st.sampled_from([2, 4, 8]))
def test_tensor_sharding_never_takes_more_than_one_rank_nor_less_than_a_part(needs: ModelNeeds, ranks: int) -> None:
    every = range(len(needs.layers))
    for one, part in (
        (rank_weights(needs, "none", 1, every), rank_weights(needs, "tensor", ranks, every)),
        (rank_cache(needs, "none", 1, every, 5000, 2), rank_cache(needs, "tensor", ranks, every, 5000, 2)),
    ):
        assert one / ranks <= part <= one


@settings(max_examples=40)
@given(needs=models, tokens=st.integers(1, 20000), more=st.integers(0, 20000), sequences=st.integers(1, 64))
def test_a_longer_context_never_takes_less(needs: ModelNeeds, tokens: int, more: int, sequences: int) -> None:
    every = range(len(needs.layers))
    assert rank_cache(needs, "none", 1, every, tokens, sequences) <= rank_cache(
        needs, "none", 1, every, tokens + more, sequences
    )


def test_a_cache_grows_in_steps_and_a_window_ends_it() -> None:
    layer = LayerNeeds(weights_bytes=1, kv_token_bytes=10)
    assert [layer_cache(layer, tokens, 1) for tokens in (1, 256, 257)] == [2560, 2560, 5120]
    windowed = LayerNeeds(weights_bytes=1, kv_token_bytes=10, window=128, state_bytes=7, kv_whole_bytes=1)
    assert layer_cache(windowed, 10**6, 2) == (1280 + 7 + 128) * 2
    assert layer_cache(windowed, 10**6, 2, ranks=2) == (644 + 128) * 2


def test_only_the_ends_of_a_pipeline_hold_embedding_and_head() -> None:
    needs = ModelNeeds(
        model="m", model_type="t", layers=(), outside_bytes=111, embedding_bytes=100, head_bytes=10, tied=False
    )
    ends = [(True, True), (True, False), (False, True), (False, False)]
    assert [outside_weights(needs, first=first, last=last) for first, last in ends] == [111, 101, 11, 1]


def test_a_model_that_cannot_be_batched_counts_one_sequence() -> None:
    layer = LayerNeeds(weights_bytes=10, kv_token_bytes=10)
    batched = ModelNeeds(model="m", model_type="t", layers=(layer,), outside_bytes=0)
    solo = ModelNeeds(model="m", model_type="t", layers=(layer,), outside_bytes=0, solo=True)
    caches = [
        rank_memory(one, "none", 1, range(1), context_tokens=256, sequences=8, prefill_chunk_tokens=64).cache
        for one in (batched, solo)
    ]
    assert caches == [8 * 2560, 2560]


def test_reasons_name_the_size_and_what_is_wrong_with_it() -> None:
    needs = ModelNeeds(
        model="m",
        model_type="t",
        layers=(LayerNeeds(weights_bytes=1),) * 4,
        outside_bytes=0,
        tensor=True,
        pipeline=True,
        even_pipeline=True,
        shared_sizes=(SharedSize("num_key_value_heads", 6), SharedSize("intermediate_size", 192, grouped=True)),
        group_size=64,
    )
    assert against_tensor(needs, 3) == ""
    assert against_tensor(needs, 4) == "num_key_value_heads is 6, which does not divide by 4 ranks"
    assert "intermediate_size is 192, whose 96 on each rank is no multiple" in against_tensor(needs, 2)
    assert against_pipeline(needs, 2, (2, 2)) == ""
    assert "is not even" in against_pipeline(needs, 2, (3, 1))
    assert "does not divide by 3 ranks" in against_pipeline(needs, 3)
    assert split_fault(4, 3, (1, 2, 1)) == ""
    assert "add up to num_hidden_layers 4" in split_fault(4, 2, (1, 2))
    assert "fewer than 5 ranks" in split_fault(4, 5, None)


def test_a_window_is_longer_by_a_chunk_while_a_prompt_is_read() -> None:
    windowed = LayerNeeds(weights_bytes=1, kv_token_bytes=10, window=128)
    assert layer_cache(windowed, 10**6, 2, prefill_chunk_tokens=512) == (128 + 511) * 10 * 2
    assert layer_cache(windowed, 200, 2, prefill_chunk_tokens=512) == 256 * 10 * 2
    needs = ModelNeeds(model="m", model_type="t", layers=(windowed,), outside_bytes=0)
    found = rank_memory(needs, "none", 1, range(1), context_tokens=10**6, sequences=2, prefill_chunk_tokens=512)
    assert found.cache == (128 + 511) * 10 * 2


def test_scores_are_those_of_every_prompt_that_is_read_together() -> None:
    needs = ModelNeeds(model="m", model_type="t", layers=(), outside_bytes=0, plain_score_bytes=6)

    def taken(one: ModelNeeds, sequences: int, ranks: int = 1) -> int:
        sharding = "tensor" if ranks > 1 else "none"
        return workspace(
            one, sharding, ranks, leads=False, sequences=sequences, prefill_chunk_tokens=64, context_tokens=1000
        )

    assert [taken(needs, many) for many in (1, 32)] == [0, 0]
    counted = [64 * 1000 * 6 * together for together in (1, 2, PREFILL_SEQUENCES)]
    assert [taken(on_cpu(needs), many) for many in (1, 2, 32)] == counted
    assert taken(on_cpu(needs), 1, ranks=2) == 64 * 1000 * 3


def test_a_cpu_takes_a_state_for_each_token_of_a_layer_that_goes_from_token_to_token() -> None:
    needs = ModelNeeds(model="m", model_type="t", layers=(), outside_bytes=0, token_bytes=10, plain_token_bytes=1000)
    found = [
        workspace(one, "none", 1, leads=False, sequences=2, prefill_chunk_tokens=64, context_tokens=500)
        for one in (needs, on_cpu(needs))
    ]
    assert found == [2 * 64 * 10, 2 * 64 * 1010]
