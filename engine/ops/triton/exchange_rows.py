"""The ends of a row's trip to its experts, each one launch, bit for bit as the references."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.exchange_rows import row_words

_WORDS = 1024  # of a row, for one program


@triton.jit
def pack_words(
    x, ids, weights, slots, copies, real, out, rows, most_copies, turn, width, words,
    HAS_REAL: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """x: [T, width] words. The programs of a row's first words also write its choices. SLOTS: a power of two that holds CHOSEN."""
    row = tl.program_id(0).to(tl.int64)
    given = tl.where(row < rows, width, 0)  # words of values, none of padding
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    target = out + row * words
    tl.store(target + word, tl.load(x + row * width + word, mask=word < given, other=0), mask=word < width)
    if tl.program_id(1) == 0:
        choice = tl.arange(0, SLOTS)
        inside = choice < CHOSEN
        known = choice < tl.where(row < rows, CHOSEN, 0)
        expert = tl.load(ids + row * CHOSEN + choice, mask=known, other=0)
        share = tl.load(weights + row * CHOSEN + choice, mask=known, other=0.0)
        copy = (turn + row) % tl.load(copies + expert)
        slot = tl.load(slots + expert * most_copies + copy).to(tl.int32)
        if HAS_REAL:
            known = tl.load(real + row + 0 * choice, mask=known, other=0) != 0
        tl.store(target + width + choice, tl.where(known, slot, -1), mask=inside)
        tl.store(target + width + CHOSEN + choice, share.to(tl.int32, bitcast=True), mask=inside)
        rest = width + 2 * CHOSEN + tl.arange(0, 4)
        tl.store(target + rest, tl.zeros([4], tl.int32), mask=rest < words)


@triton.jit
def split_choices(rows, slots, weights, count, first, owned, width, words, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """count: choices of all rows together."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = place < count
    source = rows + (place // CHOSEN).to(tl.int64) * words + width + place % CHOSEN
    slot = tl.load(source, mask=known, other=-1) - first
    share = tl.load(source + CHOSEN, mask=known, other=0)
    tl.store(slots + place, tl.where((slot >= 0) & (slot < owned), slot, -1).to(tl.int64), mask=known)
    tl.store(weights + place, share.to(tl.float32, bitcast=True), mask=known)


@triton.jit
def add_sums(returned, shared, out, rank_stride, row_stride, columns, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """returned: [ranks, capacity, C] by its strides; shared, out: [T, C]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    source = returned + row * row_stride + column
    for rank in tl.static_range(RANKS):
        total += tl.load(source + rank * tl.cast(rank_stride, tl.int64), mask=known, other=0.0).to(tl.float32)
    place = row * columns + column
    total += tl.load(shared + place, mask=known, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=known)


def pack(x: Tensor, ids: Tensor, weights: Tensor, slots: Tensor, copies: Tensor, real: Tensor | None, turn: int, capacity: int) -> Tensor:
    """The op `pack_rows`."""
    chosen = ids.shape[1]
    width, words = row_words(x, chosen)
    packed = torch.empty(capacity, words, dtype=torch.int32, device=x.device)
    if capacity:
        values = x.contiguous().view(torch.int32)
        flags = copies if real is None else real.view(torch.uint8)
        pack_words[(capacity, triton.cdiv(width, _WORDS))](
            values, ids.contiguous(), weights.contiguous(), slots, copies, flags, packed, len(x), slots.shape[1], turn, width, words,
            HAS_REAL=real is not None, CHOSEN=chosen, SLOTS=triton.next_power_of_2(chosen), WORDS=_WORDS, num_warps=4,
        )  # fmt: skip
    return packed


def choices(rows: Tensor, width: int, chosen: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The op `local_choices`."""
    slots = torch.empty(len(rows), chosen, dtype=torch.int64, device=rows.device)
    weights = torch.empty(len(rows), chosen, device=rows.device)
    if slots.numel():
        grid = (triton.cdiv(slots.numel(), 256),)
        split_choices[grid](
            rows, slots, weights, slots.numel(), first, count, width, rows.shape[1], CHOSEN=chosen, BLOCK=256, num_warps=4
        )  # fmt: skip
    return slots, weights


def add(returned: Tensor, shared: Tensor) -> Tensor:
    """The op `add_rank_sums`."""
    shared = shared.contiguous()
    out = torch.empty_like(shared)
    if out.numel():
        rank_stride, row_stride, _ = returned.stride()
        add_sums[(len(out), triton.cdiv(out.shape[1], _WORDS))](
            returned, shared, out, rank_stride, row_stride, out.shape[1], RANKS=len(returned), BLOCK=_WORDS, num_warps=4
        )  # fmt: skip
    return out
