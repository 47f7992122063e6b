"""Host time of one decode step with a model that costs nothing. Run: python -m tests.engine.bench_engine

Prints microseconds per step (median and 90th percentile of 5 runs of 200 steps) at 1, 64 and 256 sequences.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.engine.fake_runner import FakeLimits

VOCAB = 64
STEPS = 200
RUNS = 5


@dataclass(frozen=True, slots=True)
class NullKV:
    block_size: int = 128


class NullRunner:
    """Constant logits, made before the clock starts."""

    def __init__(self, num_seqs: int) -> None:
        self.limits = FakeLimits(
            max_model_len=8192,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=8192,
            num_blocks=20 * num_seqs + 2,
            num_state_slots=num_seqs + 2,
            vocab_size=VOCAB,
        )
        self.kv: Any = NullKV()
        self._logits = torch.rand(num_seqs, VOCAB)

    def run(self, batch: Batch) -> Tensor:
        return self._logits[: len(batch.slices)]


def step_times_us(num_seqs: int, params: SamplingParams) -> list[float]:
    engine = Engine(EngineConfig(), HiCacheConfig(size_gb=0), runner=NullRunner(num_seqs))
    for i in range(num_seqs):
        engine.add_request(Request(f"r{i}", [2] * 16, params))
    while engine.scheduler.waiting:
        engine.step()
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        times.append((time.perf_counter() - began) / STEPS * 1e6)
    return times


def main() -> None:
    torch.set_num_threads(1)
    for name, params in (
        ("greedy", SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)),
        ("top-p", SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4000, ignore_eos=True)),
    ):
        for num_seqs in (1, 64, 256):
            times = step_times_us(num_seqs, params)
            print(
                f"{name:7s} {num_seqs:4d} sequences: {statistics.median(times):7.1f} us/step (min {min(times):.1f}, max {max(times):.1f})"
            )


if __name__ == "__main__":
    main()
