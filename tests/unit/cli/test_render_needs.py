"""`muster model`: what it says of a model, what it predicts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from muster.cli.app import app
from muster.cli.needs_commands import parse_ranks
from muster.cli.render_needs import Forecast, forecasts, needs_view
from muster.errors import RequestError
from muster.needs import LayerNeeds, ModelNeeds, SharedSize
from muster.predict import PROCESS_BYTES

GIB = 2**30
DEMO = Path(__file__).parents[3] / "src" / "muster" / "demo" / "model"
ASKED = Forecast(context_tokens=8192, sequences=2, prefill_chunk_tokens=512)


def needs(**changes: Any) -> ModelNeeds:
    layer = LayerNeeds(weights_bytes=GIB, tensor_bytes=GIB // 2, kv_token_bytes=4096)
    known: dict[str, Any] = {
        "model": "owner/m",
        "model_type": "qwen3",
        "layers": (layer,) * 5,
        "outside_bytes": GIB,
        "embedding_bytes": GIB // 2,
        "head_bytes": GIB // 2,
        "parameters": 12 * 10**9,
        "heads": 32,
        "kv_heads": 8,
        "context_tokens": 40960,
        "tensor": True,
        "tensor_sizes": (2, 4, 8),
        "shared_sizes": (SharedSize("num_key_value_heads", 8),),
        "pipeline": True,
    }
    return ModelNeeds(**(known | changes))


def shown(model: ModelNeeds, ranks: tuple[int, ...] = (1, 2, 3)) -> str:
    console = Console(width=160, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(needs_view(model, forecasts(model, ranks, ASKED), ASKED))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_it_says_what_a_model_is_and_what_ranks_of_it_take() -> None:
    text = shown(needs())
    assert "owner/m: qwen3, 12 billion parameters of 16 bits, 6.0 GiB" in text
    assert "5 layers: 1.0 GiB each; 1.0 GiB outside of them; tensor sharding divides 42% of all" in text
    assert "cache of a sequence: 20 KiB a token; 160 MiB at 8192 tokens, 800 MiB at 40960 tokens" in text
    assert "tensor sharding: over 2, 4, 8 ranks\npipeline: over 2 to 5 ranks" in text
    assert "for 2 sequences of 8192 tokens" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(row.startswith("2 pipeline 1 x 3, 1 x 2 3.5 GiB 192 MiB") for row in rows), "the rank that takes most"
    assert "  tensor over 3 ranks: num_key_value_heads is 8, which does not divide by 3 ranks" in text


def test_what_never_can_be_is_said_once() -> None:
    text = shown(needs(pipeline=False, no_pipeline="mlx-lm has no pipeline for this architecture"))
    assert text.count("no pipeline") == 1
    assert "pipeline over" not in text


def test_windows_and_states_are_shown() -> None:
    windowed = LayerNeeds(weights_bytes=1, kv_token_bytes=2048, window=128)
    text = shown(needs(layers=(windowed, LayerNeeds(weights_bytes=1, state_bytes=2**20)), solo=True))
    assert "1 layers keep a window of 128 tokens only" in text
    assert "1 layers keep a state of 1 MiB" in text
    assert "sequences run one by one" in text


def test_what_a_quantised_cache_would_take_is_said_where_mlx_lm_has_one() -> None:
    text = shown(needs(hidden_size=4096))
    assert "  quantised it would be 10.625 KiB at 8 bits, 5.625 KiB at 4 bits; ranks keep it whole" in text
    latent = LayerNeeds(weights_bytes=1, kv_token_bytes=1152, kv_divides=False)
    for other in ({"layers": (latent,)}, {"bits": 32.0}, {"hidden_size": 32 * 48}):
        assert "quantised" not in shown(needs(**({"hidden_size": 4096} | other)), ranks=(1,))


def test_each_number_of_ranks_is_predicted_for_each_rank() -> None:
    found = forecasts(needs(), (1, 2, 9), ASKED)
    assert [(one.ranks, one.sharding, len(one.by_rank), bool(one.why_not)) for one in found] == [
        (1, "none", 1, False),
        (2, "tensor", 2, False),
        (2, "pipeline", 2, False),
        (9, "tensor", 0, True),
        (9, "pipeline", 0, True),
    ]
    assert [rank.weights for rank in found[2].by_rank] == [3 * GIB + GIB // 2, 2 * GIB + GIB // 2]
    assert all(rank.process == PROCESS_BYTES for one in found for rank in one.by_rank)


@pytest.mark.parametrize("text", ["", "0", "1,x", "2000", "-1"])
def test_bad_numbers_of_ranks_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--ranks"):
        parse_ranks(text)


def test_a_directory_is_read_without_anybody() -> None:
    done = CliRunner().invoke(app, ["model", str(DEMO), "--ranks", "1,2", "--context", "100", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert document["model_type"] == "qwen2"
    assert document["asked"]["context_tokens"] == 100
    assert {one["sharding"] for one in document["ranks"]} == {"none", "tensor", "pipeline"}
    assert document["weights_bytes"] == document["ranks"][0]["by_rank"][0]["weights"]
