"""The router's product: many columns, few experts. Columns are divided in parts of one length, whatever the number of rows.

Few rows: every part is a program's, and a second kernel adds the parts in their order. Many rows: a program has all parts of its rows and
adds them in the same order. Both give a row the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.expert_logits import EXPERT_LOGITS
from engine.ops.triton.interpreter import INTERPRETED

_PART = 512  # columns


@dataclass(frozen=True, slots=True)
class Division:
    """rows, experts, cols: of a program and its step. apart: parts are programs of their own."""

    rows: int
    experts: int
    cols: int
    apart: bool
    warps: int = 4
    stages: int = 3


# Up to so many rows these kernels are quicker than the library's (6.0 for 7.8 us at one row, 6.5 for 8.3 at 64; 11.4 for 10.4 at 512).
_FEW_ROWS = 128


def division(rows: int) -> Division:
    """What one H200 took the least time for."""
    if rows <= 16:
        return Division(16, 32, 256, True)
    if rows <= _FEW_ROWS:
        return Division(64, 32, 128, True)
    return Division(64, 64, 64, apart=rows <= 1024)


@triton.jit
def multiply(
    x, gate, out, num_rows, num_experts, width, row_stride, parts, ROWS: tl.constexpr, EXPERTS: tl.constexpr, COLS: tl.constexpr,
    PART: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """out[z, row, :] = the sum of `parts` parts of columns from part z * parts on.

    x: [T, C], gate: [E, C] bf16, out: [programs z, T, E] fp32.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    first = tl.program_id(2) * parts
    known_rows, known_experts = (rows < num_rows)[:, None], (experts < num_experts)[None, :]
    from_x = x + rows.to(tl.int64)[:, None] * row_stride
    from_gate = gate + experts.to(tl.int64)[None, :] * width
    total = tl.zeros([ROWS, EXPERTS], tl.float32)
    for part in range(first, first + parts):
        sum = tl.zeros([ROWS, EXPERTS], tl.float32)
        for step in range(PART // COLS):
            cols = part * PART + step * COLS + tl.arange(0, COLS)
            a = tl.load(from_x + cols[None, :], mask=known_rows & (cols < width)[None, :], other=0.0)
            b = tl.load(from_gate + cols[:, None], mask=known_experts & (cols < width)[:, None], other=0.0)
            if FAST:
                sum = tl.dot(a, b, sum)
            else:  # Triton's interpreter would multiply the bits of bf16 numbers
                sum = tl.dot(a.to(tl.float32), b.to(tl.float32), sum, input_precision="ieee")
        total += sum
    at = out + (tl.program_id(2).to(tl.int64) * num_rows + rows[:, None]) * num_experts + experts[None, :]
    tl.store(at, total, mask=known_rows & known_experts)


@triton.jit
def add_parts(parts, out, count, size, BLOCK: tl.constexpr):
    """out[i] = parts[0, i] + parts[1, i] + ..., in this order. parts: [count, size] fp32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(count):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total, mask=at < size)


def launch(x: Tensor, gate: Tensor) -> Tensor:
    """The op `expert_logits`; many rows are the library's."""
    return launch_invariant(x, gate) if len(x) <= _FEW_ROWS else _fallback(x, gate)


def _fallback(x: Tensor, gate: Tensor) -> Tensor:
    logits: Tensor = EXPERT_LOGITS.fallback(x, gate)
    return logits


def launch_invariant(x: Tensor, gate: Tensor, divided: Division | None = None) -> Tensor:
    """The op for any number of rows with one order of its sums. fp32 gates go to the reference. divided: None for what suits the rows."""
    if gate.dtype is not torch.bfloat16:
        return _fallback(x, gate)
    (num_rows, width), num_experts = x.shape, len(gate)
    x, gate, divided = x.to(gate.dtype).contiguous(), gate.contiguous(), divided or division(num_rows)
    out, parts = torch.empty(num_rows, num_experts, device=x.device), triton.cdiv(width, _PART)
    if not num_rows:
        return out
    programs = parts if divided.apart else 1
    sums = torch.empty(programs, num_rows, num_experts, device=x.device) if programs > 1 else out
    multiply[triton.cdiv(num_rows, divided.rows), triton.cdiv(num_experts, divided.experts), programs](
        x, gate, sums, num_rows, num_experts, width, x.stride(0), parts // programs, divided.rows, divided.experts, divided.cols, _PART,
        not INTERPRETED, num_warps=divided.warps, num_stages=divided.stages,
    )  # fmt: skip
    if programs > 1:
        add_parts[(triton.cdiv(out.numel(), 256),)](sums, out, programs, out.numel(), 256, num_warps=2)
    return out
