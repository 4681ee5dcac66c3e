"""One sequence on rank 0: what chooses its tokens, and what they add to the answer."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from muster.errors import RequestError
from muster.model.choose import Processor, make_draw, make_processors
from muster.model.grammar import Constraint
from muster.model.load import LoadedModel
from muster.model.logprobs import token_logprob, with_raw
from muster.model.markers import Markers, Parts
from muster.model.request import PreparedRequest
from muster.model.tokens import token_texts
from muster.replies import Chunk
from muster.sampling import FinishReason, SamplingParams, TokenLogprob

#: Tokens without any text after which what is held back is given out as it is: no character is that long.
_SILENT_TOKENS: Final = 32


class Answer:
    """One sequence's sampler and processors for the batch, and its tokens turned into pieces of the answer.

    Main thread only. Stop strings are searched in everything that the model says, its reasoning and its markers
    included, as mlx-lm and others do: the first that is complete ends the answer, and the longest of several that are
    complete at once. Log probabilities are reported of tokens of the content alone.

    `sampler` is `None` for the greedy one that a batch shares. `needs_logprobs` says that `take` wants them.
    """

    def __init__(self, loaded: LoadedModel, prepared: PreparedRequest, params: SamplingParams) -> None:
        tokenizer = loaded.tokenizer
        self.sampler = make_draw(params)
        self.processors: list[Processor] = make_processors(params)
        self._constraint: Constraint | None = None
        if prepared.grammar is not None:
            # Markers mean nothing in the answer to a plain prompt, so there it cannot reason first either.
            self._constraint = Constraint(prepared.grammar, prepared.reasoning if prepared.chat else "closed")
            self.processors.append(self._constraint)
        self._raw = None
        self.needs_logprobs = params.logprobs
        if params.logprobs:
            self.processors, self._raw = with_raw(self.processors)
        self._top = params.top_logprobs
        self._texts = token_texts(tokenizer)
        self._end_tokens = frozenset(tokenizer.eos_token_ids)
        self._vocabulary = len(tokenizer)
        self._detokenizer = tokenizer.detokenizer
        if not prepared.chat:
            _go_on(tokenizer, self._detokenizer)
        self._silent = 0
        self._stops = _Stops(params.stop) if params.stop else None
        self._markers = _markers(loaded, prepared)
        self.finish: FinishReason | None = None
        self.stop: str | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    def take(self, token: int, logprobs: mx.array | None, *, at_limit: bool) -> Chunk:
        """Take the next token of the sequence.

        Args:
            token: its id.
            logprobs: log probabilities `[vocabulary]` of `BatchGenerator`'s response, where `needs_logprobs`.
            at_limit: whether it is the last that may be generated.

        Returns:
            What is decided now. Sets `finish` where the answer ended; nothing may be taken after that.

        Raises:
            RequestError: the grammar library gave up, so that the answer cannot follow its schema.
        """
        assert self.finish is None, "the answer is finished"
        self.completion_tokens += 1
        row = self._row(logprobs)
        ended = token in self._end_tokens
        if ended:
            self._check_grammar()
            self._detokenizer.finalize()
        elif token < self._vocabulary:  # some models have more ids than their tokenizer has tokens
            self._detokenizer.add_token(token)
        if at_limit and not ended:
            self._detokenizer.finalize()
        text = self._decided(final=ended or at_limit)
        if ended:
            self.finish = "stop"
        elif at_limit:
            self.finish = "length"
        return self._chunk(token, text, row, ended=ended)

    def _row(self, logprobs: mx.array | None) -> mx.array | None:
        if not self.needs_logprobs:
            return None
        return self._raw.next() if self._raw is not None else logprobs

    def _decided(self, *, final: bool) -> str:
        """The text that the detokenizer gives out: whole characters, and at the end no part of one."""
        text: str = self._detokenizer.last_segment
        if final:
            return text.rstrip("\ufffd")
        if text:
            self._silent = 0
            return text
        self._silent += 1
        if self._silent >= _SILENT_TOKENS:
            # Bytes that make no text would be held back for ever, and decoded again with every token.
            self._silent = 0
            self._detokenizer.finalize()
            return self._detokenizer.last_segment
        return ""

    def _chunk(self, token: int, text: str, row: mx.array | None, *, ended: bool) -> Chunk:
        if self._stops is not None:
            text = self._stops.feed(text, final=self.finish is not None)
            if self._stops.found is not None:
                self.finish, self.stop = "stop", self._stops.found
        tokens = () if ended else (token,)
        markers = self._markers
        if markers is None:
            return Chunk(text=text, tokens=tokens, logprobs=self._logprobs(token, row, report=not ended))
        reasoning, plain = markers.reasoning, markers.plain
        parts = markers.feed(text)
        if not ended and (reasoning or markers.reasoning):
            self.reasoning_tokens += 1
        report = not ended and plain and not parts.marked
        if self.finish is not None:
            self._end(markers, parts, whole=ended and self.stop is None)
        return Chunk(
            text=parts.text,
            reasoning=parts.reasoning,
            tool_calls=parts.calls,
            tokens=tokens,
            logprobs=self._logprobs(token, row, report=report),
        )

    def _end(self, markers: Markers, parts: Parts, *, whole: bool) -> None:
        rest = markers.finish(whole=whole)
        parts.text += rest.text
        parts.reasoning += rest.reasoning
        parts.calls += rest.calls
        if whole and markers.called:
            self.finish = "tool_calls"

    def _logprobs(self, token: int, row: mx.array | None, *, report: bool) -> tuple[TokenLogprob, ...]:
        if row is None or not report:
            return ()
        return (token_logprob(token, row, self._top, self._texts),)

    def _check_grammar(self) -> None:
        """Raises where the answer ended because the grammar library could not go on."""
        error = self._constraint.error if self._constraint is not None else ""
        if error:
            raise RequestError(
                f"the grammar library gave up on the answer: {error.splitlines()[0]}",
                remedy="use a simpler schema",
                field="json_schema",
            )


class _Stops:
    """Searches text that comes in pieces for stop strings; what might be a part of one is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        unique = list(dict.fromkeys(stops))
        self._by_state = {f"stop {number}": stop for number, stop in enumerate(unique)}
        edges = [(stop, state) for state, stop in self._by_state.items()]
        machine = TextStateMachine({"text": edges} | {state: [] for state in self._by_state})
        self._state: Any = machine.make_state("text")
        self.found: str | None = None

    def feed(self, text: str, *, final: bool) -> str:
        """What is certainly before any stop string; with `final` also what was held back."""
        self._state, segments = TextStateMachine.split(self._state, text)
        kept: str = segments[0][1]
        if len(segments) > 1:
            self.found = self._by_state[segments[1][0]]
        elif final:
            self._state, held, _ = TextStateMachine.flush(self._state)
            kept += held
        return kept


def _go_on(tokenizer: TokenizerWrapper, detokenizer: Any) -> None:
    """Let the text begin with a space, since it goes on from a prompt: mlx-lm takes the first space of a text away."""
    for token in tokenizer.encode("a", add_special_tokens=False):
        detokenizer.add_token(token)
    _ = detokenizer.last_segment


def _markers(loaded: LoadedModel, prepared: PreparedRequest) -> Markers | None:
    """What divides the answer; `None` where all of it is content."""
    tokenizer = loaded.tokenizer
    means_something = tokenizer.has_thinking or prepared.tools or tokenizer.response_transitions
    if not prepared.chat or not (means_something or tokenizer.structural_markers):
        return None
    return Markers(tokenizer, prepared.tools, thinking=prepared.reasoning == "open")
