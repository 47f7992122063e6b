"""Divisions of the packed products against each other on a GPU: `python -m tests.ops.bench_packed OUT`. Prints one table.

Every row is checked against the definition before it is timed. Times are medians of graph replays, inputs out of the L2 cache.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_cli.opbench.ceilings import measure_ceilings
from deepinfer_cli.opbench.timing import time_side_by_side
from engine.ops.cuda.library import Kernels
from engine.ops.cuda.packed_gemm import MANY, Epilogue, Shape, dense, expert_lists, expert_sum, machine, routed, tiles_of
from engine.ops.packed_weights import Format, PackedWeights, pack_fp4, pack_fp8, unpack
from engine.ops.weight_formats import encode_fp4_rows, encode_fp8_blocks

EXPERTS, CHOICES, HIDDEN, INNER = 384, 6, 5120, 2304
DENSE = {"wq_a+wkv": (1, 1792, 5120), "wq_b": (1, 32768, 1280), "wo_a": (8, 1024, 4096), "wo_b": (1, 5120, 8192), "idx_q": (1, 4096, 1280),
         "sh_w13": (1, 4608, 5120), "sh_w2": (1, 5120, 2304)}  # fmt: skip


def random_weights(format: Format, groups: int, rows: int, columns: int) -> PackedWeights:
    """Normal weights of deviation 1/sqrt(columns) through our own quantiser."""
    weights = PackedWeights.empty(format, groups, rows, columns, "cuda")
    encode, pack = (encode_fp4_rows, pack_fp4) if format is Format.FP4 else (encode_fp8_blocks, pack_fp8)
    for group in range(groups):
        one = pack(*encode(torch.randn(rows, columns, device="cuda") * columns**-0.5))
        weights.codes[group], weights.scales[group] = one.codes[0], one.scales[0]
    return weights


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


def median(calls: list[Callable[[], Any]]) -> float:
    return time_side_by_side({"ours": calls}, "cuda")["ours"].median


class Table:
    """Rows printed as they come and kept as JSON lines."""

    def __init__(self, path: Path, copy_tbs: float) -> None:
        self._file, self._copy = path.open("w"), copy_tbs

    def add(self, name: str, us: float, num_bytes: float, error: float, note: str = "") -> None:
        share = num_bytes / us / 1e6 / self._copy
        print(f"{name:58s} {us:9.1f} us  {num_bytes / 1e6:9.1f} MB  {share:5.2f} of copy  err {error:.1e} {note}", flush=True)
        self._file.write(json.dumps({"name": name, "us": us, "bytes": num_bytes, "share": share, "error": error}) + "\n")
        self._file.flush()


VARIANTS = {  # batch -> (tiles, slices, blocks per multiprocessor)
    1: [(1, 1, 1), (1, 1, 2)],
    8: [(1, 1, 2), (1, 1, 3)],
    64: [(1, 1, 2), (1, 1, 3)],
    256: [(1, 1, 3), (2, 1, 2)],
    1024: [(2, 1, 2), (4, 1, 2), (MANY, 1, 1)],
    4096: [(MANY, 1, 1)],
}


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer and the inputs of one batch size, in several sets so that small batches do not find their experts in the L2 cache."""

    w13: PackedWeights
    w2: PackedWeights
    ids: list[Tensor]
    x: list[Tensor]
    weights: Tensor
    act: Tensor
    parts: Tensor

    @staticmethod
    def of(w13: PackedWeights, w2: PackedWeights, batch: int) -> Experts:
        sets = 6 if batch < 8 else 2
        return Experts(
            w13,
            w2,
            [torch.rand(batch, EXPERTS, device="cuda").topk(CHOICES).indices for _ in range(sets)],
            [torch.randn(batch, HIDDEN, device="cuda").bfloat16() for _ in range(sets)],
            torch.rand(batch, CHOICES, device="cuda"),
            torch.empty(batch * CHOICES, INNER, device="cuda", dtype=torch.bfloat16),
            torch.empty(batch * CHOICES, HIDDEN, device="cuda"),
        )

    @property
    def touched(self) -> float:
        return statistics.mean(len(ids.unique()) for ids in self.ids)


def bench_experts(table: Table) -> None:
    began = time.monotonic()
    w13, w2 = random_weights(Format.FP4, EXPERTS, 2 * INNER, HIDDEN), random_weights(Format.FP4, EXPERTS, HIDDEN, INNER)
    torch.cuda.synchronize()
    print(f"packing {EXPERTS} experts: {time.monotonic() - began:.1f} s, {(w13.num_bytes + w2.num_bytes) / 1e9:.2f} GB", flush=True)
    for batch, variants in VARIANTS.items():
        experts = Experts.of(w13, w2, batch)
        for tiles in sorted({v[0] for v in variants}):
            bench_lists(table, experts, batch, tiles)
        bench_sum(table, experts, batch)
        for variant in variants:
            bench_shape(table, experts, batch, Shape(*variant))


