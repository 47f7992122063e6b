"""The store side of the prefix cache: pages chunk by chunk, window states where the policy wants them."""

from __future__ import annotations

import logging

from engine.cache_counters import CacheCounters
from engine.page_mover import PageMover
from engine.prefix_plan import Match
from engine.request import FinishReason, Sequence
from hicache.admission import AdmissionPolicy
from hicache.config import HiCacheConfig
from hicache.errors import MachineError
from hicache.host_cache import HostCache
from hicache.index import NONE, StateReason
from hicache.miss_history import MissHistory
from hicache.policy import align_down, prefill_states
from hicache.reservation import PageReservation, StateReservation

log = logging.getLogger(__name__)
_MOST_FAILURES = 3
MIN_ABORT_TOKENS = 4096  # computed tokens that make the state of an aborted prefill worth keeping


class CopyFailures:
    """Copies that the driver or the memory refused. After three in a row the cache is not used any more: the model goes on without."""

    def __init__(self, counters: CacheCounters) -> None:
        self._counters, self._in_a_row, self.off = counters, 0, False

    def worked(self) -> None:
        self._in_a_row = 0

    def failed(self, error: MachineError) -> None:
        self._counters.copy_errors += 1
        self._in_a_row += 1
        log.warning("a copy of the host cache failed: %s (%s)", error, error.hint)
        if self._in_a_row == _MOST_FAILURES and not self.off:
            self.off = True
            log.error("the host cache is switched off after %d failed copies in a row", _MOST_FAILURES)


class PrefixWriter:
    """Writes a sequence's pages and states into the arena. The sequence pins its own path, so its stores cannot evict it."""

    def __init__(
        self,
        config: HiCacheConfig,
        cache: HostCache,
        mover: PageMover,
        counters: CacheCounters,
        admission: AdmissionPolicy,
        misses: MissHistory,
        keep_tokens: int,
    ) -> None:
        self._config, self._cache, self._mover, self._counters = config, cache, mover, counters
        self._admission, self._misses = admission, misses
        self._keep_tokens, self._page_tokens = keep_tokens, cache.page_tokens

    def store_pages(self, seq: Sequence, match: Match, start: int, end: int) -> None:
        """Store every complete page that is absent. Also pages of earlier chunks that found no room: their blocks are still here."""
        index, size = self._cache.index, self._page_tokens
        upto = min(end // size, len(match.keys))
        present = index.match(match.keys[len(match.path) : upto])
        index.pin(present)
        match.path += present
        first = len(match.path)
        admitted = first + self._admission.admits(match.keys[first:upto])
        if admitted < upto:
            self._counters.store_skipped["threshold"] += upto - max(admitted, start // size)
            upto = admitted
        if first >= upto:
            return
        with PageReservation(self._cache, upto - first) as reservation:
            frames = reservation.frames
            until = first + len(frames)
            self._mover.store_pages(seq.block_table[first:until], frames)
            parent = match.path[-1] if match.path else NONE
            reservation.commit(parent, match.keys[first:until], first, seq.token_ids, seq.request.cache_priority)
        self._mover.publish_pages(index, frames)
        match.path += frames
        skipped = max(0, upto - max(until, start // size))  # of this chunk; what a former one found no room for was counted then
        self._counters.stored(len(frames), size, self._mover.row_bytes, skipped)

    def store_end_states(self, seq: Sequence, match: Match) -> None:
        """Keep the windows at s0 and, if frames are free, at s1."""
        for position, reason in prefill_states(seq.prefill_len, self._keep_tokens, self._page_tokens):
            if reason is StateReason.RESEND or self._config.store_tail_state:
                self.store_state(seq, match, position, reason)

    def store_state(self, seq: Sequence, match: Match, position: int, reason: StateReason) -> None:
        """Keep the window at `position`, a page end that the sequence's rings still reach."""
        path = match.path[: position // self._page_tokens]
        if len(path) * self._page_tokens < position:
            self._counters.store_skipped["no_page"] += 1
            return
        if self._cache.reuse_state(path[-1], reason):
            return
        if reason in (StateReason.FORK, StateReason.ASKED):
            self._cache.limit_forks(path, self._config.states_per_path)
        with StateReservation(self._cache, path, evict=reason is not StateReason.TAIL) as reservation:
            if not reservation.frames:
                self._counters.store_skipped["no_state_frames"] += 1
                return
            self._mover.store_state(seq.state_slot, position, reservation.frames)
            state = reservation.commit(reason)
        self._mover.publish_state(self._cache.index, state)
        self._misses.state_stored(match.keys[len(path) - 1])
        self._counters.states_written[reason.name.lower()] += 1
        self._counters.store_bytes += self._mover.state_bytes

    def states_missing(self, seq: Sequence, match: Match) -> list[bytes]:
        """Keys of the pages at whose end an unfinished prefill has not kept the states that it would have kept."""
        ends = [position for position, _ in prefill_states(seq.prefill_len, self._keep_tokens, self._page_tokens)]
        state_of, size = self._cache.index.states.of, self._page_tokens
        missing = [p // size - 1 for p in {*match.wanted, *ends}]
        return [match.keys[at] for at in missing if at >= len(match.path) or state_of[match.path[at]] == NONE]

    def snapshot(self, seq: Sequence, match: Match) -> None:
        """Keep the window at the last page end of a long prefill that is cut off, else its stored pages could not be entered.

        Not after a failed forward pass: its window is not to be trusted, nor is one within a replay. The rings reach back one page and
        `keep_tokens`.
        """
        position = align_down(min(seq.num_computed, len(match.path) * self._page_tokens), self._page_tokens)
        broken = seq.finish_reason is FinishReason.ERROR or self._cache.index.has_dropped(match.path)
        if broken or position < max(MIN_ABORT_TOKENS, seq.entries_start):
            return
        if seq.num_computed - position > self._page_tokens + self._keep_tokens:
            return
        self.store_state(seq, match, position, StateReason.ABORT)
