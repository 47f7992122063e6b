"""What must hold between pool and index after every operation, asserted by looking at all entries. For tests and debugging."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hicache.host_pool import Owner
from hicache.recency import NONE

if TYPE_CHECKING:
    from hicache.host_cache import HostCache


def check_cache(cache: HostCache) -> None:
    """Raises AssertionError that names what is broken. O(entries)."""
    pages = set(cache.index.pages())
    _check_frames(cache, pages)
    _check_paths(cache, pages)
    if not cache.index.num_dropped:
        _check_counts(cache, pages)
    _check_order(cache, pages)


def _states(cache: HostCache, pages: set[int]) -> list[int]:
    of = cache.index.states.of
    return [of[page] for page in pages if of[page] != NONE]


def _check_frames(cache: HostCache, pages: set[int]) -> None:
    """Every frame is in exactly one of: free, one page, one state, given away."""
    pool, index = cache.pool, cache.index
    held = {owner: pool.count(owner) for owner in Owner}
    assert sum(held.values()) == pool.num_frames, f"frames do not add up: {held}"
    assert len(pages) == len(index)
    assert all(pool.owner(page) is Owner.PAGE for page in pages)
    frames = [frame for state in _states(cache, pages) for frame in index.states.frames(state)]
    assert len(set(frames)) == len(frames)
    assert all(pool.owner(frame) is Owner.STATE for frame in frames)


def _check_paths(cache: HostCache, pages: set[int]) -> None:
    """Parents are present, pinned at least as often, and once nothing pins a page, rank at least as high."""
    index = cache.index
    rank, children = index.ranks.of, Counter[int]()
    for page in pages:
        parent = index.parent[page]
        if parent == NONE:
            continue
        children[parent] += 1
        assert parent in pages, f"page {page} lost its parent {parent}"
        assert index.ref[parent] >= index.ref[page], f"page {page} is pinned more often than its parent"
        assert index.ref[page] or rank[parent] >= rank[page], f"page {page} ranks above its parent"
    assert all(index.num_children[page] == children[page] for page in pages)


def _check_counts(cache: HostCache, pages: set[int]) -> None:
    """Running counts agree with what is there. Not while dropped pages are still pinned."""
    index, ranks = cache.index, cache.index.ranks
    assert index.num_pinned == sum(index.ref[page] > 0 for page in pages)
    of_rank = Counter(ranks.of[page] for page in pages)
    assert {rank: count for rank, count in enumerate(ranks.num_pages) if count} == dict(of_rank)
    assert ranks.num_raised == sum(map(index.is_raised, pages))
    assert ranks.num_protected == sum(ranks.of[page] & 1 for page in pages)
    states = _states(cache, pages)
    assert len(index.states) == len(states)
    reached = {page for state in states for page in index.path_to(index.parent[state])}
    assert index.states.num_unreachable == len(pages - reached)


def _check_order(cache: HostCache, pages: set[int]) -> None:
    """Unpinned pages are listed, and every one leaves before its parent."""
    index = cache.index
    listed = list(index.by_recency())
    assert set(listed) == {page for page in pages if index.ref[page] == 0}
    place = {page: at for at, page in enumerate(listed)}
    assert all(place[page] < place.get(index.parent[page], len(listed)) for page in listed), "a page is more recent than its parent"
