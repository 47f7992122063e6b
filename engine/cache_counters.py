"""Counters of the prefix cache: in tokens, once per request, moved at successful admission and at commit only."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from engine.page_mover import PageMover
from engine.request import Sequence
from hicache.host_cache import HostCache
from hicache.host_pool import Owner
from hicache.policy import Miss
from hicache.ranking import DEFAULT_PRIORITY

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(slots=True)
class Durations:
    """Seconds of the engine's thread, in sum and by size."""

    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1

    def buckets(self) -> dict[str, int]:
        """How many took up to each bound."""
        return dict(zip([*map(str, BOUNDS_S), "+Inf"], accumulate(self.counts), strict=True))


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
    restore_times: Durations = field(default_factory=Durations)
    store_bytes: int = 0
    store_times: Durations = field(default_factory=Durations)
    checksum_errors: int = 0
    token_errors: int = 0
    copy_errors: int = 0
    holds: int = 0
    hold_times: Durations = field(default_factory=Durations)
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
        self.restore_times.add(seconds)

    def held(self, seconds: float) -> None:
        """A sequence that waited for another one's prefill was admitted."""
        self.holds += 1
        self.hold_times.add(seconds)

    def stored_for(self, seconds: float) -> None:
        """Storing a chunk or an answer took the engine's thread that long."""
        self.store_times.add(seconds)

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
            "restore_seconds_total": self.restore_times.seconds,
            "restore_seconds_buckets_total": self.restore_times.buckets(),
            "store_bytes_total": self.store_bytes,
            "store_seconds_total": self.store_times.seconds,
            "store_seconds_buckets_total": self.store_times.buckets(),
            "checksum_errors_total": self.checksum_errors,
            "token_errors_total": self.token_errors,
            "copy_errors_total": self.copy_errors,
            "holds_total": self.holds,
            "hold_seconds_total": self.hold_times.seconds,
            "hold_seconds_buckets_total": self.hold_times.buckets(),
            "miss_total": {reason.value: self.misses[reason.value] for reason in Miss},
            "store_skipped_total": dict(self.store_skipped),
            "states_written_total": dict(self.states_written),
            "state_hits_total": dict(self.state_hits),
        }


def arena_leaves(cache: HostCache, mover: PageMover) -> dict[str, Any]:
    """What the arena holds and what it has evicted."""
    pool, num_pages = cache.pool, cache.pool.count(Owner.PAGE)
    default = sum(cache.index.ranks.num_pages[2 * DEFAULT_PRIORITY : 2 * DEFAULT_PRIORITY + 2])
    return {
        "evictions_total": cache.evicted_pages,
        "evicted_tokens_total": cache.evicted_pages * cache.page_tokens,
        "evicted_frames_total": dict(cache.evicted_frames),
        "frames": {
            "free": pool.num_free,
            "page": num_pages - cache.index.num_pinned,
            "pinned": cache.index.num_pinned,
            "state": pool.count(Owner.STATE),
            "leased": pool.count(Owner.LEASED),
            "absent": pool.count(Owner.ABSENT),
        },
        "states": len(cache.index.states),
        "pages_unreachable": cache.index.states.num_unreachable,
        "priority_pages": {
            "low": len(cache.index) - cache.index.ranks.num_raised - default,
            "default": default,
            "high": cache.index.ranks.num_raised,
        },
        "priorities_refused_total": cache.refused_priorities,
        "transfer": {mover.transfer.name: 1},
        "pinned_bytes": mover.pinned_bytes,
        "pageable": int(mover.pinned_bytes == 0),
        "arena_bytes": mover.arena.num_bytes,
        "frame_bytes": mover.arena.frame_bytes,
    }
