"""Prefixes that were pinned on request, for a time and within a share of the arena."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from hicache.host_cache import HostCache

MOST_SHARE = 0.2  # of all frames; the rest is left to traffic


@dataclass(slots=True, eq=False)
class _Kept:
    """One prefix: its pages from the root, the states on them, and when it may go."""

    path: list[int]
    states: list[int]
    until_s: float


class KeptPrefixes:
    """Holds pins of its own on paths and their states, so that eviction passes them by. Engine thread only."""

    def __init__(self, cache: HostCache, clock: Callable[[], float]) -> None:
        self._cache, self._clock = cache, clock
        self._kept: dict[bytes, _Kept] = {}  # by the key of the prompt's last page, stored or not
        self._frames: Counter[int] = Counter()  # of all of them; prefixes share pages
        self._next_end_s = math.inf

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_frames(self) -> int:
        return len(self._frames)

    def keep(self, keys: list[bytes], ttl_s: float) -> dict[str, Any]:
        """Pin what is stored of a prompt for `ttl_s` seconds from now; 0 lets go of it, infinity keeps it to the end. Returns tokens.

        Raises:
            ConfigError: more than the share of the arena that may be pinned.
        """
        index = self._cache.index
        path = index.match(keys)
        if not path:
            return {"pinned_tokens": 0, "restorable_tokens": 0}
        key = keys[-1]
        states = index.states.on(path)
        restorable = index.position[states[-1]] if states else 0
        frames = [*path, *(frame for state in states for frame in index.states.frames(state))]
        if ttl_s > 0:
            self._check_room(frames)  # before the earlier pin of the same prompt goes: a refusal leaves that as it is
        if (known := self._kept.pop(key, None)) is not None:
            self._release(known)
        if ttl_s == 0:
            return {"pinned_tokens": 0, "restorable_tokens": restorable}
        index.pin(path)
        for state in states:
            index.states.pin(state)
        self._frames.update(frames)
        self._kept[key] = _Kept(path, states, self._clock() + ttl_s)
        self._next_end_s = min(self._next_end_s, self._kept[key].until_s)
        return {"pinned_tokens": len(path) * self._cache.page_tokens, "restorable_tokens": restorable}

    def _check_room(self, frames: list[int]) -> None:
        most = int(MOST_SHARE * self._cache.pool.num_frames)
        total = len(self._frames.keys() | set(frames))
        if total > most:
            raise ConfigError(
                f"pinning this prefix would keep {total} frames of the arena",
                hint=f"at most {most} ({MOST_SHARE:.0%}) may be pinned: let go of others (ttl_s 0), or raise --hicache-size-gb",
            )

    def expire(self) -> None:
        """Let go of what has had its time. Called in every step; O(1) while nothing has."""
        now = self._clock()
        if now < self._next_end_s:
            return
        for key in [key for key, kept in self._kept.items() if kept.until_s <= now]:
            self._release(self._kept.pop(key))
        self._next_end_s = min((kept.until_s for kept in self._kept.values()), default=math.inf)

    def clear(self) -> None:
        """Let go of everything: the cache was reset."""
        for kept in self._kept.values():
            self._release(kept)
        self._kept.clear()
        self._next_end_s = math.inf

    def let_go_of(self, frame: int) -> None:
        """A page or state turned out to be damaged: nothing that builds on it stays."""
        for key in [key for key, kept in self._kept.items() if frame in kept.path or frame in kept.states]:
            self._release(self._kept.pop(key))

    def _release(self, kept: _Kept) -> None:
        index = self._cache.index
        for state in kept.states:
            self._frames.subtract(index.states.frames(state))
            index.states.unpin(state)
        self._frames.subtract(kept.path)
        self._frames = +self._frames
        self._cache.unpin(kept.path)
