"""Split-KV attention over packed rows: one program per query row, group of heads and part of its keys, then a combining kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.row_attention import ROW_ATTENTION, PackedKeys
from engine.ops.triton.decode_formats import SHRINK, decode_e2m1, decode_e4m3, dot_bf16
from engine.ops.triton.fallback import warn_once
from engine.ops.triton.interpreter import INTERPRETED

_LOG2E = tl.constexpr(1.4426950408889634)
# Keys of a part in batch-invariant mode: two parts of a decoder row at the released sizes, which fill a device from 64 rows on.
_PART_KEYS = 320
# Parts of a row wait in memory for the combining kernel: of so many bytes at a time.
_PART_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Tuning:
    """keys: per tile, of heads at least 256 wide. stages: tiles whose rows are under way while one is computed, plus one."""

    hopper: bool = True  # the layouts of `row_attention_hopper`, where the shape is theirs
    decoders: int | None = None  # and 0, 4 or 8 warps that only decode, of `row_attention_roles`; None: as many as are fastest
    joined: int = 256  # rows of batch-invariant mode from which on one program has all parts of a row, if some warps decode; 0: never
    keys: int = 64
    stages: int = 2
    warps: int = 8


_TUNING = Tuning()


@triton.jit
def _cos_sin(rot_ptr, row, D2: tl.constexpr, R2: tl.constexpr):
    """Cosines and sines [D/2] of a row's pairs; 1 and 0 in front of the rotary part."""
    turned = tl.arange(0, D2) - (D2 - R2)
    cos = tl.load(rot_ptr + row * 2 * R2 + 2 * turned, mask=turned >= 0, other=1.0)
    sin = tl.load(rot_ptr + row * 2 * R2 + 2 * turned + 1, mask=turned >= 0, other=0.0)
    return cos, sin


@triton.jit
def _rotate_query(q_ptr, rot_ptr, planes_ptr, row, heads, H, D2: tl.constexpr, R2: tl.constexpr):
    """Write rotated even channels, then odd ones, of some heads to bf16 [T, H, 2, D/2].

    The tensor cores read the first operand from shared memory only when it was just loaded; otherwise it fills registers that the
    output needs. So the rotated query takes a detour through the output's own memory. Splits of a row write equal values.
    """
    cos, sin = _cos_sin(rot_ptr, row, D2, R2)
    half, known = tl.arange(0, D2), heads[:, None] < H
    pairs = tl.load(q_ptr + (row * H + heads[:, None]) * D2 + half[None, :], mask=known, other=0)
    even, odd = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    at = planes_ptr + (row * H + heads[:, None]) * 2 * D2 + half[None, :]
    tl.store(at, (even * cos[None, :] - odd * sin[None, :]).to(tl.bfloat16), mask=known)
    tl.store(at + D2, (even * sin[None, :] + odd * cos[None, :]).to(tl.bfloat16), mask=known)
    tl.debug_barrier()


@triton.jit
def _store_output(out_ptr, rot_ptr, row, heads, H, even, odd, D2: tl.constexpr, R2: tl.constexpr):
    """Turn back, round and store. even, odd: fp32 [HEADS, D/2]."""
    cos, sin = _cos_sin(rot_ptr, row, D2, R2)
    half = tl.arange(0, D2)
    cos, sin = tl.broadcast_to(cos[None, :], even.shape), tl.broadcast_to(sin[None, :], even.shape)
    back_even = tl.fma(even, cos, odd * sin).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    back_odd = tl.fma(odd, cos, -(even * sin)).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    tl.store(out_ptr + (row * H + heads[:, None]) * D2 + half[None, :], back_even | (back_odd << 16), mask=heads[:, None] < H)


