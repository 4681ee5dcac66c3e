"""The prompt cache of one rank: what finished prompts and answers left behind, found again by their first tokens.

Every rank keeps the same prompts, because all of them insert and forget at the same steps. Only rank 0 counts bytes,
and tells the others how many prompts to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, PromptTrie, PromptTrieResult

#: mlx-lm forgets answers before prompts that were kept on purpose.
Kind = Literal["assistant", "user"]

#: mlx-lm's cache tells models apart; a runner has one.
_MODEL: Final = ""
#: Without a bound on bytes of mlx-lm's own: it would differ between ranks.
_UNBOUNDED: Final = 1 << 62
#: Each insertion looks through all prompts in order, so that thousands of small ones would hold answers up.
_MOST_PROMPTS: Final = 256


class _Trie(PromptTrie):
    """mlx-lm's trie, with a search that is linear in the length of what it finds.

    Its own looks for the shortest prompt that goes on from the common prefix, and copies the path at each token: 0.7 s
    for one of 32,000 tokens, while all answers wait. Any such prompt can be cut to the prefix as well.
    """

    def search(self, model: Any, tokens: list[int]) -> PromptTrieResult:
        node: Any = self._trie.get(model, {})
        shorter, common = 0, 0
        for token in tokens:
            if token not in node:
                break
            node = node[token]
            common += 1
            if "__value__" in node:
                shorter = common
        if shorter == len(tokens) > 0:
            return PromptTrieResult(model, tokens, None, None, 0)
        longer: list[int] | None = None
        if common:
            longer = tokens[:common]
            while "__value__" not in node:
                token = next(iter(node))
                longer.append(token)
                node = node[token]
        return PromptTrieResult(model, None, tokens[:shorter] if shorter else None, longer, common)


class PrefixCache:
    """Caches by token prefix, in this rank's memory.

    `limit_bytes` is the bound for the rank that holds most; `share` is this rank's part of what that rank holds,
    above 0 and at most 1. Only rank 0 asks for `excess`.
    """

    def __init__(self, limit_bytes: int, *, share: float = 1.0) -> None:
        self._limit_bytes = limit_bytes
        self._share = share
        self._cache = LRUPromptCache(max_size=_MOST_PROMPTS, max_bytes=_UNBOUNDED)
        self._cache._trie = _Trie()

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def nbytes(self) -> int:
        """Bytes that the rank which holds most has in its prompt cache."""
        return int(self._cache.nbytes / self._share)

    def fetch(self, tokens: Sequence[int]) -> tuple[list[Any] | None, int]:
        """A copy of the longest cache that begins `tokens`, and how many of them it holds.

        At least the last token is left to compute, since its logits are what is wanted.
        """
        searched = list(tokens[:-1])
        if not searched or not self._limit_bytes:
            return None, 0
        cache, rest = self._cache.fetch_nearest_cache(_MODEL, searched)
        return (cache, len(searched) - len(rest)) if cache is not None else (None, 0)

    def insert(self, tokens: Sequence[int], cache: list[Any], kind: Kind = "assistant") -> None:
        """Keep `cache`, which holds exactly `tokens` and is nobody else's from now on."""
        if not tokens or not self._limit_bytes:
            return
        # Computed now, though not waited for: otherwise each entry would keep the whole batch's arrays alive.
        mx.async_eval([entry.state for entry in cache])
        self._cache.insert_cache(_MODEL, list(tokens), cache, cache_type=kind)

    def excess(self) -> int | None:
        """Forget what is beyond the bound; answers how many prompts are left, `None` if nothing was forgotten."""
        before = len(self._cache)
        if self.nbytes > self._limit_bytes:
            self._cache.trim_to(n_bytes=int(self._limit_bytes * self._share))
        return len(self._cache) if len(self._cache) != before else None

    def keep(self, entries: int) -> None:
        """Forget all but so many prompts, in the same order on every rank."""
        self._cache.trim_to(n_sequences=entries)
