"""Rebuilds what a former owner of the arena had stored: pages whose ancestors are intact, and states on those pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hicache.host_cache import HostCache
from hicache.host_pool import Owner
from hicache.index import NONE, StateReason
from hicache.records import Kind, Record, Records


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found. dropped: frames that were described but could not be used."""

    pages: int = 0
    states: int = 0
    dropped: int = 0


def recover(cache: HostCache, records: Records, intact: Callable[[int, Record], bool]) -> Recovery:
    """Fill an empty cache from the records. `intact(frame, record)` compares bytes with their checksum as far as it wants to.

    Frames without an intact record were being written, or their record was cut short; with them goes everything below them.
    """
    records.recover()
    found = {frame: record for frame in range(records.num_frames) if (record := records.read(frame)) is not None}
    pages = _pages(cache, found, intact)
    states = _states(cache, found, pages, intact)
    used = {*pages, *(frame for frames in states.values() for frame in frames)}
    cache.pool.hold(pages, Owner.PAGE)
    cache.inherit(pages)
    for page, frames in states.items():
        cache.pool.hold(frames, Owner.STATE)
        cache.index.add_state(page, frames, StateReason(found[frames[0]].reason))
    records.clear([frame for frame in found if frame not in used])
    return Recovery(len(pages), len(states), len(found) - len(used))


def _pages(cache: HostCache, found: dict[int, Record], intact: Callable[[int, Record], bool]) -> list[int]:
    size, kept = cache.page_tokens, dict[int, int]()  # frame -> end position
    described = [(record.position, frame) for frame, record in found.items() if record.kind is Kind.PAGE]
    for position, frame in sorted(described):
        record = found[frame]
        begin = kept.get(record.parent, -1) if record.parent != NONE else 0
        if begin != position - size or cache.index.find(record.key) != NONE or not intact(frame, record):
            continue
        kept[frame] = position
        cache.index.adopt(frame, record.key, record.parent, position, record.first_token, record.last_token)
    return list(kept)


def _states(cache: HostCache, found: dict[int, Record], pages: list[int], intact: Callable[[int, Record], bool]) -> dict[int, list[int]]:
    """Page -> frames of its state, for states whose frames are all there and describe one another."""
    present, kept = set(pages), dict[int, list[int]]()
    for frame, record in found.items():
        page = record.parent
        if record.kind is not Kind.STATE or page not in present or page in kept or found[page].key != record.key:
            continue
        frames, last = [frame], record
        while last.following != NONE and len(frames) < cache.frames_per_state:
            following = found.get(last.following)
            if following is None or following.kind is not Kind.MORE or following.key != record.key or last.following in frames:
                break
            frames.append(last.following)
            last = following
        complete = last.following == NONE and len(frames) == cache.frames_per_state
        if complete and all(intact(each, found[each]) for each in frames):
            kept[page] = frames
    return kept
