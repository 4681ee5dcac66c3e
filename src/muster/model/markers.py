"""What the text of a chat answer means: content, reasoning, or calls of tools, told apart by the model's markers.

The search is mlx-lm's `TextStateMachine`, which takes the markers away; a call that comes to nothing needs them back,
so this module works out which they were.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from muster.sampling import ToolCall

#: What mlx-lm's parsers, and `ast` below them, raise on text that is no call.
_PARSE_ERRORS: Final = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)

_CALL_ID_BYTES: Final = 12


class Parts(msgspec.Struct):
    """What some text adds to an answer. `marked` is whether it held a marker or belonged to a call."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    marked: bool = False


class Markers:
    """Divides one answer. Without `tools`, what looks like a call is content like any other."""

    def __init__(self, tokenizer: TokenizerWrapper, tools: tuple[dict[str, Any], ...], *, thinking: bool) -> None:
        self._parse_block: Any = tokenizer.tool_parser
        self._tools = list(tools)
        self._markers = _markers(tokenizer)
        initial = tokenizer.response_initial_state or ("reasoning" if thinking else "normal")
        self._state: Any = _machine(tokenizer, calls=bool(tools)).make_state(initial)
        self._name: str = initial
        self._block = ""  # the raw text of a call under way, from its marker on
        self._body = ""
        self._gap = ""  # white space after a call, which means nothing unless text follows
        self._after_call = False
        self.called = False

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._name == "reasoning"

    @property
    def plain(self) -> bool:
        """Whether the next text is content, as far as is known, and no part of a marker is held back."""
        return self._name == "normal" and not self._state[3]

    def feed(self, text: str) -> Parts:
        """Take the next text; what might be a part of a marker is held back."""
        pending = self._state[3] + text
        self._state, segments = TextStateMachine.split(self._state, text)
        parts = Parts(marked=len(segments) > 1 or self._name == "tool")
        position = 0
        for number, (name, segment) in enumerate(segments):
            if number > 0:
                marker = self._marker_at(pending, position)
                position += len(marker)
                self._cross(name, marker, parts)
            position += len(segment)
            self._add(segment, parts)
        return parts

    def finish(self, *, whole: bool) -> Parts:
        """The end of the text. `whole` is whether the model ended it itself: a call under way may be a whole one."""
        parts = Parts()
        self._state, held, _ = TextStateMachine.flush(self._state)
        self._add(held, parts)
        if self._block:
            self._close("", parts, whole=whole)
        return parts

    def _marker_at(self, text: str, position: int) -> str:
        # The shortest is the one that was complete first.
        return next(marker for marker in self._markers if text.startswith(marker, position))

    def _cross(self, name: str, marker: str, parts: Parts) -> None:
        """Go from one state to the next over a marker."""
        before, self._name = self._name, name
        if before == "tool":
            if self._tools:
                self._close(marker, parts, whole=True)
            else:
                parts.text += marker
        if name == "tool":
            if self._tools:
                self._block, self._body = marker, ""
            else:
                self._add_content(marker, parts)

    def _add(self, segment: str, parts: Parts) -> None:
        if not segment:
            return
        match self._name:
            case "normal":
                self._add_content(segment, parts)
            case "reasoning":
                parts.reasoning += segment
            case "tool" if self._tools:
                self._block += segment
                self._body += segment
            case "tool":
                self._add_content(segment, parts)
            case _:
                pass  # a header between the parts, which no client sees

    def _add_content(self, segment: str, parts: Parts) -> None:
        if self._after_call:
            self._gap += segment
            if not self._gap.strip():
                return
            segment, self._gap, self._after_call = self._gap, "", False
        parts.text += segment

    def _close(self, marker: str, parts: Parts, *, whole: bool) -> None:
        raw, body = self._block + marker, self._body
        self._block = self._body = ""
        calls = self._parse(body) if whole else None
        if calls is None:
            self._add_content(raw, parts)
            return
        parts.calls += calls
        self.called = self._after_call = True

    def _parse(self, body: str) -> tuple[ToolCall, ...] | None:
        """The calls of a block, or `None` where it holds none."""
        try:
            parsed = self._parse_block(body, self._tools)
            calls = tuple(_call(entry) for entry in (parsed if isinstance(parsed, list) else [parsed]))
        except _PARSE_ERRORS:
            return None
        return calls or None


def _call(entry: Any) -> ToolCall:
    """A call as mlx-lm's parsers give it; its id is ours, since models repeat theirs."""
    name, arguments = entry["name"], entry.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"a call of {name!r}")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise TypeError("arguments that are no object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # halves of characters, which JSON can spell, are no text
    return ToolCall(id=f"call_{secrets.token_hex(_CALL_ID_BYTES)}", name=name, arguments=text)


#: A machine is the same for all answers of a model with calls, and for all without: what changes is in its state.
_machines: WeakKeyDictionary[TokenizerWrapper, dict[bool, TextStateMachine]] = WeakKeyDictionary()


def _machine(tokenizer: TokenizerWrapper, *, calls: bool) -> TextStateMachine:
    found = _machines.setdefault(tokenizer, {})
    if calls not in found:
        # A call that nobody offered must not end the reasoning that it stands in.
        found[calls] = make_text_state_machine(tokenizer if calls else _WithoutCalls(tokenizer))
    return found[calls]


class _WithoutCalls:
    """A tokenizer whose model calls no tools, as far as mlx-lm's state machine looks at it."""

    has_tool_calling: Final = False

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _markers(tokenizer: TokenizerWrapper) -> list[str]:
    """Every text that mlx-lm's machine takes for a marker, the shortest first."""
    found: set[str | None] = {
        tokenizer.think_start,
        tokenizer.think_end,
        tokenizer.tool_call_start,
        tokenizer.tool_call_end,
        *tokenizer.structural_markers,
    }
    for edges in tokenizer.response_transitions.values():
        found.update(text for text, _ in edges)
    return sorted((text for text in found if text), key=len)
