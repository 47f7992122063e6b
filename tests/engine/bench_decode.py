"""Measure the model's steps on CPU: the eager path against the compiled one, interleaved in one process. Not a test.

    OMP_NUM_THREADS=1 python -m tests.engine.bench_decode [MODEL_DIR] [--context 300] [--samples 40]

Prints medians of wall time and of this thread's CPU time: on a machine that others use too, CPU time is the steadier figure.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.models.draft import DraftSlice
from engine.models.tiny import ensure_tiny

BLOCK = 128
CHUNK = 512
BURST = 10


@dataclass
class Times:
    """Samples in ms."""

    wall: list = field(default_factory=list)
    cpu: list = field(default_factory=list)

    def take(self, call):
        wall, cpu = time.perf_counter(), time.thread_time()
        call()
        self.wall.append(1e3 * (time.perf_counter() - wall))
        self.cpu.append(1e3 * (time.thread_time() - cpu))


def make(model, eager, seqs):
    runner = ModelRunner(EngineConfig(model=model, enforce_eager=eager, max_num_seqs=seqs, kv_cache_gb=0.25), draft=True)
    assert eager or runner.native.wait(), runner.native.status
    return runner


def piece(runner, ids, slot, start, end):
    blocks = -(-len(ids) // BLOCK)
    table = list(range(1 + (slot - 1) * blocks, 1 + slot * blocks))
    back = runner.limits.ngram_history
    return SequenceSlice(ids[start:end], start, len(ids), table, slot, tuple(ids[max(0, start - back) : start]), 0, LogitRows.LAST)


def compare(name, calls, samples):
    """Alternate between the two paths in bursts, as a server runs them: the first call of a burst finds the caches cold and is dropped.

    calls: path -> function of the sample's number.
    """
    times = {path: Times() for path in calls}
    for first in range(0, samples, BURST):
        for path, call in calls.items():
            call(first)
            for sample in range(first + 1, first + 1 + BURST):
                times[path].take(lambda call=call, sample=sample: call(sample))
    middle = {path: (statistics.median(t.wall), statistics.median(t.cpu)) for path, t in times.items()}
    (eager_wall, eager_cpu), (wall, cpu) = middle["eager"], middle["compiled"]
    print(
        f"{name:<28} eager {eager_wall:8.2f} ({eager_cpu:8.2f} cpu)  compiled {wall:8.3f} ({cpu:8.3f} cpu) ms"
        f"  x{eager_wall / wall:5.1f} (x{eager_cpu / cpu:5.1f} cpu)  load {os.getloadavg()[0]:.1f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--samples", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = args.model or str(ensure_tiny(Path.home() / ".cache" / "dix" / "models"))
    runners = {"eager": make(model, True, 8), "compiled": make(model, False, 8)}
    length = args.context + args.samples + BURST + 1
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(20, 400, (length,), generator=random).tolist() for _ in range(8)]
    for runner in runners.values():
        for slot, ids in enumerate(prompts, start=1):
            for start in range(0, args.context, CHUNK):
                runner.run(Batch(StepKind.PREFILL, [piece(runner, ids, slot, start, min(args.context, start + CHUNK))]))

    def decode(runner, seqs, rows=1, kind=StepKind.DECODE):
        def call(sample):
            start = args.context + (sample if rows == 1 else 0)
            runner.run(Batch(kind, [piece(runner, prompts[i], i + 1, start, start + rows) for i in range(seqs)]))

        return call

    for seqs in (1, 2, 4, 8):
        compare(f"decode, {seqs} sequences", {path: decode(r, seqs) for path, r in runners.items()}, args.samples)
    compare("verify, 1 x 6 rows", {path: decode(r, 1, 6, StepKind.VERIFY) for path, r in runners.items()}, args.samples)
    draft = [DraftSlice(9, args.context - 1, 1)]
    compare("draft, 1 sequence", {path: lambda _, r=r: r.draft(draft) for path, r in runners.items()}, args.samples)
    for tokens in (64, CHUNK):
        ids = torch.randint(20, 400, (tokens,), generator=random).tolist()
        calls = {
            path: lambda _, r=r, ids=ids: r.run(Batch(StepKind.PREFILL, [piece(r, ids, 1, 0, len(ids))])) for path, r in runners.items()
        }
        compare(f"prefill, {tokens} tokens", calls, BURST)


if __name__ == "__main__":
    main()
