"""The read side of admission: what a waiting sequence would restore, from where, and whether it is worth waiting for more."""

from __future__ import annotations

import time

from engine.cache_contract import PlanKind
from engine.cache_herd import Herd
from engine.cache_keys import SequenceKeys
from engine.cache_sources import CacheSources
from engine.page_mover import PageMover
from engine.prefix_plan import Match, Plan
from engine.request import Sequence
from hicache.config import HiCacheConfig
from hicache.host_cache import HostCache
from hicache.index import NONE, StateReason
from hicache.miss_history import MissHistory
from hicache.peers import PeerMatch
from hicache.policy import Miss, restore_cap
from hicache.replay import WindowReplay
from hicache.restore_budget import RestoreBudget


class PrefixLookup:
    """Matches a sequence and pins what it needs. Asks, in this order, the own arena, a replay, other ranks, prefills in progress, and the
    disk. keep_tokens: prompt tokens that are always recomputed.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        cache: HostCache,
        mover: PageMover,
        keys: SequenceKeys,
        sources: CacheSources,
        herd: Herd,
        replay: WindowReplay,
        misses: MissHistory,
        budget: RestoreBudget,
        keep_tokens: int,
    ) -> None:
        self._cache, self._mover, self._keys, self._sources, self._herd = cache, mover, keys, sources, herd
        self._replay, self._misses, self.budget = replay, misses, budget
        self._least, self._keep_tokens, self._page_tokens = config.min_restore_tokens, keep_tokens, cache.page_tokens
        self.fetched: dict[int, int] = {}  # waiting sequence -> tokens that were there before the disk was asked for more

    def find(self, seq: Sequence, match: Match) -> Plan:
        """The deepest usable state. Fills `match`; whoever gets the plan unpins what it holds."""
        index, request, began = self._cache.index, seq.request, time.perf_counter()
        if request.cache_read or request.cache_write:
            match.keys = self._keys.of(seq)
            if self.budget.exhausted and request.cache_read and index.match(match.keys[:1]):
                self.budget.charge(time.perf_counter() - began)
                return Plan(PlanKind.HOLD, 0, "restore_budget", match)  # looking up all of it in every step would cost more than it saves
            match.path = index.match(match.keys)
            match.num_hit = match.num_known = len(match.path)
            index.pin(match.path)
        if not request.cache_read:
            return Plan(PlanKind.MISS, 0, Miss.BYPASS, match)
        state, miss = self._cache.restore_point(match.path, seq.prefill_len, self._keep_tokens, self._least)
        tokens = index.position[state] if state != NONE else 0
        match.replay_end = self._replay.end(match.keys, len(match.path), seq.prefill_len, tokens)
        if match.replay_end:
            tokens, state, miss = match.replay_end - self._replay.tokens, NONE, None
        match.peer = self._find_at_peer(seq, match, tokens)
        if match.peer is not None:
            tokens, state, miss, match.replay_end = match.peer.tokens, NONE, None, 0
            match.num_known = max(match.num_known, tokens // self._page_tokens)
        if self._herd.holds(seq, match, tokens):
            return Plan(PlanKind.HOLD, 0, "in_flight", match)
        if self._comes_from_disk(seq, match, tokens):
            return Plan(PlanKind.HOLD, 0, "disk", match)
        if miss is not None:
            return Plan(PlanKind.MISS, 0, self._misses.refine(miss, match.keys[: self._cap(seq)], self._keys.scoped(seq)), match)
        if not self.budget.allows(self.restore_bytes(match, tokens)):
            self.budget.charge(time.perf_counter() - began)
            return Plan(PlanKind.HOLD, 0, "restore_budget", match)
        match.plan_seconds = time.perf_counter() - began
        return self._hit(match, tokens, state)

    def _hit(self, match: Match, tokens: int, state: int) -> Plan:
        if match.peer is not None:
            return Plan(PlanKind.HIT, tokens, "peer", match)
        if match.replay_end:
            return Plan(PlanKind.HIT, tokens, f"{self._replay.mode}_replay", match)
        self._cache.index.states.pin(state)
        match.state = state
        return Plan(PlanKind.HIT, tokens, StateReason(self._cache.index.states.reason[state]).name.lower(), match)

    def _cap(self, seq: Sequence) -> int:
        """Most pages that may be restored."""
        return restore_cap(seq.prefill_len, self._keep_tokens, self._page_tokens) // self._page_tokens

    def _find_at_peer(self, seq: Sequence, match: Match, own_tokens: int) -> PeerMatch | None:
        """A lease on what another rank holds of the prompt, when it reaches further than our own arena."""
        most_pages, least = self._cap(seq), max(own_tokens + self._page_tokens, self._least)
        return self._sources.lease(match.keys, most_pages, least) if most_pages * self._page_tokens >= least else None

    def _comes_from_disk(self, seq: Sequence, match: Match, tokens: int) -> bool:
        """Whether the disk is bringing more of the prompt than the `tokens` that could be restored now."""
        disk = self._sources.disk
        if disk is None:
            return False
        coming = disk.fetch(match.keys, seq.token_ids, match.path, self._cap(seq), tokens, match.epoch)
        if coming:
            self.fetched.setdefault(seq.seq_id, tokens)
        return coming

    def restore_bytes(self, match: Match, tokens: int) -> int:
        """What restoring `tokens` of a match copies."""
        if tokens == 0:
            return 0
        num_pages = (match.replay_end or tokens) // self._page_tokens
        return num_pages * self._mover.row_bytes + (0 if match.replay_end else self._mover.state_bytes)
