"""Page keys of waiting and running sequences, so that planning again does not hash again."""

from __future__ import annotations

from array import array

from engine.request import Sequence
from hicache.keys import KeySpace

_MOST = 4096  # sequences


class SequenceKeys:
    """Keys of the tokens to prefill, per sequence, while length and epoch stay. Those of the oldest sequences are let go of."""

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self._known: dict[int, tuple[int, int, list[bytes]]] = {}  # sequence -> length, epoch, keys

    def of(self, seq: Sequence) -> list[bytes]:
        """Keys of every whole page of the tokens to prefill."""
        known = self.known(seq)
        if known is not None:
            return known
        keys = self._space.page_keys(prompt_tokens(seq), seq.request.cache_salt)
        while len(self._known) >= _MOST:
            self._known.pop(next(iter(self._known)))
        self._known[seq.seq_id] = (seq.prefill_len, self._space.epoch, keys)
        return keys

    def known(self, seq: Sequence) -> list[bytes] | None:
        """The keys if they are remembered; None after a reset, or when thousands of prompts wait."""
        memo = self._known.get(seq.seq_id)
        return memo[2] if memo is not None and memo[:2] == (seq.prefill_len, self._space.epoch) else None

    def scoped(self, seq: Sequence) -> bytes | None:
        """Key of the first page under the salt of its scope; None without a scope or a page."""
        scope = seq.request.cache_scope
        return self._space.first_key(prompt_tokens(seq), scope) if scope else None

    def forget(self, seq_id: int) -> None:
        self._known.pop(seq_id, None)

    def clear(self) -> None:
        self._known.clear()


def prompt_tokens(seq: Sequence) -> list[int] | array[int]:
    """Tokens to prefill; made anew only after a preemption."""
    if seq.prefill_len == seq.prompt_len and seq.packed_prompt is not None:
        return seq.packed_prompt
    return seq.token_ids if len(seq.token_ids) == seq.prefill_len else seq.token_ids[: seq.prefill_len]
