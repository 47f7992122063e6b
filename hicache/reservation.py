"""Frames on their way into the index: a scope that either commits or gives them back."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from hicache.host_cache import HostCache
from hicache.host_pool import Owner
from hicache.index import StateReason
from hicache.ranking import DEFAULT_PRIORITY


class PageReservation:
    """Frames for up to `count` consecutive new pages of one path; fewer when the rest of the arena is pinned.

    Inside the scope the frames are invisible. `commit()` after the copies are enqueued makes the pages visible, pinned once each;
    leaving the scope without it (an exception, an early return) gives the frames back.
    """

    def __init__(self, cache: HostCache, count: int) -> None:
        fits = count if cache.make_room(count) else cache.pool.num_free
        self._cache = cache
        self.frames = cache.pool.take(fits)
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open:
            self._open = False
            self._cache.pool.free(self.frames)

    def commit(
        self, parent: int, keys: Sequence[bytes], first_page: int, tokens: Sequence[int], priority: int = DEFAULT_PRIORITY
    ) -> list[int]:
        """Insert pages `first_page`, ... of the prompt `tokens` below `parent` (-1: none). Returns their frames.

        priority: a lower one than the default; a higher one comes with the whole path's `unpin`.
        """
        assert self._open, "the reservation is closed"
        self._open = False
        self._cache.pool.assign(self.frames, Owner.PAGE)
        self._cache.index.insert(parent, self.frames, keys, first_page, tokens, self._cache.page_tokens, min(priority, DEFAULT_PRIORITY))
        return self.frames


class StateReservation:
    """Frames for one window state at the last page of `path`. Same two exits; `frames` is empty when there is no room."""

    def __init__(self, cache: HostCache, path: list[int], *, evict: bool) -> None:
        self._cache, self._page = cache, path[-1]
        self.frames = cache.pool.take(cache.frames_per_state) if cache.room_for_state(path, evict=evict) else []
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open:
            self._open = False
            self._cache.pool.free(self.frames)

    def commit(self, reason: StateReason) -> int:
        """Make the state visible. Returns its id."""
        assert self._open, "the reservation is closed"
        assert self.frames, "nothing is reserved"
        self._open = False
        self._cache.pool.assign(self.frames, Owner.STATE)
        return self._cache.index.add_state(self._page, self.frames, reason)
