"""Gate and add the looked-up values, one program per row and stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FLOOR = tl.constexpr(1e-6)  # as in the reference


@triton.jit
def gate_streams(h, kv, weight, out, width, eps, root, STREAMS: tl.constexpr, COLS: tl.constexpr):
    """h, out: [T, STREAMS, C]; kv: [T, (STREAMS + 1) * C], keys, then the value; weight: [STREAMS, C] fp32. root: C^-0.5. COLS >= C."""
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    cols = tl.arange(0, COLS)
    mask = cols < width
    at = (row * STREAMS + stream) * width + cols
    x = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
    keys = kv + row * (STREAMS + 1) * width + cols
    key = tl.load(keys + stream * width, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + stream * width + cols, mask=mask, other=0.0)
    dot = tl.sum(x * w * key, axis=0) * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * tl.rsqrt(tl.sum(key * key, axis=0) / width + eps)
    dot = dot * root
    size = tl.sqrt(tl.maximum(tl.abs(dot), _FLOOR, propagate_nan=tl.PropagateNan.ALL))
    gate = 1.0 / (1.0 + tl.exp(tl.where(dot < 0, size, -size)))
    value = tl.load(keys + STREAMS * width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (x + gate * value).to(out.dtype.element_ty), mask=mask)


def launch(h: Tensor, kv: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op `engram_gate`."""
    rows, streams, width = h.shape
    h, kv = h.contiguous(), kv.contiguous()
    out = torch.empty_like(h)
    if rows:
        block = triton.next_power_of_2(width)
        gate_streams[rows, streams](
            h, kv, weight, out, width, eps, width**-0.5, streams, block, num_warps=max(1, min(8, block // 512)), enable_fp_fusion=False
        )
    return out
