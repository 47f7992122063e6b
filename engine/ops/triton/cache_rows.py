"""Packing of cache rows, bit for bit as the references, one program per few rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cache_rows import (
    PACK_ENTRY_ROWS,
    PACK_INDEX_ROWS,
    PACK_WINDOW_ROWS,
    entry_row_bytes,
    index_row_bytes,
    window_row_bytes,
)
from engine.ops.registry import Op
from engine.ops.triton.encode_formats import encode_e4m3, encode_entries, encode_index
from engine.ops.triton.fallback import warn_once

_WINDOW, _ENTRY, _INDEX = 0, 1, 2


@triton.jit
def _pack(x_ptr, out_ptr, rows, KIND: tl.constexpr, D2: tl.constexpr, N: tl.constexpr):
    row = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)[:, None]
    known = row < rows
    half = tl.arange(0, D2)[None, :]
    even = tl.load(x_ptr + row * (2 * D2) + 2 * half, mask=known, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + row * (2 * D2) + 2 * half + 1, mask=known, other=0.0).to(tl.float32)
    if KIND == 0:
        words, scales = encode_e4m3(even, odd, 16)
        out = out_ptr + row * (2 * D2 + D2 // 16)
        tl.store(out + 2 * half, (words & 0xFF).to(tl.uint8), mask=known)
        tl.store(out + 2 * half + 1, (words >> 8).to(tl.uint8), mask=known)
        tl.store(out + 2 * D2 + tl.arange(0, D2 // 16)[None, :], scales.to(tl.uint8), mask=known)
    else:
        GROUP2: tl.constexpr = 8 if KIND == 1 else 16
        if KIND == 1:
            codes, scales = encode_entries(even, odd, GROUP2)
        else:
            codes, scales = encode_index(even, odd, GROUP2)
        out = out_ptr + row * (D2 + D2 // GROUP2)
        tl.store(out + half, codes.to(tl.uint8), mask=known)
        tl.store(out + D2 + tl.arange(0, D2 // GROUP2)[None, :], scales.to(tl.uint8), mask=known)


def _launch(op: Op, kind: int, row_bytes: int, x: Tensor) -> Tensor:
    width = x.shape[-1]
    if width & (width - 1) or width < 32:
        warn_once(op.name, f"a width of {width} is no power of two from 32")
        packed: Tensor = op.fallback(x)
        return packed
    out = torch.empty(*x.shape[:-1], row_bytes, dtype=torch.uint8, device=x.device)
    rows = out.numel() // row_bytes
    if rows:
        few = max(1, 1024 // width)
        _pack[(triton.cdiv(rows, few),)](x.contiguous(), out, rows, KIND=kind, D2=width // 2, N=few, num_warps=4)
    return out


def pack_window(x: Tensor) -> Tensor:
    """The Triton twin of `pack_window_rows`."""
    return _launch(PACK_WINDOW_ROWS, _WINDOW, window_row_bytes(x.shape[-1]), x)


def pack_entries(x: Tensor) -> Tensor:
    """The Triton twin of `pack_entry_rows`."""
    return _launch(PACK_ENTRY_ROWS, _ENTRY, entry_row_bytes(x.shape[-1]), x)


def pack_index(x: Tensor) -> Tensor:
    """The Triton twin of `pack_index_rows`."""
    return _launch(PACK_INDEX_ROWS, _INDEX, index_row_bytes(x.shape[-1]), x)