@triton.jit
def _absorb(qe, qo, ke, ko, present, scale, m, den, oe, oo, FAST: tl.constexpr):
    """One tile of the online softmax. ke, ko: bf16 [N, D/2], zero where absent. Scores are in units of log 2."""
    scores = tl.zeros((qe.shape[0], ke.shape[0]), tl.float32)
    scores = dot_bf16(qo, tl.trans(ko), dot_bf16(qe, tl.trans(ke), scores, FAST), FAST) * scale
    scores = tl.where(present[None, :], scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    shrink = tl.exp2(m - top)
    p = tl.exp2(scores - top[:, None])
    den = den * shrink + tl.sum(p, 1)
    p = p.to(tl.bfloat16)
    oe = dot_bf16(p, ke, oe * shrink[:, None], FAST)
    oo = dot_bf16(p, ko, oo * shrink[:, None], FAST)
    return top, den, oe, oo


@triton.jit
def _load_window_rows(rows_ptr, index, present, D2: tl.constexpr, FAST: tl.constexpr):
    """Even and odd channels bf16 [N, D/2] of packed window rows; absent rows are 0. index: int64 [N]."""
    BYTES: tl.constexpr = 2 * D2 + D2 // 16
    half, group = tl.arange(0, D2), tl.arange(0, D2 // 16)
    at = index[:, None] * (BYTES // 2) + half[None, :]
    words = tl.load(rows_ptr.to(tl.pointer_type(tl.uint16)) + at, mask=present[:, None], other=0)
    exponents = tl.load(rows_ptr + index[:, None] * BYTES + 2 * D2 + group[None, :], mask=present[:, None], other=0)
    return decode_e4m3(words, exponents, FAST)


@triton.jit
def _load_entry_rows(rows_ptr, index, present, D2: tl.constexpr, FAST: tl.constexpr):
    """The same of packed compressed entries."""
    BYTES: tl.constexpr = D2 + D2 // 8
    half, group = tl.arange(0, D2), tl.arange(0, D2 // 8)
    pairs = tl.load(rows_ptr + index[:, None] * BYTES + half[None, :], mask=present[:, None], other=0)
    scales = tl.load(rows_ptr + index[:, None] * BYTES + D2 + group[None, :], mask=present[:, None], other=0)
    return decode_e2m1(pairs, scales, False, FAST)


@triton.jit
def _attend(
    q_ptr, rot_ptr, window_ptr, window_index_ptr, second_ptr, second_index_ptr, sink_ptr, out_ptr, planes_ptr, part_ptr, stat_ptr,
    H, W, K, per, scale,
    HEADS: tl.constexpr, D2: tl.constexpr, R2: tl.constexpr, N: tl.constexpr, ALONE: tl.constexpr,
    SECOND_FP8: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """per: tiles of keys of one part, of which `program 1` is the number."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    heads = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    half, lane = tl.arange(0, D2), tl.arange(0, N)
    _rotate_query(q_ptr, rot_ptr, planes_ptr, row, heads, H, D2, R2)
    query = planes_ptr + (row * H + heads[:, None]) * 2 * D2 + half[None, :]
    qe = tl.load(query, mask=heads[:, None] < H, other=0.0)
    qo = tl.load(query + D2, mask=heads[:, None] < H, other=0.0)
    m = tl.full((HEADS,), -1e30, tl.float32)
    den = tl.zeros((HEADS,), tl.float32)
    oe = tl.zeros((HEADS, D2), tl.float32)
    oo = tl.zeros((HEADS, D2), tl.float32)
    window_tiles = tl.cdiv(W, N)
    tiles = window_tiles + tl.cdiv(K, N)
    begin, end = split * per, tl.minimum((split + 1) * per, tiles)
    for tile in tl.range(begin, tl.minimum(end, window_tiles), num_stages=STAGES):
        at = tile * N + lane
        index = tl.load(window_index_ptr + row * W + at, mask=at < W, other=-1).to(tl.int64)
        present = index >= 0
        ke, ko = _load_window_rows(window_ptr, index, present, D2, FAST)
        m, den, oe, oo = _absorb(qe, qo, ke, ko, present, scale, m, den, oe, oo, FAST)
    for tile in tl.range(tl.maximum(begin, window_tiles) - window_tiles, end - window_tiles, num_stages=STAGES):
        at = tile * N + lane
        index = tl.load(second_index_ptr + row * K + at, mask=at < K, other=-1).to(tl.int64)
        present = index >= 0
        if SECOND_FP8:
            ke, ko = _load_window_rows(second_ptr, index, present, D2, FAST)
        else:
            ke, ko = _load_entry_rows(second_ptr, index, present, D2, FAST)
        m, den, oe, oo = _absorb(qe, qo, ke, ko, present, scale, m, den, oe, oo, FAST)
    if ALONE:
        sink = tl.load(sink_ptr + heads, mask=heads < H, other=0.0)
        factor = SHRINK / (den + tl.exp2(sink * _LOG2E - m))
        _store_output(out_ptr, rot_ptr, row, heads, H, oe * factor[:, None], oo * factor[:, None], D2, R2)
    else:
        place = (row * splits + split) * H + heads
        tl.store(part_ptr + place[:, None] * (2 * D2) + half[None, :], oe, mask=heads[:, None] < H)
        tl.store(part_ptr + place[:, None] * (2 * D2) + D2 + half[None, :], oo, mask=heads[:, None] < H)
        tl.store(stat_ptr + place * 2, m, mask=heads < H)
        tl.store(stat_ptr + place * 2 + 1, den, mask=heads < H)


@triton.jit
def _combine(
    rot_ptr, sink_ptr, part_ptr, stat_ptr, out_ptr, H, splits,
    HEADS: tl.constexpr, D2: tl.constexpr, R2: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Join the parts of a row from its last keys to its first, add the sink, turn back: parts without a key add nothing, however many.

    PARTS: are loaded before the first is used; those that there are not count as parts without a key.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half, known = tl.arange(0, D2), heads < H
    first = row * splits * H + heads
    m = tl.full((HEADS,), -1e30, tl.float32)
    for base in range(0, splits, PARTS):
        for i in tl.static_range(PARTS):
            there = known & (heads * 0 + base + i < splits)  # a tensor, for the interpreter too
            m = tl.maximum(m, tl.load(stat_ptr + (first + (base + i) * H) * 2, mask=there, other=-1e30))
    den = tl.zeros((HEADS,), tl.float32)
    even = tl.zeros((HEADS, D2), tl.float32)
    odd = tl.zeros((HEADS, D2), tl.float32)
    for base in range(0, splits, PARTS):
        for i in tl.static_range(PARTS):
            there, place = known & (heads * 0 + base + i < splits), first + (splits - 1 - base - i) * H
            share = tl.exp2(tl.load(stat_ptr + place * 2, mask=there, other=-1e30) - m)
            den = tl.fma(share, tl.load(stat_ptr + place * 2 + 1, mask=there, other=0.0), den)
            at = part_ptr + place[:, None] * (2 * D2) + half[None, :]
            even = tl.fma(share[:, None], tl.load(at, mask=there[:, None], other=0.0), even)
            odd = tl.fma(share[:, None], tl.load(at + D2, mask=there[:, None], other=0.0), odd)
    factor = SHRINK / (den + tl.exp2(tl.load(sink_ptr + heads, mask=known, other=0.0) * _LOG2E - m))
    _store_output(out_ptr, rot_ptr, row, heads, H, even * factor[:, None], odd * factor[:, None], D2, R2)


def launch_invariant(q: Tensor, rot: Tensor, sources: list[PackedKeys], sink: Tensor, scale: float, splits: int = 0) -> Tensor:
    """`launch` with parts of one length, joined even where there is one: parts without a key of a row, whose number depends on its
    neighbours, add exactly nothing.
    """
    return launch(q, rot, sources, sink, scale, splits, part_keys=_PART_KEYS)


def launch(
    q: Tensor,
    rot: Tensor,
    sources: list[PackedKeys],
    sink: Tensor,
    scale: float,
    splits: int = 0,
    tuning: Tuning = _TUNING,
    part_keys: int = 0,
) -> Tensor:
    """The Triton twin of `row_attention`. fp32 queries and widths that are no power of two run the reference.

    part_keys: keys of a part, whatever the batch; 0 for parts as `splits` says.
    """
    num_rows, num_heads, width = q.shape
    if q.dtype is not torch.bfloat16 or width & (width - 1) or not 64 <= width <= 512:
        if q.dtype is torch.bfloat16:
            warn_once("row_attention", f"a head width of {width} is no power of two from 64 to 512")
        return ROW_ATTENTION.fallback(q, rot, sources, sink, scale, splits)
    out, tile = torch.empty_like(q, memory_format=torch.contiguous_format), tuning.keys if width >= 256 else 32
    tiles = sum(triton.cdiv(source.index.shape[1], tile) for source in sources)
    groups = triton.cdiv(num_heads, _heads(num_heads))
    wanted = splits or max(1, _num_processors() // max(1, num_rows * groups))
    per = part_keys // tile if part_keys else triton.cdiv(tiles, min(wanted, tiles))
    splits = triton.cdiv(tiles, per)
    alone = splits == 1 and not part_keys
    step = num_rows if alone else max(1, _PART_BYTES // (4 * splits * num_heads * width))
    for begin in range(0, num_rows, max(1, step)):
        rows = slice(begin, begin + step)
        some = [PackedKeys(source.rows, source.index[rows]) for source in sources]
        joined = part_keys > 0 and 0 < tuning.joined <= num_rows
        _launch_rows(q[rows], rot[rows], some, sink, scale, out[rows], per, 0 if alone else splits, tuning, joined)
    return out


def _heads(num_heads: int) -> int:
    """Heads of one program."""
    return min(64, max(16, triton.next_power_of_2(num_heads)))


def _launch_rows(
    q: Tensor,
    rot: Tensor,
    sources: list[PackedKeys],
    sink: Tensor,
    scale: float,
    out: Tensor,
    per: int,
    splits: int,
    tuning: Tuning,
    joined: bool,
) -> None:
    """Rows whose parts are in memory together. splits: parts of `per` tiles, 0 when a program has all keys of its row. joined: it also has
    all parts of it, where there is such a kernel; the bits are the same.
    """
    num_rows, num_heads, width = q.shape
    window, second = sources[0], sources[-1]
    num_window = window.index.shape[1]
    num_second = second.index.shape[1] if len(sources) == 2 else 0
    heads, tile = _heads(num_heads), tuning.keys if width >= 256 else 32
    part = stat = out
    if splits:
        part = q.new_empty(num_rows, splits, num_heads, width, dtype=torch.float32)
        stat = q.new_empty(num_rows, splits, num_heads, 2, dtype=torch.float32)
    angles, shape = torch.view_as_real(rot), {"D2": width // 2, "R2": rot.shape[1]}
    words, factor = out.view(torch.int32), scale * _LOG2E.value * SHRINK.value
    second_fp8 = num_second > 0 and second.rows.shape[-1] == window.rows.shape[-1]
    if tuning.hopper and not second_fp8 and (num_heads, width, rot.shape[1]) == (64, 512, 32) and _is_hopper():
        decoders = (8 if per == 1 else 4) if tuning.decoders is None else tuning.decoders
        joined = joined and decoders > 0
        roles = {"DECODERS": decoders, "JOINED": joined} if decoders else {}
        if roles:
            from engine.ops.triton.row_attention_roles import attend
        else:
            from engine.ops.triton.row_attention_hopper import attend
        attend[(num_rows, 1 if joined else splits or 1)](
            q.contiguous().view(torch.int32), angles, window.rows, window.index, second.rows, second.index, sink, words, part, stat,
            num_window, num_second, per, factor, ALONE=not splits, num_warps=8, **roles,
        )  # fmt: skip
    else:
        joined = False
        _attend[(num_rows, splits or 1, triton.cdiv(num_heads, heads))](
            q.contiguous().view(torch.int32), angles, window.rows, window.index, second.rows, second.index, sink, words, out, part, stat,
            num_heads, num_window, num_second, per, factor, HEADS=heads, N=tile, SECOND_FP8=second_fp8, ALONE=not splits,
            FAST=not INTERPRETED, STAGES=tuning.stages, num_warps=tuning.warps if heads == 64 else 4, **shape,
        )  # fmt: skip
    if splits and not joined:
        few = 1 if num_rows * num_heads <= 1024 else min(4, heads)
        _combine[(num_rows, triton.cdiv(num_heads, few))](
            angles, sink, part, stat, words, num_heads, splits, HEADS=few, PARTS=_parts_at_once(splits), num_warps=4, **shape
        )


def _parts_at_once(splits: int) -> int:
    """How many parts the combining kernel loads before it uses the first: a few numbers, for each of which it is compiled."""
    return min(16, triton.next_power_of_2(splits))


def _is_hopper() -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability()[0] == 9


def _num_processors() -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties().multi_processor_count
