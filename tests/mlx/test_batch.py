"""The batch on one rank: every answer is mlx-lm's own, whatever else is in the batch or the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from demo_prompts import DEMO, Known, known_answers
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import KVCache
from shard_ranks import Ask, Job, run_alone
from tiny_models import LLAMA, VOCABULARY, make_model

from muster.errors import ProtocolError
from muster.model.batch import Batch
from muster.model.files import inspect
from muster.model.guard import Choice
from muster.model.load import LoadedModel, load_shard
from muster.model.plan import Supports, plan
from muster.rank_protocol import Admission, Step
from muster.sampling import SamplingParams

pytestmark = pytest.mark.mlx

GREEDY = SamplingParams()
BYTES = 2**24


@pytest.fixture(scope="module")
def known() -> tuple[Known, ...]:
    return known_answers()


@pytest.fixture(scope="module")
def some(known: tuple[Known, ...]) -> tuple[Known, ...]:
    """Every fifth, where all of them would only take longer."""
    return known[::5]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", LLAMA)


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> LoadedModel:
    return load_tiny(tiny)


def load_tiny(path: Path) -> LoadedModel:
    shards = plan(inspect(path), "auto", 1, Supports(tensor=False, pipeline=False))
    return load_shard(path, shards, 0, None, on_layer=lambda done, total: None)


def batch_of(loaded: LoadedModel, *, sequences: int = 4, chunk: int = 8, cache_bytes: int = 0) -> Batch:
    return Batch(loaded, None, max_sequences=sequences, prefill_chunk_tokens=chunk, prompt_cache_bytes=cache_bytes)


def admit(batch: Batch, number: int, prompt: Any, count: int = 8, choice: Choice | None = None) -> Admission:
    return batch.admission(number, tuple(prompt), keep=(), max_tokens=count, choice=choice or Choice(number, None, []))


def run_out(batch: Batch, first: Step) -> dict[int, list[int]]:
    """All tokens by sequence, of `first` and of all steps after it until the batch is empty."""
    tokens: dict[int, list[int]] = {}
    step = first
    while True:
        for token in batch.run(step).tokens:
            tokens.setdefault(token.sequence, []).append(token.token)
        if not len(batch):
            return tokens
        step = Step(step=step.step + 1)


def mlx_lm_tokens(path: Path, prompt: Any, count: int) -> tuple[int, ...]:
    model, tokenizer = load(str(path))[:2]
    answers: list[Any] = list(stream_generate(model, tokenizer, list(prompt), max_tokens=count))
    return tuple(answer.token for answer in answers)


# --- the same tokens as mlx-lm ----------------------------------------------------------------------------


def test_every_answer_alone_is_mlx_lm_s(known: tuple[Known, ...]) -> None:
    asks = tuple(Ask(prompt=one.prompt, count=160) for one in known)
    outcome = run_alone(Job(path=str(DEMO), sharding="auto", asks=asks, max_sequences=1, chunk_tokens=64))
    assert outcome.tokens == tuple(one.tokens for one in known)


@pytest.mark.parametrize(("sequences", "chunk"), [(3, 7), (32, 512)])
def test_every_answer_in_a_batch_is_the_one_alone(known: tuple[Known, ...], sequences: int, chunk: int) -> None:
    asks = tuple(Ask(prompt=one.prompt, count=160, enter=number * 2) for number, one in enumerate(known))
    outcome = run_alone(Job(path=str(DEMO), sharding="auto", asks=asks, max_sequences=sequences, chunk_tokens=chunk))
    assert outcome.tokens == tuple(one.tokens for one in known)


def test_answers_that_are_cancelled_half_way_disturb_no_other(some: tuple[Known, ...]) -> None:
    asks = tuple(
        Ask(prompt=one.prompt, count=160, enter=number, cancel=-1 if number % 2 else number % 7)
        for number, one in enumerate(some)
    )
    job = Job(path=str(DEMO), sharding="auto", asks=asks, chunk_tokens=16, prompt_cache_bytes=BYTES)
    for number, (tokens, one) in enumerate(zip(run_alone(job).tokens, some, strict=True)):
        if number % 2:
            assert tokens == one.tokens
        else:
            assert tokens == one.tokens[: len(tokens)]
            assert len(tokens) <= number % 7 + 1


def test_limits_are_kept_and_end_tokens_end(known: tuple[Known, ...]) -> None:
    lengths = [1, 2, 3, 1000]
    asks = tuple(Ask(prompt=known[0].prompt, count=length) for length in lengths)
    outcome = run_alone(Job(path=str(DEMO), sharding="auto", asks=asks))
    assert outcome.tokens == tuple(known[0].tokens[:length] for length in lengths)


# --- the prompt cache -------------------------------------------------------------------------------------


def test_later_turns_and_the_same_prompt_again_reuse_the_cache(some: tuple[Known, ...]) -> None:
    again = some[5]
    asks = tuple(
        Ask(prompt=one.prompt, count=160, after=number) for number, one in enumerate((*some, again, again, again))
    )
    outcome = run_alone(Job(path=str(DEMO), sharding="auto", asks=asks, chunk_tokens=16, prompt_cache_bytes=BYTES))
    assert outcome.tokens == tuple(one.tokens for one in (*some, again, again, again))
    assert outcome.cached[0] == 0
    assert outcome.cached[-1] >= len(again.prompt) - 2
    assert outcome.cached[-1] < len(again.prompt)


def test_two_requests_with_one_cached_prefix_run_side_by_side(known: tuple[Known, ...]) -> None:
    one = known[7]
    asks = (
        Ask(prompt=one.prompt, count=160),
        Ask(prompt=one.prompt, count=160, after=1),
        Ask(prompt=one.prompt, count=3, after=1),
        Ask(prompt=one.prompt, count=160, after=1, enter=1),
        Ask(prompt=one.prompt, count=160, after=4),
    )
    outcome = run_alone(Job(path=str(DEMO), sharding="auto", asks=asks, chunk_tokens=16, prompt_cache_bytes=BYTES))
    assert outcome.tokens == (one.tokens, one.tokens, one.tokens[:3], one.tokens, one.tokens)
    assert min(outcome.cached[1:]) >= len(one.prompt) - 2


def test_an_answer_can_be_gone_on_with_from_the_cache(known: tuple[Known, ...]) -> None:
    one = max(known, key=lambda known_one: len(known_one.tokens))
    half = len(one.tokens) // 2
    longer = (*one.prompt, *one.tokens[:half])
    asks = (Ask(prompt=one.prompt, count=160), Ask(prompt=longer, count=160, after=1))
    outcome = run_alone(Job(path=str(DEMO), sharding="auto", asks=asks, prompt_cache_bytes=BYTES))
    assert outcome.tokens == (one.tokens, one.tokens[half:])
    assert len(longer) - 2 <= outcome.cached[1] < len(longer)


def test_the_cache_forgets_beyond_its_bound(some: tuple[Known, ...]) -> None:
    asks = tuple(Ask(prompt=one.prompt, count=8, after=number) for number, one in enumerate(some))
    whole = run_alone(Job(path=str(DEMO), sharding="auto", asks=asks, prompt_cache_bytes=BYTES))
    small = run_alone(Job(path=str(DEMO), sharding="auto", asks=asks, prompt_cache_bytes=BYTES // 128))
    none = run_alone(Job(path=str(DEMO), sharding="auto", asks=asks, prompt_cache_bytes=0))
    assert whole.entries > small.entries > 0 == none.entries
    assert whole.tokens == small.tokens == none.tokens == tuple(one.tokens[:8] for one in some)
    assert set(none.cached) == {0}


def test_the_end_of_a_kept_segment_serves_a_request_that_starts_meanwhile(loaded: LoadedModel, tiny: Path) -> None:
    batch = batch_of(loaded, chunk=512, cache_bytes=BYTES)
    batch._cuts_anywhere = False  # pyright: ignore[reportPrivateUsage]  # as a cache of fixed size says
    system = b"Be brief."
    first, second = system + b"Why?", system + b"Really?"
    one = batch.admission(1, tuple(first), keep=(len(system),), max_tokens=8, choice=Choice(1, None, []))
    assert one.segments == (len(system), len(first) - len(system))
    tokens: dict[int, list[int]] = {1: [], 2: []}
    batch.run(Step(step=1, admit=(one,)))
    two = batch.admission(2, tuple(second), keep=(), max_tokens=8, choice=Choice(2, None, []))
    assert two.cached_tokens == len(system)
    step = Step(step=2, admit=(two,))
    while len(batch) or step.admit:
        for token in batch.run(step).tokens:
            tokens[token.sequence].append(token.token)
        step = Step(step=step.step + 1)
    assert tuple(tokens[1]) == mlx_lm_tokens(tiny, first, 8)
    assert tuple(tokens[2]) == mlx_lm_tokens(tiny, second, 8)


def test_short_prompts_are_not_cut_where_the_answer_s_cache_serves_as_well(loaded: LoadedModel) -> None:
    batch = batch_of(loaded, cache_bytes=BYTES)
    assert batch.admission(1, (65,) * 100, keep=(50,), max_tokens=8, choice=Choice(1, None, [])).segments == (100,)
    long = batch.admission(2, (65,) * 900, keep=(300, 400, 899), max_tokens=8, choice=Choice(2, None, []))
    assert long.segments == (300, 599, 1)


def test_a_cache_that_differs_from_rank_0_s_is_refused(loaded: LoadedModel) -> None:
    batch = batch_of(loaded, cache_bytes=BYTES)
    admission = Admission(sequence=1, tokens=(65, 66, 67), max_tokens=4, cached_tokens=2, segments=(1,))
    with pytest.raises(ProtocolError, match=r"this rank has 0 tokens of sequence 1's prompt .* rank 0 has 2"):
        batch.run(Step(step=1, admit=(admission,)))


# --- prefill in chunks ------------------------------------------------------------------------------------


def test_a_long_prompt_lets_a_running_answer_go_on(loaded: LoadedModel, tiny: Path) -> None:
    batch = batch_of(loaded, chunk=8)
    short, long = tuple(b"Say it"), tuple(b"A prompt of many chunks, one after another, takes its time.")
    batch.run(Step(step=1, admit=(admit(batch, 1, short, 40),)))
    begun = batch.run(Step(step=2))
    tokens: dict[int, list[int]] = {1: [token.token for token in begun.tokens], 2: []}
    done: list[int] = []
    step = Step(step=3, admit=(admit(batch, 2, long, 5),))
    running_meanwhile = 0
    while len(batch):
        brought = batch.run(step)
        for token in brought.tokens:
            tokens[token.sequence].append(token.token)
        done += [count for sequence, count in brought.prefilled if sequence == 2]
        running_meanwhile += not tokens[2] and any(token.sequence == 1 for token in brought.tokens)
        step = Step(step=step.step + 1)
    assert done == [*range(8, len(long) - 1, 8), len(long) - 1, len(long)]
    assert running_meanwhile >= len(long) // 8
    assert tuple(tokens[1]) == mlx_lm_tokens(tiny, short, 40)
    assert tuple(tokens[2]) == mlx_lm_tokens(tiny, long, 5)


def test_prompts_share_a_chunk_while_an_answer_waits(loaded: LoadedModel) -> None:
    batch = batch_of(loaded, sequences=8, chunk=64)
    batch.run(Step(step=1, admit=(admit(batch, 1, b"Say it", 40),)))
    batch.run(Step(step=2))
    long = [admit(batch, number, bytes([65 + number]) * 100) for number in (2, 3)]
    brought = batch.run(Step(step=3, admit=tuple(long)))
    assert brought.prefilled == ((2, 32), (3, 32))


def test_a_prompt_that_is_cancelled_half_way_leaves_its_part_in_the_cache(loaded: LoadedModel) -> None:
    batch = batch_of(loaded, chunk=8, cache_bytes=BYTES)
    prompt = b"A prompt of many chunks."
    batch.run(Step(step=1, admit=(admit(batch, 1, prompt),)))
    batch.run(Step(step=2))
    batch.run(Step(step=3, remove=(1,)))
    assert len(batch) == 0
    assert admit(batch, 2, prompt).cached_tokens == 16


# --- sampling ---------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(known: tuple[Known, ...]) -> None:
    drawn = Ask(prompt=known[0].prompt, count=30, sampling=SamplingParams(temperature=8.0, seed=11), enter=3)
    others = tuple(
        Ask(prompt=one.prompt, count=40, sampling=msgspec.structs.replace(GREEDY, temperature=float(number % 2)))
        for number, one in enumerate(known[1:6])
    )
    alone = run_alone(Job(path=str(DEMO), sharding="auto", asks=(drawn,)))
    beside = run_alone(Job(path=str(DEMO), sharding="auto", asks=(*others, drawn), chunk_tokens=16))
    assert beside.tokens[-1] == alone.tokens[0]
    assert alone.tokens[0] != known[0].tokens[: len(alone.tokens[0])]
    for number in (0, 2, 4):
        assert beside.tokens[number] == known[number + 1].tokens[:40]


def broken(*arguments: Any) -> mx.array:
    raise KeyError("bad grammar")


def test_a_broken_processor_or_sampler_fails_its_own_sequence_only(loaded: LoadedModel, tiny: Path) -> None:
    batch = batch_of(loaded)
    choices = {1: Choice(1, None, [broken]), 2: Choice(2, broken, []), 3: Choice(3, None, [])}
    admitted = tuple(admit(batch, number, b"Say it.", 12, choice) for number, choice in choices.items())
    tokens: list[int] = []
    failed: dict[int, str] = {}
    step = Step(step=1, admit=admitted)
    while True:
        brought = batch.run(step)
        tokens += [token.token for token in brought.tokens if token.sequence == 3]
        failed |= {number: repr(error) for number, error in brought.failed}
        if not len(batch):
            break
        step = Step(step=step.step + 1, remove=tuple(number for number, _ in brought.failed))
    assert failed == {1: "KeyError('bad grammar')", 2: "KeyError('bad grammar')"}
    assert tuple(tokens) == mlx_lm_tokens(tiny, b"Say it.", 12)


def test_a_dead_group_is_nobody_s_own_error(loaded: LoadedModel) -> None:
    def lost(tokens: mx.array, logits: mx.array) -> mx.array:
        raise RuntimeError("[ring] connection to a peer was lost")

    batch = batch_of(loaded)
    with pytest.raises(RuntimeError, match="peer was lost"):
        batch.run(Step(step=1, admit=(admit(batch, 1, b"A", 4, Choice(1, None, [lost])),)))


# --- other kinds of caches --------------------------------------------------------------------------------

SLIDING = LLAMA | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "max_position_embeddings": 2048,
}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 8,
    "num_hidden_layers": 3,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 8,
    "eos_token_id": 256,
}


@pytest.mark.parametrize("config", [SLIDING, MAMBA], ids=["sliding-window", "mamba"])
def test_caches_that_cannot_be_cut_give_the_same_answers_too(tmp_path: Path, config: dict[str, Any]) -> None:
    path = make_model(tmp_path / "m", config)
    letters = tuple(range(65, 91))
    prompts = [letters, letters * 3, (70,), letters[:3] * 13, letters * 3, (*letters, 70, 71), letters]
    asks = tuple(
        Ask(prompt=prompt, count=20, enter=number * 2, after=max(0, number - 3), keep=(len(prompt) // 2,))
        for number, prompt in enumerate(prompts)
    )
    job = Job(path=str(path), sharding="auto", asks=asks, chunk_tokens=7, prompt_cache_bytes=BYTES)
    outcome = run_alone(job)
    assert outcome.tokens == tuple(mlx_lm_tokens(path, prompt, 20) for prompt in prompts)
    assert max(outcome.cached) > 0


class _Alone(KVCache):
    """A cache without `merge`."""

    merge: Any = property()

    def __getattribute__(self, name: str) -> Any:
        if name == "merge":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_models_that_cannot_be_batched_are_served_one_at_a_time(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tiny(tiny)
    monkeypatch.setattr(loaded.model, "make_cache", lambda: [_Alone() for _ in loaded.model.layers], raising=False)
    batch = batch_of(loaded, chunk=4, cache_bytes=BYTES)
    assert batch.max_sequences == 1
    batch.warm_up()
    prompts = {1: b"Say it in order.", 2: b"Say it in reverse.", 3: b"?"}
    got: dict[int, list[int]] = {}
    admitted = tuple(admit(batch, number, prompt, 10) for number, prompt in prompts.items())
    got = run_out(batch, Step(step=1, admit=admitted))
    assert {number: tuple(tokens) for number, tokens in got.items()} == {
        number: mlx_lm_tokens(tiny, prompt, 10) for number, prompt in prompts.items()
    }
    again = admit(batch, 4, prompts[1], 10)
    assert again.cached_tokens == len(prompts[1]) - 2
    assert run_out(batch, Step(step=20, admit=(again,))) == {4: got[1]}
    batch.run(Step(step=40, admit=(admit(batch, 5, prompts[2], 10),)))
    batch.run(Step(step=41, remove=(5,)))
    assert len(batch) == 0
