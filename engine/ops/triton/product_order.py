"""The columns of tokens in the order of products by warpgroups: `in_order_of_products` of engine/ops/cuda/packed_gemm.py in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.packed_weights import Format

_WORDS = 4096  # of a program


@triton.jit
def reorder(x, out, row_stride, width, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """x: int32 words (pairs of columns) [R, width] with rows row_stride apart, out: [R, width] contiguous.

    A chunk of 4 * STEPS words, four lanes with STEPS each, becomes STEPS lines of four: words stay within 128 bytes, so that a warp reads
    and writes whole lines.
    """
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < width
    place = word % (4 * STEPS)
    to = word - place + place % STEPS * 4 + place // STEPS
    tl.store(out + row * width + to, tl.load(x + row * row_stride + word, mask=inside), mask=inside)


def in_order(x: Tensor, format: Format) -> Tensor:
    """x: [R, whole blocks of columns] bf16, columns contiguous, rows at even places."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    words, width = x.view(torch.int32), x.shape[1] // 2
    if len(x):
        block = min(_WORDS, triton.next_power_of_2(width))
        reorder[len(x), triton.cdiv(width, block)](
            words, out.view(torch.int32), words.stride(0), width, block, 8 if format is Format.FP4 else 4, num_warps=max(1, block // 512)
        )
    return out
