"""The disk below the arena: what is worth writing goes there in small batches, what a prompt misses comes back before its prefill.

Bytes from disk go into the arena only, never straight to the device. A sequence whose prefix is being read waits like a follower of
another one's prefill.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any

from engine.page_mover import PageMover
from hicache.disk import DiskStore, Item, WriteResult
from hicache.disk_file import NO_PARENT, Entry
from hicache.errors import MachineError
from hicache.host_cache import HostCache
from hicache.host_pool import Owner
from hicache.index import NONE, StateReason
from hicache.priority import Use
from hicache.records import Kind

log = logging.getLogger(__name__)
_BATCH_BYTES = 16 * 2**20
_LOOKED_AT, _COMPARED = 1024, 16  # most recent states, and how many of them that are not on disk compete for the next batch
_WALKED_PAGES = 256  # of a path, to see how much of it is on disk
_LOAD_PATIENCE_S = 5.0  # a disk that takes longer is not waited for
_MOST_ARENA_SHARE = 0.5  # of the frames that one prompt may take back from disk
_REST = 4.0  # pause after a batch, in durations of the batch: writing takes at most a fifth of one thread
_HALF_LIFE_S = 6 * 3600.0
_REMEMBERED_HITS = 4096


@dataclass(slots=True, eq=False)
class _Spill:
    """A batch on its way to disk. Its frames may be given back meanwhile, but are used again only after it has arrived."""

    frames: set[int]
    result: Future[WriteResult]


@dataclass(slots=True, eq=False)
class _Load:
    """A prefix on its way into the arena. path: pinned pages that are there. frames: reserved, one per page, then the state's."""

    epoch: int
    keys: list[bytes]
    tokens: Sequence[int]
    path: list[int]
    pages: list[int]
    state: list[int]
    reason: StateReason
    began_s: float
    result: Future[list[list[int]]]


