"""The read side of the prefix cache: pages and a window state into a sequence's blocks and slot, and what to do about wrong bytes."""

from __future__ import annotations

import logging

from engine.cache_counters import CacheCounters
from engine.cache_pins import KeptPrefixes
from engine.page_mover import BAD_STATE, INTACT, PageMover
from engine.prefix_plan import Match
from engine.request import Sequence
from hicache.host_cache import HostCache
from hicache.index import NONE

log = logging.getLogger(__name__)


class PrefixReader:
    """Copies what a match pins. Bytes that fail their checksum are forgotten, also by pins of others, so that they are stored anew."""

    def __init__(self, cache: HostCache, mover: PageMover, counters: CacheCounters, kept: KeptPrefixes) -> None:
        self._cache, self._mover, self._counters, self._kept = cache, mover, counters, kept

    def copy_in(self, seq: Sequence, match: Match, tokens: int) -> int:
        """Copy pages and state, or the pages of a replay alone. Returns `tokens`, or 0 when the bytes are not those that were stored: then
        all is computed anew.

        Raises:
            MachineError: a copy was refused.
        """
        index, num_pages = self._cache.index, (match.replay_end or tokens) // self._cache.page_tokens
        if match.peer is not None:
            peer, match.peer = match.peer, None
            intact = self._mover.restore_from_peer(peer, seq.block_table[:num_pages], seq.state_slot)
            self._counters.peer_tokens += tokens if intact and seq.cached_tokens is None else 0
            self._counters.checksum_errors += not intact
            return tokens if intact else 0
        foreign = index.first_foreign(match.path[:num_pages], seq.token_ids, self._cache.page_tokens)
        if foreign is not None:
            log.error("the page of tokens %d.. lies under the key of other tokens; it is dropped", foreign * self._cache.page_tokens)
            self._counters.token_errors += 1
            self._drop(match, foreign)
            return 0
        if index.has_dropped(match.path):
            return 0
        frames = index.states.frames(match.state) if match.state != NONE else []
        bad = self._mover.restore(match.path[:num_pages], seq.block_table[:num_pages], frames, seq.state_slot, tokens)
        if bad == INTACT:
            return tokens
        self._counters.checksum_errors += 1
        self._drop(match, bad)
        return 0

    def _drop(self, match: Match, bad: int) -> None:
        """Forget what failed its checksum, so that it is stored anew: a state, or a page and everything below it."""
        state = match.state
        unpin_state(self._cache, match)
        self._kept.let_go_of(state if bad == BAD_STATE else match.path[bad])
        if bad == BAD_STATE:
            self._cache.index.drops += 1
            if self._cache.index.ref[state] == 0:
                self._cache.remove_state(state, "audit")
            return
        self._mover.forget(match.path[bad:])
        self._cache.drop(match.path[bad])
        self._cache.unpin(match.path[bad:])
        del match.path[bad:]
        match.num_hit, match.num_known = min(match.num_hit, bad), min(match.num_known, bad)


def unpin_state(cache: HostCache, match: Match) -> None:
    """Let go of a match's state, if it has one."""
    if match.state != NONE:
        cache.index.states.unpin(match.state)
        match.state = NONE
