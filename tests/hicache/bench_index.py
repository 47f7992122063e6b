"""Cost of the index at the size of a 64 GiB arena: `python -m tests.hicache.bench_index`. CPU time, so that neighbours do not count.

The compiled map of pages and the dictionary take turns, path by path. Prints one JSON line per figure: microseconds per page (median over
paths of 781 pages = 100,000 tokens), bytes, milliseconds. About a minute.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hicache.host_cache import HostCache
from hicache.index import NONE
from hicache.keys import KeySpace
from hicache.native_keys import open_chain
from hicache.native_page_map import open_page_map
from hicache.page_map import DictPageMap
from hicache.reservation import PageReservation
from hicache.segment import RECORD_BYTES

NUM_FRAMES, PAGES_PER_PATH, PAGE_TOKENS = 600_000, 781, 128
EVICTIONS, EVICTED_TOGETHER = 100, 256


def cpu_us(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e3


def report(name: str, value: float, unit: str, target: float | None = None, **facts: object) -> None:
    line = {"schema": "dix.bench/1", "id": f"c.index.{name}", "value": round(value, 3), "unit": unit, **facts}
    print(json.dumps(line if target is None else {**line, "must": target}), flush=True)


class Subject:
    """One cache, what its operations took, and paths of it that are looked up again."""

    def __init__(self, cache: HostCache) -> None:
        self.cache, self.kind = cache, cache.index.map.name
        self.times_us: dict[str, list[float]] = {}
        self.taken: list[int] = []

    def timed(self, operation: str, pages: int, work: Callable[[], object]) -> None:
        self.times_us.setdefault(operation, []).append(cpu_us(work) / pages)

    def insert(self, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        with PageReservation(self.cache, len(keys)) as reservation:
            path = reservation.commit(NONE, keys, 0, tokens)
        self.cache.unpin(path)

    def touch(self, keys: Sequence[bytes]) -> None:
        path = self.cache.index.match(keys)
        assert len(path) == len(keys)
        self.cache.index.pin(path)
        self.cache.unpin(path)

    def evict(self, pages: int, times: int) -> None:
        """Room for `pages`, as a store wants it, and again. Taking the frames is not counted: that is the pool's work."""
        pool, spent_us = self.cache.pool, 0.0
        for _ in range(times):
            spent_us += cpu_us(lambda: self.cache.make_room(pages))
            self.taken += pool.take(pages)
        self.times_us.setdefault(f"evict_{pages}", []).append(spent_us / pages / times)


def hashing(space: KeySpace, tokens: list[int]) -> float:
    return statistics.median(cpu_us(lambda: space.page_keys(tokens)) for _ in range(9)) / PAGES_PER_PATH


def run(subjects: list[Subject], tokens: list[int]) -> None:
    paths: list[list[bytes]] = []
    for number in range(NUM_FRAMES // PAGES_PER_PATH):
        keys = [os.urandom(32) for _ in range(PAGES_PER_PATH)]
        for subject in subjects[:: 1 if number % 2 else -1]:
            subject.timed("insert", len(keys), lambda keys=keys, subject=subject: subject.insert(keys, tokens))  # type: ignore[misc]
        if number % 5 == 0:
            paths.append(keys)
    for number, keys in enumerate(paths):
        for subject in subjects[:: 1 if number % 2 else -1]:
            subject.timed("match_touch", len(keys), lambda keys=keys, subject=subject: subject.touch(keys))  # type: ignore[misc]
            subject.timed("match", len(keys), lambda keys=keys, subject=subject: subject.cache.index.match(keys))  # type: ignore[misc]
    paths.clear()
    for subject in subjects:
        subject.taken += subject.cache.pool.take(subject.cache.pool.num_free)
    for pages in (PAGES_PER_PATH, 64, 1):
        for number in range(EVICTIONS):
            for subject in subjects[:: 1 if number % 2 else -1]:
                subject.evict(pages, max(1, EVICTED_TOGETHER // pages))
    for subject in subjects:
        subject.cache.pool.free(subject.taken)


def main() -> int:
    tokens = [i * 7919 % 129_280 for i in range(PAGE_TOKENS * PAGES_PER_PATH)]
    space = KeySpace("bench", "", PAGE_TOKENS)
    report("hash_python", hashing(space, tokens), "us/page", 2.0)
    with tempfile.TemporaryDirectory() as scratch:
        space.chain, make_map = open_chain(Path(scratch)), open_page_map(Path(scratch))
    if space.chain is not None:
        report("hash", hashing(space, tokens), "us/page", 2.0)
    if make_map is None:
        print("no compiler: only the dictionary is measured", file=sys.stderr)
    gc.collect()
    gc.freeze()
    subjects = []
    for make in (make_map, DictPageMap):
        if make is not None:
            cache = HostCache(NUM_FRAMES, PAGE_TOKENS, 13)
            cache.index.use_map(make(NUM_FRAMES))
            subjects.append(Subject(cache))
    run(subjects, tokens)
    for subject in subjects:
        for operation, times in subject.times_us.items():
            report(operation, statistics.median(times), "us/page", 2.0, map=subject.kind, worst=round(max(times), 3))
        refill(subject, tokens)
        pool = subject.cache.pool.metadata_bytes
        facts = {"map": subject.kind, "keys": round(subject.cache.index.map.num_bytes / NUM_FRAMES, 1), "pool": pool / NUM_FRAMES}
        report("metadata", subject.cache.metadata_bytes / NUM_FRAMES, "B/page", 128, **facts)
    # One cache at a time is what a rank has.
    while subjects:
        report("collector_pause", cpu_us(gc.collect) / 1e3, "ms", 5.0, maps=[subject.kind for subject in subjects])
        subjects.pop()
    report("segment_record", RECORD_BYTES + 4, "B/page of shared memory, for other processes")
    return 0


def refill(subject: Subject, tokens: list[int]) -> None:
    """A full arena again."""
    while subject.cache.pool.num_free:
        subject.insert([os.urandom(32) for _ in range(min(PAGES_PER_PATH, subject.cache.pool.num_free))], tokens)


if __name__ == "__main__":
    sys.exit(main())
