"""Answers that follow a JSON Schema: llguidance says which tokens may come next, and a processor allows no others.

llguidance keeps one matcher per sequence and works on token masks, so that constrained and free sequences share a
batch. A processor is called once per step with the tokens so far, and the last one is what was sampled before.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from muster.errors import RequestError
from muster.model.load import LoadedModel
from muster.model.prompt import Reasoning

#: Between the parts of JSON: nothing, a space, or a new line with its indent. Without a bound, a model that likes
#: white space would never come to the end.
_OPTIONS: Final[Any] = {"whitespace_pattern": r"[ ]|\n[ ]{0,40}"}

_LIMITS: Final = LLParserLimits(verbose_errors=False)

#: A schema that takes longer is refused. Its thread cannot be stopped, so that there are never more than some.
_COMPILE_SECONDS: Final = 5.0
_MOST_COMPILING: Final = 2
#: Patterns that one text must match at once: each multiplies the states of the others.
_MOST_PATTERNS: Final = 4

#: Compiled schemas kept per model: clients send the same one again and again.
_COMPILED_KEPT: Final = 64


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled schema, shared by all sequences that follow it: take a copy of `matcher` for each.

    `opens_thinking` and `opens_call` are the ids of the tokens that begin a block of reasoning or a tool call, which
    may come before or instead of the JSON; the ids `closes_thinking` in a row end the reasoning, and one of
    `end_tokens` ends the answer.
    """

    matcher: LLMatcher
    end_tokens: tuple[int, ...]
    opens_thinking: int | None = None
    closes_thinking: tuple[int, ...] = ()
    opens_call: int | None = None


def compile_schema(loaded: LoadedModel, schema: str, *, calls_tools: bool) -> Grammar:
    """The grammar of a schema, JSON text. Thread-safe; a schema seen before is not compiled again.

    Args:
        loaded: the model whose tokens the grammar is about.
        schema: JSON text of the schema; of "any JSON object" it is `{"type": "object"}`.
        calls_tools: the answer may be tool calls instead.

    Raises:
        RequestError: llguidance refuses the schema, with its reason, or the model's tokens allow no grammar.
    """
    tokenizer = loaded.tokenizer
    if tokenizer.response_transitions:
        raise RequestError(
            "the model's answers have a format of their own around their text, which a schema cannot leave room for",
            remedy="leave the schema out",
            field="json_schema",
        )
    with _lock:
        compiled = _compiled.get(tokenizer)
        if compiled is None:
            compiled = _compiled[tokenizer] = _Compiled()
    opens_call = None
    if calls_tools:
        opens_call = _single(tokenizer.tool_call_start_tokens)
        if opens_call is None:
            raise RequestError(
                "this model begins a tool call with several tokens, so a schema cannot leave room for calls",
                remedy="send either tools or a schema",
                field="json_schema",
            )
    return Grammar(
        matcher=compiled.matcher(tokenizer, schema),
        end_tokens=tuple(sorted(tokenizer.eos_token_ids)),
        opens_thinking=_single(tokenizer.think_start_tokens),
        closes_thinking=tuple(tokenizer.think_end_tokens or ()),
        opens_call=opens_call,
    )


def _single(tokens: tuple[int, ...] | None) -> int | None:
    return tokens[0] if tokens is not None and len(tokens) == 1 else None


