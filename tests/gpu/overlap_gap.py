"""What a decode step costs beyond its recorded graph, with overlapped scheduling on and off: `python -m tests.gpu.overlap_gap OUT`.

A few layers of the released shapes with random weights, 64 sequences. The floor is the graph replayed back to back. Idle share: the part
of a step's wall time in which the device has nothing to do, from the profiler's kernel times. Prints one line per setting.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.cuda_graph import CudaRecorder
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.models.released import excerpt
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig

BATCH, CONTEXT, STEPS = 64, 256, 40


def make_runner(out: Path, layers: tuple[int, ...]) -> ModelRunner:
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(excerpt(layers)))
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        max_num_seqs=BATCH,
        max_model_len=4096,
        num_blocks=BATCH * 20,
        spec=False,
        num_draft_tokens=0,
        cudagraph_batch_size_interval=BATCH,
    )
    try:
        return ModelRunner(config, recorder=CudaRecorder())
    except RuntimeError as error:
        print(f"steps are eager, recording failed: {error}", flush=True)
        torch.cuda.empty_cache()
        return ModelRunner(config)


def make_engine(runner: ModelRunner, overlap: bool) -> Engine:
    config = EngineConfig(model=runner.config.model, spec=False, zero_overhead_scheduling=overlap)
    engine = Engine(config, HiCacheConfig(size_gb=0), runner=runner)
    rng = torch.Generator().manual_seed(0)
    for i in range(BATCH):
        ids = torch.randint(2, 1000, (CONTEXT,), generator=rng).tolist()
        engine.add_request(Request(f"{i}", ids, SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)))
    while engine.scheduler.waiting or len(engine.scheduler.running) < BATCH:
        engine.step()
    return engine


def busy_and_wall(engine: Engine) -> tuple[float, float, float]:
    """ms per step: wall time of free steps, then kernel time and span of profiled ones."""
    for _ in range(10):
        engine.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / STEPS * 1e3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS // 2):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return wall, busy / (STEPS // 2) / 1e3, (end - spans[0][0]) / (STEPS // 2) / 1e3


def floor_ms(runner: ModelRunner) -> float:
    """A replay of the step's graph, back to back; nan for eager steps."""
    if runner._decode is None:
        return math.nan
    graphs: Any = runner._decode._graphs
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            graphs.replay(BATCH)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 20 * 1e3)
    return statistics.median(times)


def main() -> None:
    out = Path(sys.argv[1])
    layers = tuple(int(part) for part in sys.argv[2].split(",")) if len(sys.argv) > 2 else (2, 3, 4)
    runner = make_runner(out, layers)
    for report in runner.recordings:
        print(report)
    tokens: dict[bool, list[list[int]]] = {}
    for overlap in (False, True, False, True):
        engine = make_engine(runner, overlap)
        wall, busy, span = busy_and_wall(engine)
        tokens.setdefault(
            overlap, [seq.token_ids[CONTEXT : CONTEXT + 60] for seq in sorted(engine.scheduler.running, key=lambda s: s.seq_id)]
        )
        print(
            f"overlap {overlap!s:5}: step {wall:.3f} ms, kernels {busy:.3f} of {span:.3f} ms: idle {1 - busy / span:.1%};"
            f" graph alone {floor_ms(runner):.3f} ms",
            flush=True,
        )
        engine._pipeline.land()
    print("tokens equal:", tokens[False] == tokens[True])


if __name__ == "__main__":
    main()
