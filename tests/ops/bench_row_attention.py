"""Divisions of attention over packed rows against each other on a GPU: `python -m tests.ops.bench_row_attention OUT`. Prints one table."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch

from deepinfer_cli.opbench.case import Setting, relative_error
from deepinfer_cli.opbench.cases.attention import _problem
from deepinfer_cli.opbench.ceilings import measure_ceilings
from deepinfer_cli.opbench.timing import time_side_by_side
from engine.ops.row_attention import ROW_ATTENTION, PackedKeys
from engine.ops.triton.row_attention import Tuning, launch

TUNINGS = [Tuning(), Tuning(hopper=False)]


@torch.inference_mode()
def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    began, setting = time.monotonic(), Setting("cuda")
    ceilings = measure_ceilings("cuda", False)
    print(ceilings.plain())
    lines = []
    for rows, shared in ((1, False), (8, False), (64, False), (256, False), (1536, False), (4096, True)):
        q, rot, sources, sink = _problem(setting, rows, shared)
        few = [PackedKeys(s.rows, s.index[:8].contiguous()) for s in sources]
        wanted = ROW_ATTENTION.reference(q[:8].float(), rot[:8], few, sink, 512**-0.5, 0)
        splits = [0] if rows > 132 else sorted({0, 1, 2, 5, 10})
        calls, errors = {}, {}
        for tuning in TUNINGS:
            for split in splits:
                name = f"{'hopper' if tuning.hopper else 'triton'}, splits {split}"
                run = partial(launch, q, rot, sources, sink, 512**-0.5, split, tuning)
                errors[name] = relative_error(run()[:8], wanted)
                calls[name] = [run]
        for name, times in time_side_by_side(calls, "cuda").items():
            tflops = rows * 64 * 640 * 512 * 4 / times.median / 1e6
            lines.append({"rows": rows, "name": name, "us": times.median, "tflops": tflops, "error": errors[name]})
            print(f"rows {rows:5d}  {name:22s} {times.median:9.1f} us  {tflops:7.1f} TFLOP/s  err {errors[name]:.1e}", flush=True)
        (out / "row_attention.json").write_text(json.dumps(lines, indent=1))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
