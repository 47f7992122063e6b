"""Restores beside a GPU at the sizes of the released shape: `python -m tests.engine.bench_restore [--out DIR]`. About 90 s.

1. 100,000 tokens from an idle device: look up, plan, copy, until the device could begin the prefill (c.restore, must 5 ms).
2. Decode steps of about 10 ms with restores one after the other beside them (c.itl, must + 5 %), for several shares
   (`hicache.max_restore_share`) and lengths. Bytes in the cache are random; the decode step is a chain of matrix products that read 42 GB.
Prints one JSON line per figure, and a table last that says which shares hold the bound for every length.
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
from typing import cast

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
SHARES = (0.02, 0.03, 0.04, 0.05)
ITL_MUST = 1.05
BLOCKS, BLOCK_STEPS = 16, 30  # blocks of steps, alone and beside restores in turns: 240 steps of each, about 2.7 s
_ids = itertools.count(1)


class SizedKV:
    """The attributes of `engine.kv_cache.KVCache` that the prefix cache uses, in the sizes of FP4 pages and byte windows."""

    def __init__(self, num_blocks: int) -> None:
        self.block_size, self.num_blocks, self.window, self.format_id = PAGE_TOKENS, num_blocks, WINDOW, "bench"
        self.blocks = torch.randint(0, 256, (num_blocks, PAGE_BYTES), dtype=torch.uint8, device="cuda")
        self.num_encoder_layers = 20  # of which only a replay would ask
        self.ring_rows = WINDOW + 12 + PAGE_TOKENS + KEEP
        self.num_encoder_layers = LAYERS
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
        cache.begin_step()  # the bytes of one step are bounded
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


class StoppableClock:
    """Seconds while it runs: the share of a time in which nothing is restored must not pay for what is restored later."""

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._since_s: float | None = None

    def run(self, running: bool) -> None:
        now = time.perf_counter()
        if self._since_s is not None:
            self._passed_s += now - self._since_s
        self._since_s = now if running else None

    def __call__(self) -> float:
        return self._passed_s + (time.perf_counter() - self._since_s if self._since_s is not None else 0.0)


class Arrivals:
    """Sequences that wait for a restore all the time. They exist before a clock runs; each is hashed inside, as a rank does it."""

    def __init__(self, cache: PrefixCache, length: int) -> None:
        self._cache, self._length, self._prompts = cache, length, 8
        for number in range(self._prompts):
            store(cache, number, length)
        self._waiting: deque[Sequence] = deque()
        self.restored = 0

    def refill(self) -> None:
        """Enough for a block of steps whatever the share allows."""
        while len(self._waiting) < 2 + 400_000 // self._length:
            self._waiting.append(sequence(next(_ids) % self._prompts, self._length))

    def admit(self) -> None:
        """Restore as many as the cache allows in this step."""
        while tokens := restore(self._cache, self._waiting[0]):
            self.restored += tokens
            self._cache.finish(self._waiting.popleft())


def interference(share: float, length: int, build_dir: Path, step: Callable[[], None], out: list[dict[str, object]]) -> None:
    """Inter-token latency of steps with restores of `length` tokens waiting all the time, over that without."""
    clock = StoppableClock()
    cache = make_cache(build_dir, share, clock)
    arrivals = Arrivals(cache, length)
    times_ms: dict[bool, list[float]] = {False: [], True: []}
    host_s = 0.0
    # In turns, so that clocks and neighbours are the same for both. The first two blocks bring the debt to its usual level.
    for block in range(BLOCKS + 2):
        busy, counts = block % 2 == 1, block >= 2
        arrivals.refill()
        clock.run(busy)
        for _ in range(BLOCK_STEPS):
            began = time.perf_counter()
            cache.begin_step(decoding=True)
            if busy:
                arrivals.admit()
            admitted = time.perf_counter()
            step()
            torch.cuda.synchronize()
            if counts:
                times_ms[busy].append((time.perf_counter() - began) * 1e3)
                host_s += (admitted - began) * busy
        clock.run(False)
        if not counts:
            arrivals.restored = 0
    report_interference(out, share, length, times_ms[False], times_ms[True], arrivals.restored, host_s)
    cache.close()


def report_interference(
    out: list[dict[str, object]], share: float, length: int, alone: list[float], beside: list[float], restored: int, host_s: float
) -> None:
    """c.itl, with the ratio that the first half of the steps alone has to the second: what a ratio is uncertain by."""
    mean, half = statistics.mean, len(alone) // 2
    facts = {
        "share": share,
        "tokens": length,
        "alone_ms": round(mean(alone), 3),
        "beside_ms": round(mean(beside), 3),
        "beside_p50_ms": round(statistics.median(beside), 3),
        "worst_ms": round(max(beside), 3),
        "host_ms": round(1e3 * host_s / len(beside), 3),
        "restores": round(restored / length),
        "tokens_per_s": round(restored / sum(beside) * 1e3),
        "same_twice": round(mean(alone[:half]) / mean(alone[half:]), 4),
    }
    report(out, "c.itl", mean(beside) / mean(alone), "of alone", must=ITL_MUST, **facts)


def verdict(out: list[dict[str, object]]) -> str:
    """A table of shares and lengths, and the largest share that holds the bound for every length."""
    rows = [row for row in out if row["id"] == "c.itl"]
    names = f"{'share':>6} {'tokens':>8} {'steps longer':>13} {'alone ms':>9} {'worst ms':>9} {'host ms':>8}"
    lines = [f"{names} {'restores':>8} {'tokens/s':>10} {'same twice':>11}"]
    worst: dict[float, float] = {}
    for row in rows:
        share, ratio = cast(float, row["share"]), cast(float, row["value"])
        worst[share] = max(worst.get(share, 0.0), ratio)
        times = f"{100 * (ratio - 1):>11.2f} % {row['alone_ms']:>9} {row['worst_ms']:>9} {row['host_ms']:>8}"
        lines.append(f"{share:>6} {row['tokens']:>8} {times} {row['restores']:>8} {row['tokens_per_s']:>10} {row['same_twice']:>11}")
    good = [share for share, ratio in worst.items() if ratio <= ITL_MUST]
    lines.append(f"largest share that keeps every length within {100 * (ITL_MUST - 1):.0f} %: {max(good, default='none')}")
    ready = next(row for row in out if row["id"] == "c.restore")
    lines.append(f"{LONG:,} tokens ready in {ready['value']} ms (must {ready['must']}), {ready['host']} of them the host's")
    return "\n".join(lines)


def make_cache(build_dir: Path, share: float, clock: Callable[[], float] = time.monotonic) -> PrefixCache:
    config = HiCacheConfig(build_dir=str(build_dir), pin="blocking", max_restore_share=share, herd_min_tokens=0)
    cache = PrefixCache(config, SizedKV(1024), "bench", KEEP, num_bytes=ARENA_BYTES, clock=clock)  # type: ignore[arg-type]
    cache.hash_compiled(build_dir)
    cache.index_compiled(build_dir)
    cache.begin_step()
    return cache


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="values of hicache.max_restore_share to try")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU", file=sys.stderr)
        return 3
    out: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch, torch.cuda.stream(torch.cuda.Stream()):
        cache = make_cache(Path(scratch), 0.0)
        for row in cache.mover.probe_table:
            report(out, "c.probe", row.gb_s, "GB/s", engine=row.engine, direction=row.direction, pages=row.num_pages)
        long_restore(cache, out)
        cache.close()
        step = decode_step()
        for share, length in itertools.product(options.shares, (SHORT, LONG)):
            interference(share, length, Path(scratch), step, out)
    print(f"\n{verdict(out)}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "restore.json").write_text(json.dumps(out, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
