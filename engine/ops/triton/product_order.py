"""The columns of tokens in the order of products by warpgroups: `in_order_of_products` of engine/ops/cuda/packed_gemm.py in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.packed_weights import Format

_WORDS = 4096  # of a program


@triton.jit
def reorder(
    x, out, row_stride, width, slices, short, longer, GROUPS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """x: int32 words (pairs of columns) [R, GROUPS * width] with rows row_stride apart, out: the same contiguous.

    A chunk of 4 * STEPS words, four lanes with STEPS each, becomes STEPS lines of four: words stay within 128 bytes, so that a warp reads
    and writes whole lines. Every slices-th block of PIECE words goes to the same slice, of `short` blocks or, of the first `longer`, one
    more.
    """
    row, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < width
    place = word % (4 * STEPS)
    block, slice = word // PIECE, word // PIECE % slices
    to = (slice * short + tl.minimum(slice, longer) + block // slices) * PIECE
    to += word % PIECE - place + place % STEPS * 4 + place // STEPS
    value = tl.load(x + row * row_stride + group * width + word, mask=inside)
    tl.store(out + (row * GROUPS + group) * width + to, value, mask=inside)


def in_order(x: Tensor, format: Format, groups: int = 1, slices: int = 1) -> Tensor:
    """x: [R, groups * whole blocks of columns] bf16, columns contiguous, rows at even places."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    words, width = x.view(torch.int32), x.shape[1] // 2 // groups
    piece = format.block_columns // 2
    if len(x):
        block = min(_WORDS, triton.next_power_of_2(width))
        reorder[len(x) * groups, triton.cdiv(width, block)](
            words, out.view(torch.int32), words.stride(0), width, slices, width // piece // slices, width // piece % slices, groups, block,
            8 if format is Format.FP4 else 4, piece, num_warps=max(1, block // 512),
        )  # fmt: skip
    return out
