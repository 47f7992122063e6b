"""Answers that the next prompt is likely to contain: their pages and the window at their end are stored when they are complete."""

from __future__ import annotations

from engine.cache_store import PrefixWriter
from engine.prefix_plan import Match
from engine.request import FinishReason, Sequence
from hicache.config import HiCacheConfig
from hicache.host_cache import HostCache
from hicache.index import StateReason
from hicache.keys import KeySpace
from hicache.policy import align_down

_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class AnswerWriter:
    """Stores what decode steps have computed, once per answer, before its blocks are freed.

    Nothing is stored in between: nobody can ask for an answer that is not finished.
    """

    def __init__(self, config: HiCacheConfig, cache: HostCache, writer: PrefixWriter, keys: KeySpace) -> None:
        self._config, self._cache, self._writer, self._keys = config, cache, writer, keys

    def wanted(self, seq: Sequence) -> bool:
        """Whether `seq` has ended with an answer that is to be stored and that completes a page."""
        request, mode = seq.request, self._config.store_decode
        asked = mode == "on" or (mode == "auto" and request.cache_decode)
        complete = seq.finish_reason in _COMPLETE and bool(seq.block_table)
        return asked and complete and request.cache_write and self._end(seq) > seq.prefill_len

    def _end(self, seq: Sequence) -> int:
        """The last page end whose tokens are all computed. The last token never is: it was sampled, and ends the sequence."""
        return align_down(seq.num_computed, self._cache.page_tokens)

    def store(self, seq: Sequence, prompt_keys: list[bytes], epoch: int, num_known: int) -> None:
        """prompt_keys: of the pages that the prefill computed, made in `epoch`. num_known: how many of them were there when it came.

        Raises:
            MachineError: a copy was refused. What was stored before stays.
        """
        index, end = self._cache.index, self._end(seq)
        keys = self._keys.extend(prompt_keys, seq.token_ids[:end], seq.request.cache_salt)
        match = Match(seq, epoch, keys, index.match(keys), num_known=num_known)
        index.pin(match.path)
        try:
            self._writer.store_pages(seq, match, seq.prefill_len, end)
            self._writer.store_state(seq, match, end, StateReason.DECODE)
        finally:
            # Whether the prompt's pages were visited before, its prefill has said: an answer is no second visit.
            self._cache.unpin(match.path, match.use())
