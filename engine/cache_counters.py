"""Counters of the prefix cache: in tokens, once per request, moved at successful admission and at commit only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine.page_mover import PageMover
from engine.request import Sequence
from hicache.host_cache import HostCache
from hicache.host_pool import Owner
from hicache.policy import Miss


@dataclass(slots=True)
class CacheCounters:
    """Cumulative since start. A request that bypasses the lookup is in no denominator."""

    lookups: int = 0
    lookup_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    peer_tokens: int = 0
    disk_tokens: int = 0
    resume_tokens: int = 0
    replayed_tokens: int = 0
    stores: int = 0
    store_tokens: int = 0
    restore_bytes: int = 0
    restore_seconds: float = 0.0
    store_bytes: int = 0
    store_seconds: float = 0.0
    checksum_errors: int = 0
    copy_errors: int = 0
    holds: int = 0
    hold_seconds: float = 0.0
    misses: Counter[str] = field(default_factory=Counter)
    store_skipped: Counter[str] = field(default_factory=Counter)
    states_written: Counter[str] = field(default_factory=Counter)
    state_hits: Counter[str] = field(default_factory=Counter)

    def admitted(self, seq: Sequence, tokens: int, reason: str) -> None:
        """A sequence starts with `tokens` restored. Only its first admission counts as a lookup."""
        if seq.cached_tokens is not None:
            self.resume_tokens += tokens
            return
        if reason == Miss.BYPASS:
            self.misses[reason] += 1
            return
        self.lookups += 1
        self.lookup_tokens += seq.prompt_len
        self.hit_tokens += tokens
        if tokens:
            self.hits += 1
            self.state_hits[reason] += 1
        else:
            self.misses[reason] += 1

    def restored(self, num_bytes: int, seconds: float) -> None:
        self.restore_bytes += num_bytes
        self.restore_seconds += seconds

    def held(self, seconds: float) -> None:
        """A sequence that waited for another one's prefill was admitted."""
        self.holds += 1
        self.hold_seconds += seconds

    def stored(self, num_pages: int, page_tokens: int, page_bytes: int, skipped: int) -> None:
        self.stores += num_pages
        self.store_tokens += num_pages * page_tokens
        self.store_bytes += num_pages * page_bytes
        if skipped:
            self.store_skipped["pinned"] += skipped

    def leaves(self, tokens_used: int) -> dict[str, Any]:
        """The counters by their metric names. tokens_used: that the arena holds now."""
        no_tier = {"hit_tokens_total": 0, "store_tokens_total": 0, "tokens_used": 0}
        return {
            "lookups_total": self.lookups,
            "lookup_tokens_total": self.lookup_tokens,
            "hits_total": self.hits,
            "hit_tokens_total": self.hit_tokens,
            "stores_total": self.stores,
            "store_tokens_total": self.store_tokens,
            "tiers": {
                "device": dict(no_tier),
                "host": {
                    "hit_tokens_total": self.hit_tokens - self.peer_tokens - self.disk_tokens,
                    "store_tokens_total": self.store_tokens,
                    "tokens_used": tokens_used,
                },
                "peer": {**no_tier, "hit_tokens_total": self.peer_tokens},
                "disk": {**no_tier, "hit_tokens_total": self.disk_tokens},
            },
            "resume_tokens_total": self.resume_tokens,
            "replayed_tokens_total": self.replayed_tokens,
            "restore_bytes_total": self.restore_bytes,
            "restore_seconds_total": self.restore_seconds,
            "store_bytes_total": self.store_bytes,
            "store_seconds_total": self.store_seconds,
            "checksum_errors_total": self.checksum_errors,
            "copy_errors_total": self.copy_errors,
            "holds_total": self.holds,
            "hold_seconds_total": self.hold_seconds,
            "miss_total": {reason.value: self.misses[reason.value] for reason in Miss},
            "store_skipped_total": dict(self.store_skipped),
            "states_written_total": dict(self.states_written),
            "state_hits_total": dict(self.state_hits),
        }


def arena_leaves(cache: HostCache, mover: PageMover) -> dict[str, Any]:
    """What the arena holds and what it has evicted."""
    pool, num_pages = cache.pool, cache.pool.count(Owner.PAGE)
    return {
        "evictions_total": cache.evicted_pages,
        "evicted_tokens_total": cache.evicted_pages * cache.page_tokens,
        "evicted_frames_total": dict(cache.evicted_frames),
        "frames": {
            "free": pool.num_free,
            "page": num_pages,
            "state": pool.count(Owner.STATE),
            "leased": pool.count(Owner.LEASED),
            "absent": pool.count(Owner.ABSENT),
        },
        "states": cache.index.num_states,
        "pinned_bytes": mover.pinned_bytes,
        "pageable": int(mover.pinned_bytes == 0),
        "arena_bytes": mover.arena.num_bytes,
        "frame_bytes": mover.arena.frame_bytes,
    }