class DiskTier:
    """One rank's use of its `DiskStore`. Engine thread only; `step` takes in what the disk has finished.

    min_tokens: a shorter missing part is recomputed sooner than read.
    """

    def __init__(
        self, store: DiskStore, cache: HostCache, mover: PageMover, min_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store, self._cache, self._mover, self._min_tokens, self._clock = store, cache, mover, min_tokens, clock
        self._spill: _Spill | None = None
        self._rest_until_s = 0.0
        self._loads: dict[bytes, _Load] = {}  # by the key of the last page
        self._hits: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # state's key -> decayed hits, when
        self.loaded_pages = 0
        self.loaded_states = 0
        self.closed = False
        # No pins: giving those back would make what was written the most recent.
        cache.pool.watch_leases(lambda frames: self._spill.frames.intersection(frames) if self._spill is not None else ())

    # -- from disk ---------------------------------------------------------------------------------------------------------

    def fetch(self, keys: list[bytes], tokens: Sequence[int], path: list[int], most_pages: int, own_tokens: int, epoch: int) -> bool:
        """Whether more of a prompt is on its way from disk, after beginning to read it if that is worth it.

        keys, tokens: of the whole prompt. path: its pages in the arena. own_tokens: what the arena alone can restore.
        """
        size = self._cache.page_tokens
        if self._loads:
            coming = [self._loads[key] for key in keys[max(0, len(path) - 1) : most_pages] if key in self._loads]
            if coming:
                return self._clock() - coming[-1].began_s < _LOAD_PATIENCE_S
        reach = self.store.reach(keys, len(path), most_pages)
        if reach * size - own_tokens < self._min_tokens:
            return False
        return self._load(keys[:reach], tokens, path[:reach], epoch)

    def _load(self, keys: list[bytes], tokens: Sequence[int], path: list[int], epoch: int) -> bool:
        """Begin to read the pages after `path` and the state at the end of `keys`. False when there is no room."""
        cache, store = self._cache, self.store
        with_state = len(path) < len(keys) or cache.index.states.of[path[-1]] == NONE
        need = len(keys) - len(path) + (cache.frames_per_state if with_state else 0)
        if need > cache.pool.num_frames * _MOST_ARENA_SHARE:
            return False
        cache.index.pin(path)
        if not cache.make_room(need):
            cache.unpin(path)
            return False
        frames = cache.pool.take(need)
        try:
            self._mover.reserve(frames)
        except MachineError as error:
            log.warning("no room for what is on disk: %s (%s)", error, error.hint)
            cache.pool.free(frames)
            cache.unpin(path)
            return False
        pages, state = frames[: len(keys) - len(path)], frames[len(keys) - len(path) :]
        slots = [store.pages[key] for key in keys[len(path) :]]
        into = [[self._mover.frame(frame)] for frame in pages]
        if state:
            slots.append(store.states[keys[-1]])
            into.append([self._mover.frame(frame) for frame in state])
        reason = StateReason(store.states[keys[-1]].entry.reason)
        result = store.read(slots, into, self._mover.fence())
        self._loads[keys[-1]] = _Load(epoch, keys, tokens, path, pages, state, reason, self._clock(), result)
        return True

    def _arrive(self, load: _Load, epoch: int) -> None:
        """Enter what was read into the index; what another sequence stored meanwhile is there already."""
        cache, index = self._cache, self._cache.index
        checksums = load.result.result()
        begin, intact = len(load.path), min(len(checksums), len(load.pages))
        if intact < len(load.pages) or (load.state and len(checksums) == len(load.pages)):
            self.store.forget([load.keys[begin + intact] if intact < len(load.pages) else load.keys[-1]])
        if epoch != load.epoch or index.has_dropped(load.path):
            cache.pool.free([*load.pages, *load.state])
            cache.unpin(load.path)
            return
        present = index.match(load.keys)
        index.pin(present[begin:])
        first = max(begin, len(present))
        fresh = load.pages[first - begin : intact]
        used = set(fresh)
        cache.pool.free([frame for frame in load.pages if frame not in used])
        pinned = [*load.path, *present[begin:]]
        if fresh:
            cache.pool.assign(fresh, Owner.PAGE)
            index.insert(
                pinned[-1] if pinned else NONE, fresh, load.keys[first : first + len(fresh)], first, load.tokens, cache.page_tokens
            )
            self._mover.adopt(fresh, [checksums[first - begin + i][0] for i in range(len(fresh))])
            self._mover.publish_pages(index, fresh)
            self.loaded_pages += len(fresh)
        pinned += fresh
        self._place_state(load, pinned, checksums)
        cache.unpin(pinned, Use())  # pages above the fresh ones rank at least as high from now on

    def _place_state(self, load: _Load, path: list[int], checksums: list[list[int]]) -> None:
        cache, index = self._cache, self._cache.index
        complete = bool(load.state) and len(checksums) == len(load.pages) + 1 and len(path) == len(load.keys)
        if not complete or index.states.of[path[-1]] != NONE:
            cache.pool.free(load.state)
            return
        cache.pool.assign(load.state, Owner.STATE)
        state = index.add_state(path[-1], load.state, load.reason)
        self._mover.adopt(load.state, checksums[-1])
        self._mover.publish_state(index, state)
        self.loaded_states += 1

    # -- to disk -----------------------------------------------------------------------------------------------------------

    def step(self, epoch: int) -> None:
        """Take in what the disk has finished, and give it the next batch."""
        for key in [key for key, load in self._loads.items() if load.result.done()]:
            self._arrive(self._loads.pop(key), epoch)
        if self._spill is not None and self._spill.result.done():
            self._finish_spill(self._spill)
        if self._spill is None and self._clock() >= self._rest_until_s:
            self._spill_next()

    def _finish_spill(self, spill: _Spill) -> None:
        self._spill = None
        result = spill.result.result()
        self.store.written(result)
        self._rest_until_s = self._clock() + _REST * result.seconds
        if result.damaged is not None:
            self._drop(result.damaged)

    def _drop(self, entry: Entry) -> None:
        """Its bytes in the arena are no longer those that were stored."""
        index = self._cache.index
        page = index.find(entry.key)
        if page == NONE:
            return
        if entry.kind is Kind.PAGE:
            self._cache.drop(page)
        elif index.states.of[page] != NONE and index.ref[index.states.of[page]] == 0:
            self._cache.remove_state(index.states.of[page], "audit")

    def note_hit(self, key: bytes) -> None:
        """A prompt resumed at the state of that page."""
        self._hits[key] = self._decayed(key) + 1, self._clock()
        self._hits.move_to_end(key)
        if len(self._hits) > _REMEMBERED_HITS:
            self._hits.popitem(last=False)

    def _decayed(self, key: bytes) -> float:
        hits, at = self._hits.get(key, (0.0, 0.0))
        return hits * 0.5 ** ((self._clock() - at) / _HALF_LIFE_S) if hits else 0.0

    def _spill_next(self) -> bool:
        """Begin to write the most valuable state that is not on disk, its pages first. False when there is nothing to write."""
        if self.store.full:
            return False
        index, on_disk = self._cache.index, self.store.states
        recent = islice(index.states.by_recency(), _LOOKED_AT)
        candidates = list(islice((state for state in recent if index.key(index.parent[state]) not in on_disk), _COMPARED))
        if not candidates:
            self._rest_until_s = self._clock() + 0.1
            return False
        self._write(max(candidates, key=self._score))
        return True

    def _score(self, state: int) -> float:
        """(decayed hits + 1) times the tokens that it saves, per byte to write. A tail state is of use to grown prompts only."""
        index, layout = self._cache.index, self.store.layout
        page, missing = index.parent[state], 0
        while page != NONE and index.key(page) not in self.store.pages:
            missing += 1
            if missing == _WALKED_PAGES:
                missing = index.position[state] // self._cache.page_tokens
                break
            page = index.parent[page]
        num_bytes = layout.record_bytes(Kind.STATE) + missing * layout.record_bytes(Kind.PAGE)
        likely = 0.5 if index.states.reason[state] in (StateReason.TAIL, StateReason.DECODE) else 1.0
        return likely * (self._decayed(index.key(index.parent[state])) + 1) * index.position[state] / num_bytes

    def _write(self, state: int) -> None:
        """One batch: pages of the state's path that are not on disk, root first, and the state itself once all are."""
        index, layout = self._cache.index, self.store.layout
        path = index.path_to(index.parent[state])
        keys = [index.key(page) for page in path]
        batch: list[Item] = []
        room = max(1, _BATCH_BYTES // layout.record_bytes(Kind.PAGE))
        missing = [i for i, key in enumerate(keys) if key not in self.store.pages]
        for i in missing[:room]:
            page, parent = path[i], keys[i - 1] if i else NO_PARENT
            tokens = index.first_token[page], index.last_token[page]
            batch.append(self._item(Entry(Kind.PAGE, keys[i], parent, index.position[page], *tokens, 0), [page]))
        reading = {path[i] for i in missing[:room]}
        if len(missing) <= room:
            frames = index.states.frames(state)
            reading.update(frames)
            parent = keys[-2] if len(keys) > 1 else NO_PARENT
            batch.append(self._item(Entry(Kind.STATE, keys[-1], parent, index.position[state], 0, 0, index.states.reason[state]), frames))
        self._spill = _Spill(reading, self.store.write(batch, self._mover.fence()))

    def _item(self, entry: Entry, frames: list[int]) -> Item:
        mover = self._mover
        return Item(entry, [mover.frame(frame) for frame in frames], [mover.checksum(frame) for frame in frames])

    def leaves(self) -> dict[str, Any]:
        """Counters and gauges, numbers only."""
        store = self.store
        return {
            "bytes": store.num_bytes,
            "pages": len(store.pages),
            "states": len(store.states),
            "full": int(store.full),
            "loads_total": store.counters.loads,
            "loaded_pages_total": self.loaded_pages,
            "loaded_states_total": self.loaded_states,
            "read_bytes_total": store.counters.read_bytes,
            "written_bytes_total": store.counters.written_bytes,
            "errors_total": dict(store.counters.errors),
        }

    # -- end ---------------------------------------------------------------------------------------------------------------

    def settle(self, epoch: int) -> None:
        """Wait for what is under way."""
        if self._spill is not None:
            self._spill.result.result()
            self._finish_spill(self._spill)
        for key in list(self._loads):
            self._arrive(self._loads.pop(key), epoch)

    def close(self, epoch: int, seconds: float) -> None:
        """Write what is most valuable for at most `seconds`, then let go of the directory. Idempotent."""
        if self.closed:
            return
        deadline = self._clock() + seconds
        self.settle(epoch)
        while self._clock() < deadline and self._spill_next():
            self.settle(epoch)
        self.store.close()
        self.closed = True
