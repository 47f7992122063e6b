"""Divisions of the boundary between sublayers against each other on a GPU: `python -m tests.ops.bench_boundary`. Prints one table."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_cli.opbench.timing import time_side_by_side
from engine.ops.hyper_boundary import Mixer, Written
from engine.ops.triton.hyper_boundary import Division, mixes, write_back

WIDTH, EPS = 5120, 1e-20
DIVISIONS = {
    8: [(16, 128, 1), (16, 128, 2), (16, 128, 4), (16, 128, 8), (16, 256, 1), (16, 256, 2), (16, 64, 4), (16, 64, 8)],
    64: [(16, 128, 2), (16, 128, 4), (16, 128, 8), (32, 128, 4), (64, 128, 2), (64, 64, 8)],
    4096: [(64, 64, 40), (64, 128, 20), (128, 64, 40), (128, 64, 80), (64, 64, 80), (64, 64, 160), (32, 128, 40), (128, 128, 40)],
}


def median(call: object, *arguments: object) -> float:
    return time_side_by_side({"ours": [lambda: call(*arguments)]}, "cuda")["ours"].median  # type: ignore[operator]


def main() -> None:
    torch.manual_seed(0)
    mixer = Mixer(torch.randn(24, 4 * WIDTH, device="cuda") * 0.02, torch.ones(24, device="cuda"), torch.randn(24, device="cuda"), 20, 1e-6)
    norm = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    for rows, divisions in DIVISIONS.items():
        h: Tensor = torch.randn(rows, 4, WIDTH, device="cuda").bfloat16()
        comb = torch.rand(rows, 4, 4, device="cuda").softmax(-1)
        written = Written(torch.randn(rows, WIDTH, device="cuda").bfloat16(), torch.rand(rows, 4, device="cuda"), comb)
        pre = torch.rand(rows, 4, device="cuda")
        squares = write_back(h, written, pre, norm, EPS, True)[2]
        print(f"rows={rows} write and read: {median(write_back, h, written, pre, norm, EPS, rows <= 264):.1f} us", flush=True)
        for shape in divisions:
            try:
                us = median(mixes, h, squares, mixer, EPS, Division(*shape))
            except Exception as error:  # a division may not fit the machine; the others still count
                print(f"rows={rows} mix {shape}: {type(error).__name__}", flush=True)
                continue
            print(f"rows={rows} mix and balance {shape}: {us:.1f} us", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
