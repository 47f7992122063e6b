"""Why a conversation took fewer tokens from the prefix cache than its history predicts, judged by the server's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ArenaCounts:
    """Sums over ranks. free_frames: of the rank that has fewest, None where the server does not tell."""

    evicted_frames: int = 0
    states_without_frames: int = 0
    free_frames: int | None = None
    arena_bytes: int = 0

    @staticmethod
    def of(metrics: Mapping[str, Any]) -> ArenaCounts:
        """From `/deepinfer/metrics`; all zero where the server has no such route."""
        caches = [rank.get("prefix_cache") or {} for rank in metrics.get("ranks") or []]
        free = [int(cache["frames"]["free"]) for cache in caches if "free" in (cache.get("frames") or {})]
        return ArenaCounts(
            sum(int(number) for cache in caches for number in (cache.get("evicted_frames_total") or {}).values()),
            sum(int((cache.get("store_skipped_total") or {}).get("no_state_frames", 0)) for cache in caches),
            min(free, default=None),
            max((int(cache.get("arena_bytes", 0)) for cache in caches), default=0),
        )


def why_not_as_predicted(cached: int, predicted: int, without_tails: int, before: ArenaCounts, after: ArenaCounts) -> str:
    """One sentence. without_tails: what is predicted where no prompt left a state at its last page end. Counts: around the conversation."""
    if cached > predicted:
        return "another run or client has stored more of this conversation"
    full = (
        after.states_without_frames > before.states_without_frames or after.evicted_frames > before.evicted_frames or after.free_frames == 0
    )
    size = f" (--hicache-size-gb, now {after.arena_bytes / 2**30:.3g} GiB a rank)" if after.arena_bytes else " (--hicache-size-gb)"
    if cached == without_tails and full:
        return f"the arena is full, and the state at a prompt's last page end is only kept while frames are free{size}"
    if cached == without_tails:
        return "the state at the last page end of the prompt before was not kept (hicache.store_tail_state, --hicache-state-slots)"
    if full:
        return f"the arena is full, and what this conversation had stored was evicted{size}"
    return "dix cache explain shows what is stored"
