"""Compressed entries with their index keys, a few entries per program, and index queries, one row per program.

Rotations and packed bytes take channels apart into even and odd halves of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.compress_entries import COMPRESS_ENTRIES, INDEX_QUERIES, IndexKeys, PairSource
from engine.ops.triton.decode_formats import dot_bf16
from engine.ops.triton.early_start import can_begin_early, let_next_begin, wait_for_last
from engine.ops.triton.encode_formats import e2m1_value, encode_entries, encode_index
from engine.ops.triton.fallback import warn_once
from engine.ops.triton.interpreter import INTERPRETED


@triton.jit
def _normalised(x, norm_ptr, eps, D: tl.constexpr):
    """Root-mean-square norm of rows [N, D], rounded to bf16 as the reference's result is."""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    return (x * scale[:, None] * tl.load(norm_ptr + tl.arange(0, D)).to(tl.float32)[None, :]).to(tl.bfloat16)


@triton.jit
def _halves(x, N: tl.constexpr, D: tl.constexpr):
    """Even and odd channels fp32 [N, D/2] of bf16 [N, D]."""
    return tl.split(tl.reshape(x, (N, D // 2, 2)).to(tl.float32))


@triton.jit
def _angles_of(rot_ptr, row, known, half, D2: tl.constexpr, R2: tl.constexpr):
    """Cosines and sines of the pairs of a row; 1 and 0 in front of the rotary part."""
    turned = half - (D2 - R2)
    cos = tl.load(rot_ptr + row * 2 * R2 + 2 * turned, mask=known & (turned >= 0), other=1.0)
    return cos, tl.load(rot_ptr + row * 2 * R2 + 2 * turned + 1, mask=known & (turned >= 0), other=0.0)


@triton.jit
def _turned(even, odd, cos, sin):
    turned_even = (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32)
    return turned_even, (even * sin + odd * cos).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _entries(
    projected_ptr, partial_ptr, load_ptr, first_ptr, last_ptr, norm_ptr, rot_ptr, latent_ptr, kv_ptr, rows_ptr, num_entries, num_loads, eps,
    D: tl.constexpr, R2: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """N entries of width D: their latents to [E, D] bf16, and packed to rows of the cache."""
    let_next_begin(EARLY)
    entry = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    known = entry < num_entries
    row, there = entry[:, None], known[:, None]
    channel, half = tl.arange(0, D)[None, :], tl.arange(0, D // 2)[None, :]
    # Asked for first, needed last.
    out = kv_ptr + tl.load(rows_ptr + entry, mask=known, other=0)[:, None] * (D // 2 + D // 16)
    cos, sin = _angles_of(rot_ptr, row, there, half, D // 2, R2)
    if PAIRS:
        first = tl.load(first_ptr + entry, mask=known, other=0)
        earlier = first < num_loads
        slot = tl.load(load_ptr + first, mask=known & earlier, other=0)
        begin = tl.where(earlier, partial_ptr + slot * 2 * D, projected_ptr + (first - num_loads) * 2 * D)
        # A choice of pointers forgets that rows are aligned, and with it loads of 16 bytes.
        begin = tl.multiple_of(begin, 16)[:, None] + channel
        end = projected_ptr + tl.load(last_ptr + entry, mask=known, other=0)[:, None] * 2 * D + channel
        gap = tl.load(begin + D, mask=there, other=0.0) - tl.load(end + D, mask=there, other=0.0)
        older, newer = tl.load(begin, mask=there, other=0.0), tl.load(end, mask=there, other=0.0)
        raw = (newer + (older - newer) / (1.0 + tl.exp(-gap))).to(tl.bfloat16)
    else:
        raw = tl.load(projected_ptr + row * D + channel, mask=there, other=0.0)
    latent = _normalised(raw.to(tl.float32), norm_ptr, eps, D)
    tl.store(latent_ptr + row * D + channel, latent, mask=there)
    even, odd = _halves(latent, N, D)
    even, odd = _turned(even, odd, cos, sin)
    codes, scales = encode_entries(even, odd, 8)
    tl.store(out + half, codes.to(tl.uint8), mask=there)
    tl.store(out + D // 2 + tl.arange(0, D // 16)[None, :], scales.to(tl.uint8), mask=there)


@triton.jit
def _keys(
    latent_ptr, weight_ptr, norm_ptr, rot_ptr, block_ptr, blocks_ptr, place_ptr, block_bytes, offset, per_block, num_entries, eps,
    D: tl.constexpr, K: tl.constexpr, R2: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Index keys of width K of N entries of width D; STEP channels of the product at a time."""
    entry = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    known = entry < num_entries
    row, there = entry[:, None], known[:, None]
    half, width = tl.arange(0, K // 2)[None, :], tl.arange(0, K)
    base = blocks_ptr + tl.load(block_ptr + entry, mask=known, other=0)[:, None] * block_bytes + offset
    place = tl.load(place_ptr + entry, mask=known, other=0)[:, None]
    cos, sin = _angles_of(rot_ptr, row, there, half, K // 2, R2)
    key = tl.zeros([N, K], tl.float32)
    wait_for_last(EARLY)
    for step in range(0, D, STEP):
        columns = step + tl.arange(0, STEP)
        part = tl.load(latent_ptr + row * D + columns[None, :], mask=there, other=0.0)
        weight = tl.load(weight_ptr + width[None, :] * D + columns[:, None])
        key = dot_bf16(part, weight, key, FAST)
    even, odd = _halves(_normalised(key.to(tl.bfloat16).to(tl.float32), norm_ptr, eps, K), N, K)
    even, odd = _turned(even, odd, cos, sin)
    codes, scales = encode_index(even, odd, 16)
    tl.store(base + place * (K // 2) + half, codes.to(tl.uint8), mask=there)
    base += per_block * (K // 2)
    tl.store(base + place * (K // 32) + tl.arange(0, K // 32)[None, :], scales.to(tl.uint8), mask=there)


@triton.jit
def _queries(q_ptr, rot_ptr, out_ptr, H, HEADS: tl.constexpr, D2: tl.constexpr, R2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, D2)[None, :]
    at = (row * H + head) * 2 * D2 + 2 * half
    even = tl.load(q_ptr + at, mask=head < H, other=0.0).to(tl.float32)
    odd = tl.load(q_ptr + at + 1, mask=head < H, other=0.0).to(tl.float32)
    cos, sin = _angles_of(rot_ptr, row, head < H, half, D2, R2)
    even, odd = _turned(even, odd, cos, sin)
    codes, scales = encode_index(even, odd, 16)
    tl.store(out_ptr + at, e2m1_value(codes & 15, scales, 16).to(tl.bfloat16), mask=head < H)
    tl.store(out_ptr + at + 1, e2m1_value(codes >> 4, scales, 16).to(tl.bfloat16), mask=head < H)


def _fits(op: str, dtype: torch.dtype, width: int) -> bool:
    """fp32 profiles are reference arithmetic; other widths are said aloud."""
    if dtype is not torch.bfloat16:
        return False
    if width & (width - 1) or width < 32:
        warn_once(op, f"a width of {width} is no power of two from 32")
        return False
    return True


def _angles(rot: Tensor) -> Tensor:
    return torch.view_as_real(rot.resolve_conj().contiguous())


@dataclass(frozen=True, slots=True)
class Tuning:
    """entries, warps: of a program that completes entries. keys, key_warps: entries of a program that makes keys, at least the 16 rows of
    a product, and its warps. step: channels of the product at a time. early: keys begin while entries end.
    """

    entries: int = 1
    warps: int = 4
    keys: int = 16
    key_warps: int = 4
    step: int = 128
    stages: int = 3
    early: bool = False


_FEW_ENTRIES = 264  # whose keys begin while entries end; of 2,048 they take places that entries still need: 16.5 us for 13.6


def tuning_of(entries: int) -> Tuning:
    """No choice changes a bit."""
    return Tuning(early=entries <= _FEW_ENTRIES)


def compress(
    projected: Tensor,
    pairs: PairSource | None,
    norm: Tensor,
    eps: float,
    rot: Tensor,
    kv_rows: Tensor,
    rows: Tensor,
    keys: IndexKeys,
    tuning: Tuning | None = None,
) -> None:
    """The Triton twin of `compress_entries`. Two kernels: in one, every entry waits for the chain of the longest."""
    width, key_width = len(norm), len(keys.norm)
    if not (_fits("compress_entries", norm.dtype, width) and _fits("compress_entries", norm.dtype, key_width)):
        COMPRESS_ENTRIES.fallback(projected, pairs, norm, eps, rot, kv_rows, rows, keys)
        return
    if not len(rows):
        return
    some = rows if pairs is None else pairs.first
    load = some if pairs is None or pairs.load is None else pairs.load
    tuning = tuning or tuning_of(len(rows))
    early = tuning.early and can_begin_early(norm.device)
    places, turn, latent = keys.places, _angles(rot), norm.new_empty(len(rows), width)
    _entries[(triton.cdiv(len(rows), tuning.entries),)](
        projected.contiguous(), projected if pairs is None else pairs.partial, load, some, some if pairs is None else pairs.last,
        norm, turn, latent, kv_rows, rows, len(rows), 0 if pairs is None or pairs.load is None else len(load), eps,
        D=width, R2=rot.shape[1], N=tuning.entries, PAIRS=pairs is not None, EARLY=early, num_warps=tuning.warps if width >= 256 else 1,
    )  # fmt: skip
    _keys[(triton.cdiv(len(rows), tuning.keys),)](
        latent, keys.weight, keys.norm, turn, places.block, places.blocks, places.place, places.blocks.shape[1], places.offset,
        places.per_block, len(rows), eps, D=width, K=key_width, R2=rot.shape[1], N=tuning.keys, STEP=min(tuning.step, width),
        EARLY=early, FAST=not INTERPRETED, num_warps=tuning.key_warps if width >= 256 else 1, num_stages=tuning.stages,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def queries(q: Tensor, rot: Tensor) -> Tensor:
    """The Triton twin of `index_queries`."""
    rows, heads, width = q.shape
    if not _fits("index_queries", q.dtype, width):
        reference: Tensor = INDEX_QUERIES.fallback(q, rot)
        return reference
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if rows:
        few = min(8, triton.next_power_of_2(heads))
        _queries[(rows, triton.cdiv(heads, few))](
            q.contiguous(), _angles(rot), out, heads, HEADS=few, D2=width // 2, R2=rot.shape[1], num_warps=4 if width >= 128 else 1
        )
    return out
