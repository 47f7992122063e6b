"""Restores beside a GPU at the sizes of the released shape: `python -m tests.engine.bench_restore [--out DIR]`. About 40 s.

1. 100,000 tokens from an idle device: look up, plan, copy, until the device could begin the prefill (c.restore, must 5 ms).
2. Decode steps of about 10 ms with restores one after the other beside them (c.itl, must + 5 %). Bytes in the cache are random; the
   decode step is a chain of matrix products that read 42 GB.
Prints one JSON line per figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.cache_contract import PlanKind
from engine.prefix_cache import PrefixCache
from engine.request import Sequence
from hicache.config import HiCacheConfig
from tests.hicache.fake_kv import make_sequence

PAGE_TOKENS, PAGE_BYTES, WINDOW, LAYERS, ROW_BYTES, KEEP = 128, 114_048, 128, 20, 528, 140
ARENA_BYTES = 3 * 2**30
LONG, SHORT = 100_000, 16_000
STEPS = 150
_ids = itertools.count(1)


class SizedKV:
    """The attributes of `engine.kv_cache.KVCache` that the prefix cache uses, in the sizes of FP4 pages and byte windows."""

    def __init__(self, num_blocks: int) -> None:
        self.block_size, self.num_blocks, self.window, self.format_id = PAGE_TOKENS, num_blocks, WINDOW, "bench"
        self.blocks = torch.randint(0, 256, (num_blocks, PAGE_BYTES), dtype=torch.uint8, device="cuda")
        self.ring_rows = WINDOW + 12 + PAGE_TOKENS + KEEP
        self.rings = torch.randint(0, 256, (LAYERS, 4 * self.ring_rows, ROW_BYTES), dtype=torch.uint8, device="cuda")
        self.state_bytes = LAYERS * WINDOW * ROW_BYTES

    def save_window(self, slot: int, position: int, out: Tensor) -> None:
        out.copy_(self.rings.index_select(1, self._rows(slot, position)).flatten(), non_blocking=True)

    def load_window(self, slot: int, position: int, src: Tensor) -> None:
        self.rings.index_copy_(1, self._rows(slot, position), src.view(LAYERS, WINDOW, ROW_BYTES))

    def _rows(self, slot: int, position: int) -> Tensor:
        positions = torch.arange(position - WINDOW, position, device="cuda")
        return slot * self.ring_rows + positions % self.ring_rows


def report(out: list[dict[str, object]], name: str, value: float, unit: str, **facts: object) -> None:
    out.append({"schema": "dix.bench/1", "id": name, "value": round(value, 4), "unit": unit, **facts})
    print(json.dumps(out[-1]), flush=True)


def prompt(number: int, length: int) -> list[int]:
    return [(number * 104_729 + i * 7919) % 129_280 for i in range(length)]


def sequence(number: int, length: int) -> Sequence:
    return make_sequence(next(_ids), prompt(number, length), block_size=PAGE_TOKENS)


def store(cache: PrefixCache, number: int, length: int) -> None:
    seq = sequence(number, length)
    cache.restore(seq, cache.plan(seq))
    seq.checkpoints = cache.checkpoints(seq)
    for end in [*seq.checkpoints, length]:
        cache.store_chunk(seq, seq.num_computed, end)
        seq.num_computed = end
    cache.finish(seq)


def restore(cache: PrefixCache, seq: Sequence) -> int:
    """Tokens restored; 0 when the cache says to wait."""
    plan = cache.plan(seq)
    if plan.kind is not PlanKind.HIT:
        cache.abandon(plan)
        return 0
    cache.restore(seq, plan)
    return seq.num_computed


def long_restore(cache: PrefixCache, out: list[dict[str, object]]) -> None:
    store(cache, 0, LONG)
    torch.cuda.synchronize()
    ready_ms, host_ms = [], []
    for _ in range(15):
        seq = sequence(0, LONG)
        began = time.perf_counter()
        tokens = restore(cache, seq)
        host_ms.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        ready_ms.append((time.perf_counter() - began) * 1e3)
        assert tokens > LONG - 400, tokens
        cache.finish(seq)
    report(
        out,
        "c.restore",
        statistics.median(ready_ms),
        "ms",
        must=5,
        least=round(min(ready_ms), 3),
        host=round(statistics.median(host_ms), 3),
    )


def decode_step() -> Callable[[], None]:
    """About 10 ms of matrix products over 1.7 GB of weights, as one graph."""
    weights = [torch.randn(5120, 20480, dtype=torch.bfloat16, device="cuda") / 72 for _ in range(8)]
    hidden = torch.randn(64, 5120, dtype=torch.bfloat16, device="cuda")
    for weight in weights:
        hidden @ weight
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(200):
            hidden @ weights[number % 8]
    return graph.replay


def interference(share: float, length: int, build_dir: Path, step: Callable[[], None], out: list[dict[str, object]]) -> None:
    """Inter-token latency of steps with restores of `length` tokens waiting all the time, over that without."""
    cache = make_cache(build_dir, share)
    prompts = 8
    for number in range(prompts):
        store(cache, number, length)
    restored, host_s = 0, 0.0
    alone_ms: list[float] = []
    beside_ms: list[float] = []
    # Requests exist before the clock runs; each is hashed inside, as a rank does it.
    waiting = deque(sequence(number % prompts, length) for number in range(3_000_000 // length))
    seq = waiting.popleft()
    # In turns, so that clocks and neighbours are the same for both.
    for block in range(10):
        busy = block % 2 == 1
        for _ in range(STEPS // 10):
            began = time.perf_counter()
            cache.begin_step(decoding=True)
            while busy and waiting and (tokens := restore(cache, seq)):
                restored += tokens
                cache.finish(seq)
                seq = waiting.popleft()
            host_s += time.perf_counter() - began if busy else 0.0
            step()
            torch.cuda.synchronize()
            (beside_ms if busy else alone_ms).append((time.perf_counter() - began) * 1e3)
    ratio = statistics.mean(beside_ms) / statistics.mean(alone_ms)
    host_ms = 1e3 * host_s / len(beside_ms)
    facts = {
        "share": share,
        "tokens": length,
        "host_ms": round(host_ms, 3),
        "alone_ms": round(statistics.mean(alone_ms), 3),
        "worst_ms": round(max(beside_ms), 3),
    }
    report(out, "c.itl", ratio, "of alone", must=1.05, restored=restored, tokens_per_s=round(restored / sum(beside_ms) * 1e3), **facts)
    cache.close()


def make_cache(build_dir: Path, share: float) -> PrefixCache:
    config = HiCacheConfig(build_dir=str(build_dir), pin="blocking", max_restore_share=share, herd_min_tokens=0)
    cache = PrefixCache(config, SizedKV(1024), "bench", KEEP, num_bytes=ARENA_BYTES)  # type: ignore[arg-type]
    cache.hash_compiled(build_dir)
    return cache


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU", file=sys.stderr)
        return 3
    out: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch, torch.cuda.stream(torch.cuda.Stream()):
        cache = make_cache(Path(scratch), 0.05)
        for row in cache.mover.probe_table:
            report(out, "c.probe", row.gb_s, "GB/s", engine=row.engine, direction=row.direction, pages=row.num_pages)
        long_restore(cache, out)
        cache.close()
        step = decode_step()
        for share, length in ((0.04, SHORT), (0.04, LONG)):
            interference(share, length, Path(scratch), step, out)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "restore.json").write_text(json.dumps(out, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
