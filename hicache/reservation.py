"""Frames on their way into the index: reserve, then commit or abort, as a scope that cannot be left half done."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hicache.host_cache import HostCache
from hicache.host_pool import Owner
from hicache.index import StateReason


@dataclass(frozen=True, slots=True)
class NewPage:
    """A page to store: its key, the tokens it ends with, and the device block that holds it."""

    key: bytes
    position: int
    first_token: int
    last_token: int
    block: int


class PageReservation:
    """Frames for consecutive new pages of one path.

    Inside the scope the frames are invisible. `commit()` after the copies are enqueued makes the pages visible, pinned once each;
    leaving the scope without it (an exception, an early return) gives the frames back.
    """

    def __init__(self, cache: HostCache, pages: list[NewPage]) -> None:
        fitting = len(pages)
        if not cache.make_room(fitting):
            fitting = cache.pool.num_free
        self._cache = cache
        self.pages = pages[:fitting]
        self.frames = cache.pool.take(fitting)
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open:
            self._open = False
            self._cache.pool.free(self.frames)

    def commit(self, parent: int) -> list[int]:
        """Insert the pages below `parent` (-1: none). Returns their frames."""
        assert self._open, "the reservation is closed"
        self._open = False
        self._cache.pool.assign(self.frames, Owner.PAGE)
        for page, frame in zip(self.pages, self.frames, strict=True):
            self._cache.index.insert(page.key, parent, frame, page.position, page.first_token, page.last_token)
            parent = frame
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