def bench_lists(table: Table, experts: Experts, batch: int, tiles: int) -> None:
    us = median([lambda ids=ids: expert_lists(*here(), ids, EXPERTS, tiles) for ids in experts.ids])
    table.add(f"lists batch={batch} tiles={tiles}", us, batch * CHOICES * 8, 0.0)


def bench_sum(table: Table, experts: Experts, batch: int) -> None:
    parts = experts.parts.normal_().view(batch, CHOICES, HIDDEN)
    total = torch.empty(batch, HIDDEN, device="cuda", dtype=torch.bfloat16)
    us = median([lambda: expert_sum(*here(), parts, None, total)])
    table.add(f"sum batch={batch}", us, parts.nbytes + total.nbytes, error_of(total, parts.sum(1)))


def bench_shape(table: Table, experts: Experts, batch: int, shape: Shape) -> None:
    w13, w2, act, parts, weights = experts.w13, experts.w2, experts.act, experts.parts, experts.weights
    epilogue = Epilogue.FP32
    if shape.tiles == MANY:
        parts, epilogue = parts.bfloat16(), Epilogue.BF16
    lists = [expert_lists(*here(), ids, EXPERTS, shape.tiles) for ids in experts.ids]

    def up(k: int) -> None:
        routed(*here(), experts.x[k], w13, lists[k], act, shape, Epilogue.SWIGLU, divisor=CHOICES, weights=weights, limit=10.0)

    def down(k: int) -> None:
        routed(*here(), act, w2, lists[k], parts, shape, epilogue)

    act.fill_(float("nan"))
    parts.fill_(float("nan"))
    up(0)
    down(0)
    slot = batch * CHOICES // 2
    expert = int(experts.ids[0].flatten()[slot])
    both = torch.nn.functional.linear(experts.x[0][slot // CHOICES], unpack(w13, expert, torch.bfloat16)).float().unflatten(0, (-1, 2, 8))
    gate, value = both[:, 0].flatten().clamp(max=10), both[:, 1].flatten().clamp(-10, 10)
    up_error = error_of(act[slot], torch.nn.functional.silu(gate) * value * weights.flatten()[slot])
    down_error = error_of(parts[slot], torch.nn.functional.linear(act[slot], unpack(w2, expert, torch.bfloat16)))
    if not bool(parts.isfinite().all()):
        down_error = float("nan")
    name = f"batch={batch} tiles={shape.tiles} slices={shape.slices} blocks={shape.residents} touched={experts.touched:.0f}"
    sets = range(len(lists))
    for which, call, matrix, error in (("up  ", up, w13, up_error), ("down", down, w2, down_error)):
        us = median([lambda k=k, call=call: call(k) for k in sets])
        tflops = 2e-6 * batch * CHOICES * matrix.rows * matrix.columns / us
        table.add(f"{which} {name}", us, experts.touched * matrix.num_bytes / EXPERTS, error, f"{tflops:.0f} TFLOP/s")


def bench_dense(table: Table) -> None:
    for name, (groups, rows, columns) in DENSE.items():
        copies = max(1, round(100e6 / (groups * rows * columns)))
        weights = [random_weights(Format.FP8, groups, rows, columns) for _ in range(copies)]
        plain = torch.stack([unpack(weights[0], group, torch.bfloat16) for group in range(groups)])
        for batch in (1, 8, 16, 32, 64):
            x = torch.randn(batch, groups * columns, device="cuda").bfloat16()
            want = torch.einsum("tgc,grc->tgr", x.view(batch, groups, columns), plain).flatten(1)
            tiles = tiles_of(batch)
            shapes = [Shape(tiles, 1), Shape(tiles, 4), Shape(tiles, 8)] + ([Shape(MANY)] if batch > 8 else [])
            for shape in shapes:
                error, us = time_dense(weights, x, want, shape)
                table.add(f"dense {name} batch={batch} tiles={shape.tiles} slices={shape.slices}", us, groups * rows * columns, error)
            parts = x.view(batch, groups, columns).transpose(0, 1)
            copies = [plain.clone() for _ in range(2)]
            us = median([lambda w=w, x=parts: torch.bmm(x, w.transpose(1, 2)) for w in copies])
            table.add(f"dense {name} batch={batch} library bf16", us, groups * rows * columns, 0.0)


def time_dense(weights: list[PackedWeights], x: Tensor, want: Tensor, shape: Shape) -> tuple[float, float]:
    """Error and microseconds."""
    out = torch.full_like(want, float("nan"))

    def call(w: PackedWeights) -> None:
        dense(*here(), x, w, out, shape, Epilogue.BF16)

    call(weights[0])
    return error_of(out, want), median([lambda w=w: call(w) for w in weights])


def here() -> tuple[Kernels, int]:
    return machine(torch.device("cuda"))


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    began = time.monotonic()
    here()
    print(f"building: {time.monotonic() - began:.1f} s", flush=True)
    ceilings = measure_ceilings("cuda")
    print(ceilings.plain(), flush=True)
    table = Table(out / "packed.jsonl", ceilings.plain()["copy_tbs"])
    with torch.inference_mode():
        bench_experts(table)
        bench_dense(table)
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