class _Compiled:
    """What llguidance knows of one tokenizer, and the schemas compiled for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, source: TokenizerWrapper, schema: str) -> LLMatcher:
        """Compile, or find what was compiled. A value must not refer to its key, or it would never be let go."""
        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or _make_tokenizer(source)
            known = self._matchers.get(schema)
            if known is not None:
                self._matchers.move_to_end(schema)
                return known
        matcher = _in_time(lambda: _make_matcher(tokenizer, schema))
        with self._lock:
            self._matchers[schema] = matcher
            if len(self._matchers) > _COMPILED_KEPT:
                self._matchers.popitem(last=False)
        return matcher


_compiled: WeakKeyDictionary[TokenizerWrapper, _Compiled] = WeakKeyDictionary()
_lock = threading.Lock()


def _make_tokenizer(tokenizer: TokenizerWrapper) -> LLTokenizer:
    end_tokens = sorted(tokenizer.eos_token_ids)
    try:
        if not end_tokens:
            raise ValueError("it has no end token")
        return from_tokenizer(tokenizer._tokenizer, eos_token=end_tokens)  # pyright: ignore[reportPrivateUsage]
    except ValueError as error:
        raise RequestError(
            f"the model's tokenizer allows no answers by a schema: {error}",
            remedy="leave the schema out, or serve a model with a fast tokenizer",
            field="json_schema",
        ) from error


_compiling = threading.BoundedSemaphore(_MOST_COMPILING)


def _in_time(make: Callable[[], LLMatcher]) -> LLMatcher:
    """What `make` gives, in a thread of its own that is left alone when it takes too long."""
    if not _compiling.acquire(timeout=_COMPILE_SECONDS):
        raise _refused("other schemas take too long to compile; ask again later")
    made: SimpleQueue[LLMatcher | Exception] = SimpleQueue()

    def work() -> None:
        try:
            made.put(make())
        except Exception as error:  # raised again by whoever waits
            made.put(error)
        finally:
            _compiling.release()

    threading.Thread(target=work, name="grammar", daemon=True).start()
    try:
        outcome = made.get(timeout=_COMPILE_SECONDS)
    except Empty:
        raise _refused(f"it takes more than {_COMPILE_SECONDS:g} s to compile") from None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _patterns(schema: Any) -> int:
    """How many patterns a part of a schema holds."""
    if isinstance(schema, list):
        return sum(map(_patterns, cast("list[Any]", schema)))
    if not isinstance(schema, dict):
        return 0
    parts = cast("dict[str, Any]", schema)
    return isinstance(parts.get("pattern"), str) + sum(map(_patterns, parts.values()))


def _check_patterns(schema: Any) -> None:
    if isinstance(schema, list):
        for part in cast("list[Any]", schema):
            _check_patterns(part)
    elif isinstance(schema, dict):
        for name, part in cast("dict[str, Any]", schema).items():
            if name == "allOf" and (count := _patterns(part)) > _MOST_PATTERNS:
                raise _refused(f"an allOf holds {count} patterns; it may hold {_MOST_PATTERNS}")
            _check_patterns(part)


def _make_matcher(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    try:
        _check_patterns(msgspec.json.decode(schema, type=dict[str, Any]))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _refused(f"it is no JSON object that can be read: {error}") from error
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        reason = matcher.get_error()
    except ValueError as error:
        reason = str(error)
        raise _refused(reason) from error
    if reason:
        raise _refused(reason)
    return matcher


def _refused(reason: str) -> RequestError:
    first = " ".join(line.strip() for line in reason.splitlines()[:4])
    return RequestError(
        f"the schema cannot be followed: {first}",
        remedy="use only what the grammar library supports of JSON Schema",
        field="json_schema",
    )


class Constraint:
    """The logits processor of one sequence: it masks every token that the grammar does not allow next.

    While the model reasons it only keeps the answer from ending, and once a tool call has begun it allows anything.
    It waits for the value of the last token, so a batch with a constrained sequence in it cannot run ahead.
    """

    def __init__(self, grammar: Grammar, reasoning: Reasoning) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._called = False
        self._free = False
        self._thinking = reasoning == "open"
        self._thought = reasoning != "none"
        self._begun = False
        self._recent: deque[int] = deque(maxlen=len(grammar.closes_thinking))

    @property
    def error(self) -> str:
        """Why the matcher gave up: a limit of the library's; empty while all is well."""
        return self._matcher.get_error()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The logits `[1, vocabulary]` with all but the allowed tokens at minus infinity."""
        if self._called:
            last: Any = tokens[-1].item()
            self._consume(int(last))
        self._called = True
        if self._free:
            return logits
        return mx.where(self._mask(logits.shape[-1]), logits, mx.array(-mx.inf, dtype=logits.dtype))

    def _consume(self, token: int) -> None:
        grammar = self._grammar
        if self._free:
            return
        if self._thinking:
            self._recent.append(token)
            self._thinking = tuple(self._recent) != grammar.closes_thinking
            self._free = token == grammar.opens_call
        elif not self._begun and token == grammar.opens_call:
            self._free = True
        elif not self._begun and not self._thought and token == grammar.opens_thinking:
            self._thinking = self._thought = True
        elif not self._matcher.is_stopped():
            self._begun = True
            self._matcher.consume_token(token)

    def _mask(self, size: int) -> mx.array:
        allowed = np.zeros(size, dtype=np.bool_)
        if self._thinking:
            # An answer that ended inside its reasoning would hold no JSON.
            allowed[:] = True
            allowed[list(self._grammar.end_tokens)] = False
            return _as_array(allowed)
        # A matcher at its end allows the end tokens alone. So does one that hit a limit of the library's: the answer
        # ends rather than going on unchecked.
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        count = min(size, bits.size)
        allowed[:count] = bits[:count]
        if not self._begun:
            if self._grammar.opens_call is not None:
                allowed[self._grammar.opens_call] = True
            if self._grammar.opens_thinking is not None and not self._thought:
                allowed[self._grammar.opens_thinking] = True
        return _as_array(allowed)


def _as_array(values: Any) -> mx.array:
    return mx.array(values)
