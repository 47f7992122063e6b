"""Divisions of attention over packed rows against each other on a GPU: `python -m tests.ops.bench_row_attention OUT [warm]`.

Prints a line as soon as it is known. `warm` only compiles and runs every division once, so that several processes can do so at a time.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch

from deepinfer_cli.opbench.case import Setting, relative_error
from deepinfer_cli.opbench.cases.attention import make_problem
from deepinfer_cli.opbench.timing import time_side_by_side
from engine.ops.row_attention import ROW_ATTENTION, PackedKeys
from engine.ops.triton.row_attention import Tuning, launch

SIZES = ((1, (0, 5)), (8, (0, 5)), (64, (0, 1)), (256, (0,)), (1536, (0,)))


@torch.inference_mode()
def main() -> None:
    out, warm = Path(sys.argv[1]), "warm" in sys.argv
    out.mkdir(parents=True, exist_ok=True)
    began, setting, lines = time.monotonic(), Setting("cuda"), []
    for rows, splits in SIZES[:4] if warm else SIZES:
        q, rot, sources, sink = make_problem(setting, rows, False)
        few = [PackedKeys(s.rows, s.index[:8].contiguous()) for s in sources]
        wanted = ROW_ATTENTION.reference(q[:8].float(), rot[:8], few, sink, 512**-0.5, 0)
        runs = {f"hopper, splits {n}": partial(launch, q, rot, sources, sink, 512**-0.5, n, Tuning()) for n in splits}
        runs["portable"] = partial(launch, q, rot, sources, sink, 512**-0.5, 0, Tuning(hopper=False))
        errors = {name: relative_error(run()[:8], wanted) for name, run in runs.items()}
        if warm:
            continue
        for name, times in time_side_by_side({name: [run] for name, run in runs.items()}, "cuda").items():
            tflops = rows * 64 * 640 * 512 * 4 / times.median / 1e6
            lines.append({"rows": rows, "name": name, "us": times.median, "tflops": tflops, "error": errors[name]})
            print(f"rows {rows:5d}  {name:20s} {times.median:9.1f} us  {tflops:7.1f} TFLOP/s  err {errors[name]:.1e}", flush=True)
        (out / "row_attention.json").write_text(json.dumps(lines, indent=1))
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
