"""Products of many rows with bf16 weights in the order of the packed products: the bits that packed_gemm.cu and packed_groups.cu give.

Columns of tokens and weights stand in the order of products (`product_order.py`), slice after slice, so that every product takes the 16
columns that a product of theirs takes. A slice is added up from zero, and slices in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.ops.triton.interpreter import INTERPRETED


@dataclass(frozen=True, slots=True)
class Division:
    """rows, outputs, cols: of a program and its step. apart: slices are programs of their own, whose sums a second kernel adds."""

    rows: int
    outputs: int
    cols: int = 64
    apart: bool = False
    warps: int = 8
    stages: int = 4


def division(rows: int, slices: int) -> Division:
    """What one H200 took the least time for."""
    if rows <= 512:
        return Division(64, 128, apart=True, warps=4)
    return Division(128, 128) if slices > 1 else Division(128, 256)


@triton.jit
def multiply(
    x, weight, out, num_rows, outputs, width, out_stride, short, longer,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLS: tl.constexpr, SLICES: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """out[row, group, :] = weight[group] x[row, group], or APART out[slice, row, group, :].

    x, weight: tiles of [T, G * C] and [G * A, C] bf16, by the copy engine. short: blocks of columns of a slice, of which the first `longer`
    ones have one more.
    """
    # Eight tiles of rows share each tile of weights while it is in the L2 cache.
    tiles = tl.cdiv(num_rows, ROWS)
    of_outputs = tl.cdiv(outputs, OUTPUTS)
    band = tl.program_id(0) // (8 * of_outputs)
    high = tl.minimum(tiles - band * 8, 8)
    inside = tl.program_id(0) % (8 * of_outputs)
    first_row = (band * 8 + inside % high) * ROWS
    first_output = inside // high * OUTPUTS
    group, first = tl.program_id(1), tl.program_id(2)
    col = (first * short + tl.minimum(first, longer)) * BLOCK
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for number in range(1 if APART else SLICES):
        steps = tl.where(first + number < longer, short + 1, short) * (BLOCK // COLS)
        sum = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for _ in range(steps):
            a = x.load([first_row, group * width + col])
            b = weight.load([group * outputs + first_output, col])
            if FAST:
                sum = tl.dot(a, b.T, sum)
            else:  # Triton's interpreter would multiply the bits of bf16 numbers
                sum = tl.dot(a.to(tl.float32), b.to(tl.float32).T, sum, input_precision="ieee")
            col += COLS
        total = sum if APART or SLICES == 1 else total + sum
    row = first_row + tl.arange(0, ROWS)
    output = first_output + tl.arange(0, OUTPUTS)
    known = (row < num_rows)[:, None] & (output < outputs)[None, :]
    at = row.to(tl.int64)[:, None] * out_stride + group * outputs + output[None, :]
    if APART:
        tl.store(out + tl.cast(first, tl.int64) * num_rows * out_stride + at, total, mask=known)
    else:
        tl.store(out + at, total.to(tl.bfloat16), mask=known)


@triton.jit
def add_slices(parts, out, slices, size, BLOCK: tl.constexpr):
    """out[i] = parts[0, i] + parts[1, i] + ..., in this order. parts: [slices, size] fp32, out: [size] bf16."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < size, other=0.0)
    for number in range(1, slices):
        total += tl.load(parts + number * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(tl.bfloat16), mask=at < size)


def ordered_linear(x: Tensor, weight: Tensor, slices: int, block: int, divided: Division) -> Tensor:
    """x [T, G * C] times weight [G, A, C]: [T, G * A] bf16. Columns in the order of products, slice after slice of whole blocks."""
    (num_rows, _), (groups, outputs, width) = x.shape, weight.shape
    out = x.new_empty(num_rows, groups * outputs)
    blocks, apart = width // block, divided.apart and slices > 1
    sums = x.new_empty(slices, num_rows, groups * outputs, dtype=torch.float32) if apart else out
    grid = (triton.cdiv(num_rows, divided.rows) * triton.cdiv(outputs, divided.outputs), groups, slices if apart else 1)
    if not num_rows:
        return out
    tokens = TensorDescriptor.from_tensor(x, [divided.rows, divided.cols])
    matrix = TensorDescriptor.from_tensor(weight.flatten(0, 1), [divided.outputs, divided.cols])
    multiply[grid](
        tokens, matrix, sums, num_rows, outputs, width, out.stride(0), blocks // slices, blocks % slices, divided.rows, divided.outputs,
        divided.cols, slices, apart, block, not INTERPRETED, num_warps=divided.warps, num_stages=divided.stages,
    )  # fmt: skip
    if apart:
        add_slices[(triton.cdiv(out.numel(), 1024),)](sums, out, slices, out.numel(), 1024, num_warps=4)
    return out
