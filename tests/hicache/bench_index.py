"""Cost of the index at the size of a 64 GiB arena: `python -m tests.hicache.bench_index`. CPU time, so that neighbours do not count.

Prints one JSON line per operation: microseconds per page (median over paths of 781 pages = 100,000 tokens), bytes, milliseconds.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hicache.host_cache import HostCache
from hicache.index import NONE
from hicache.keys import KeySpace
from hicache.native_keys import open_chain
from hicache.reservation import PageReservation

NUM_FRAMES, PAGES_PER_PATH, PAGE_TOKENS = 600_000, 781, 128


def cpu_us(work: Callable[[], object]) -> float:
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1e3


def report(name: str, value: float, unit: str, target: float) -> None:
    print(json.dumps({"schema": "dix.bench/1", "id": f"c.index.{name}", "value": round(value, 3), "unit": unit, "must": target}))


def main() -> None:
    tokens = [i * 7919 % 129_280 for i in range(PAGE_TOKENS * PAGES_PER_PATH)]
    space = KeySpace("bench", "", PAGE_TOKENS)
    hashing = [cpu_us(lambda: space.page_keys(tokens)) for _ in range(9)]
    report("hash_python", statistics.median(hashing) / PAGES_PER_PATH, "us/page", 2.0)
    with tempfile.TemporaryDirectory() as scratch:
        space.chain = open_chain(Path(scratch))
    if space.chain is not None:
        hashing = [cpu_us(lambda: space.page_keys(tokens)) for _ in range(9)]
        report("hash", statistics.median(hashing) / PAGES_PER_PATH, "us/page", 2.0)

    gc.collect()
    gc.freeze()
    cache = HostCache(NUM_FRAMES, PAGE_TOKENS, 13)
    paths: list[list[bytes]] = []
    inserting: list[float] = []

    def insert(keys: list[bytes]) -> None:
        with PageReservation(cache, len(keys)) as reservation:
            path = reservation.commit(NONE, keys, 0, tokens)
        cache.unpin(path)

    for number in range(NUM_FRAMES // PAGES_PER_PATH):
        keys = [os.urandom(32) for _ in range(PAGES_PER_PATH)]
        inserting.append(cpu_us(lambda keys=keys: insert(keys)))  # type: ignore[misc]
        if number % 10 == 0:
            paths.append(keys)
    report("insert", statistics.median(inserting) / PAGES_PER_PATH, "us/page", 2.0)

    def touch(keys: list[bytes]) -> None:
        path = cache.index.match(keys)
        cache.index.pin(path)
        cache.unpin(path)

    touching = [cpu_us(lambda keys=keys: touch(keys)) for keys in paths]  # type: ignore[misc]
    report("match_touch", statistics.median(touching) / PAGES_PER_PATH, "us/page", 2.0)
    paths.clear()
    report("collector_pause", cpu_us(gc.collect) / 1e3, "ms", 5.0)
    free, evicted = cache.pool.num_free, 100_000
    report("evict", cpu_us(lambda: cache.make_room(free + evicted)) / evicted, "us/page", 2.0)
    report("metadata", cache.index.metadata_bytes / NUM_FRAMES, "B/page", 128)
    report("metadata_map", map_bytes(cache.index.frames_by_key) / len(cache.index), "B/page", 128)


def map_bytes(frames_by_key: dict[bytes, int]) -> int:
    """What Python's map of keys costs on top of the arrays: its table, a key object and a number per page."""
    key, frame = next(iter(frames_by_key.items()))
    return sys.getsizeof(frames_by_key) + len(frames_by_key) * (sys.getsizeof(key) + sys.getsizeof(frame))


if __name__ == "__main__":
    main()
