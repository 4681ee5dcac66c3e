"""What a single token stands for: its bytes, which may be a part of a character, and its text."""

from __future__ import annotations

import re
from typing import Any, Final
from weakref import WeakKeyDictionary

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper

#: A byte token of sentencepiece.
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: sentencepiece writes a space so.
_SPACE: Final = "▁"


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokens are written in: printable bytes stand for themselves.

    Source: the table of GPT-2's encoder, which every byte-level tokenizer follows.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    letters.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return letters


_LETTERS: Final = _byte_letters()


class TokenTexts:
    """The bytes and texts of one tokenizer's tokens, each looked up once. Main thread only."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        # Not the wrapper: it is the key under which this is kept, for as long as it lives.
        self._tokenizer: Any = tokenizer._tokenizer  # pyright: ignore[reportPrivateUsage]
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._added = {token: str(entry) for token, entry in added.items()}
        kind = tokenizer.detokenizer
        self._byte_level = isinstance(kind, BPEStreamingDetokenizer)
        self._sentencepiece = isinstance(kind, SPMStreamingDetokenizer)
        self._known: dict[int, tuple[bytes, str]] = {}

    def of(self, token: int) -> tuple[bytes, str]:
        """The token's bytes, and them as text: a part of a character shows as U+FFFD."""
        found = self._known.get(token)
        if found is None:
            data = self._bytes(token)
            found = self._known[token] = data, data.decode("utf-8", "replace")
        return found

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if not piece:
            return b""  # some models have more ids than their tokenizer has tokens
        if self._byte_level:
            return b"".join(bytes((_LETTERS[letter],)) if letter in _LETTERS else letter.encode() for letter in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes((int(match[1], 16),))
        if self._sentencepiece:
            return piece.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token]).encode()


_texts: WeakKeyDictionary[TokenizerWrapper, TokenTexts] = WeakKeyDictionary()


def token_texts(tokenizer: TokenizerWrapper) -> TokenTexts:
    """The tokenizer's own `TokenTexts`. Main thread only."""
    found = _texts.get(tokenizer)
    if found is None:
        found = _texts[tokenizer] = TokenTexts(tokenizer)
    return found
