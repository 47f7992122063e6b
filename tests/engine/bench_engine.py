"""Host time of one decode step with a model that costs nothing, by number of sequences. Run: python -m tests.engine.bench_engine

Prints microseconds of wall and of CPU time per step (the quickest and the median of 15 runs of 60 steps), and the growth per sequence.
`dix bench engine --model null` shows the same through the command line.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

from deepinfer_cli.bench.null_model import NullRunner
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig

STEPS = 60
RUNS = 15
SIZES = (1, 64, 256)


def step_times_us(num_seqs: int, params: SamplingParams) -> list[tuple[float, float]]:
    """(wall, CPU) microseconds per step."""
    engine = Engine(EngineConfig(spec=False), HiCacheConfig(size_gb=0), runner=NullRunner(num_seqs))
    for i in range(num_seqs):
        engine.add_request(Request(f"r{i}", [2] * 16, params))
    while engine.scheduler.waiting:
        engine.step()
    times = []
    for _ in range(RUNS):
        began, cpu = time.perf_counter(), time.thread_time()
        for _ in range(STEPS):
            engine.step()
        times.append(((time.perf_counter() - began) / STEPS * 1e6, (time.thread_time() - cpu) / STEPS * 1e6))
    return times


def main() -> None:
    torch.set_num_threads(1)
    for name, params in (
        ("greedy", SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)),
        ("top-p", SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4000, ignore_eos=True)),
    ):
        best = {}
        for num_seqs in SIZES:
            wall, cpu = zip(*step_times_us(num_seqs, params), strict=True)
            best[num_seqs] = min(cpu)
            print(
                f"{name:7s} {num_seqs:4d} sequences: {statistics.median(wall):7.1f} us/step (best {min(wall):.1f}),"
                f" CPU {statistics.median(cpu):7.1f} (best {min(cpu):.1f}), load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        print(f"{name:7s} per extra sequence, 64 to 256: {(best[256] - best[64]) / 192:.2f} us CPU", flush=True)


if __name__ == "__main__":
    main()
