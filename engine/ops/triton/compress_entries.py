"""One program per entry or query row. Channels are handled as even and odd halves of pairs, which is what rotations mix and bytes hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.compress_entries import COMPRESS_ENTRIES, INDEX_QUERIES, STORE_INDEX_KEYS, IndexPlaces, PairSource
from engine.ops.triton.encode_formats import e2m1_value, encode_entries, encode_index
from engine.ops.triton.fallback import warn_once


@triton.jit
def _normalised(even, odd, norm_ptr, eps, half, D2: tl.constexpr):
    """Root-mean-square norm of one row [1, D/2] each, rounded to bf16 as the reference's result is."""
    scale = tl.rsqrt((tl.sum(even * even) + tl.sum(odd * odd)) / (2 * D2) + eps)
    even = even * scale * tl.load(norm_ptr + 2 * half).to(tl.float32)
    odd = odd * scale * tl.load(norm_ptr + 2 * half + 1).to(tl.float32)
    return even.to(tl.bfloat16).to(tl.float32), odd.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _rotated(even, odd, rot_ptr, row, half, D2: tl.constexpr, R2: tl.constexpr):
    turned = half - (D2 - R2)
    cos = tl.load(rot_ptr + row * 2 * R2 + 2 * turned, mask=turned >= 0, other=1.0)
    sin = tl.load(rot_ptr + row * 2 * R2 + 2 * turned + 1, mask=turned >= 0, other=0.0)
    turned_even = (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32)
    return turned_even, (even * sin + odd * cos).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _compress(
    projected_ptr, partial_ptr, load_ptr, first_ptr, last_ptr, norm_ptr, rot_ptr, latent_ptr, kv_ptr, rows_ptr, num_loads, eps,
    D2: tl.constexpr, R2: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, D2)[None, :]
    if PAIRS:
        first = tl.load(first_ptr + entry)
        begin = projected_ptr + (first - num_loads) * 4 * D2
        if first < num_loads:
            begin = partial_ptr + tl.load(load_ptr + first) * 4 * D2
        end = projected_ptr + tl.load(last_ptr + entry) * 4 * D2
        even, odd = _pooled(begin, end, 2 * half, D2), _pooled(begin, end, 2 * half + 1, D2)
    else:
        even = tl.load(projected_ptr + entry * 2 * D2 + 2 * half).to(tl.float32)
        odd = tl.load(projected_ptr + entry * 2 * D2 + 2 * half + 1).to(tl.float32)
    even, odd = _normalised(even, odd, norm_ptr, eps, half, D2)
    tl.store(latent_ptr + entry * 2 * D2 + 2 * half, even.to(tl.bfloat16))
    tl.store(latent_ptr + entry * 2 * D2 + 2 * half + 1, odd.to(tl.bfloat16))
    even, odd = _rotated(even, odd, rot_ptr, entry, half, D2, R2)
    codes, scales = encode_entries(even, odd, 8)
    out = kv_ptr + tl.load(rows_ptr + entry) * (D2 + D2 // 8)
    tl.store(out + half, codes.to(tl.uint8))
    tl.store(out + D2 + tl.arange(0, D2 // 8)[None, :], scales.to(tl.uint8))


@triton.jit
def _pooled(begin, end, channel, D2: tl.constexpr):
    """Weighted sum of two tokens' values by their gates, rounded to bf16."""
    gap = tl.load(begin + 2 * D2 + channel) - tl.load(end + 2 * D2 + channel)
    share = 1.0 / (1.0 + tl.exp(-gap))
    first, last = tl.load(begin + channel), tl.load(end + channel)
    return (last + share * (first - last)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _store_keys(
    raw_ptr, norm_ptr, rot_ptr, block_ptr, blocks_ptr, place_ptr, block_bytes, offset, per_block, eps,
    D2: tl.constexpr, R2: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, D2)[None, :]
    even = tl.load(raw_ptr + entry * 2 * D2 + 2 * half).to(tl.float32)
    odd = tl.load(raw_ptr + entry * 2 * D2 + 2 * half + 1).to(tl.float32)
    even, odd = _normalised(even, odd, norm_ptr, eps, half, D2)
    even, odd = _rotated(even, odd, rot_ptr, entry, half, D2, R2)
    codes, scales = encode_index(even, odd, 16)
    base = blocks_ptr + tl.load(block_ptr + entry) * block_bytes + offset
    place = tl.load(place_ptr + entry)
    tl.store(base + place * D2 + half, codes.to(tl.uint8))
    tl.store(base + per_block * D2 + place * (D2 // 16) + tl.arange(0, D2 // 16)[None, :], scales.to(tl.uint8))


@triton.jit
def _queries(q_ptr, rot_ptr, out_ptr, H, HEADS: tl.constexpr, D2: tl.constexpr, R2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, D2)[None, :]
    at = (row * H + head) * 2 * D2 + 2 * half
    even = tl.load(q_ptr + at, mask=head < H, other=0.0).to(tl.float32)
    odd = tl.load(q_ptr + at + 1, mask=head < H, other=0.0).to(tl.float32)
    even, odd = _rotated(even, odd, rot_ptr, row, half, D2, R2)
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


def compress(projected: Tensor, pairs: PairSource | None, norm: Tensor, eps: float, rot: Tensor, kv_rows: Tensor, rows: Tensor) -> Tensor:
    """The Triton twin of `compress_entries`."""
    if not _fits("compress_entries", norm.dtype, len(norm)):
        reference: Tensor = COMPRESS_ENTRIES.reference(projected, pairs, norm, eps, rot, kv_rows, rows)
        return reference
    latent = torch.empty(len(rows), len(norm), dtype=norm.dtype, device=norm.device)
    if not len(rows):
        return latent
    projected = projected.contiguous()
    some = rows if pairs is None else pairs.first
    load = some if pairs is None or pairs.load is None else pairs.load
    num_loads = 0 if pairs is None or pairs.load is None else len(load)
    _compress[(len(rows),)](
        projected, projected if pairs is None else pairs.partial, load, some,
        some if pairs is None else pairs.last, norm, _angles(rot), latent, kv_rows, rows, num_loads, eps,
        D2=len(norm) // 2, R2=rot.shape[1], PAIRS=pairs is not None, num_warps=4 if len(norm) >= 256 else 1,
    )  # fmt: skip
    return latent


def store_keys(raw: Tensor, norm: Tensor, eps: float, rot: Tensor, places: IndexPlaces) -> None:
    """The Triton twin of `store_index_keys`."""
    if not _fits("store_index_keys", norm.dtype, len(norm)):
        STORE_INDEX_KEYS.reference(raw, norm, eps, rot, places)
    elif len(raw):
        _store_keys[(len(raw),)](
            raw.contiguous(), norm, _angles(rot), places.block, places.blocks, places.place, places.blocks.shape[1], places.offset,
            places.per_block, eps, D2=len(norm) // 2, R2=rot.shape[1], num_warps=1,
        )  # fmt: skip


def queries(q: Tensor, rot: Tensor) -> Tensor:
    """The Triton twin of `index_queries`."""
    rows, heads, width = q.shape
    if not _fits("index_queries", q.dtype, width):
        reference: Tensor = INDEX_QUERIES.reference(q, rot)
        return reference
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if rows:
        few = min(8, triton.next_power_of_2(heads))
        _queries[(rows, triton.cdiv(heads, few))](
            q.contiguous(), _angles(rot), out, heads, HEADS=few, D2=width // 2, R2=rot.shape[1], num_warps=4 if width >= 128 else 1
        )
    return out
