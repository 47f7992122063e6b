"""Rows on their way to the ranks that hold their experts, and back: one launch for each end of a trip.

A row travels as 32-bit words: its values, its K physical slots, its K weights, and words of no meaning up to a multiple of four.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

_ALIGNED = 4  # words: kernels read rows where they arrive, 16 bytes at a time


def row_words(x: Tensor, chosen: int) -> tuple[int, int]:
    """Words of a row's values, and of the row. x: [T, C]."""
    values = x.shape[1] * x.element_size() // 4
    return values, words_of(values, chosen)


def words_of(values: int, chosen: int) -> int:
    """Words of a row with so many words of values."""
    return -(-(values + 2 * chosen) // _ALIGNED) * _ALIGNED


def pack_rows(
    x: Tensor, ids: Tensor, weights: Tensor, slots: Tensor, copies: Tensor, real: Tensor | None, turn: int, capacity: int
) -> Tensor:
    """[capacity, W] int32: the rows as they travel, then rows of zeros without a choice: slots below 0.

    x: [T, C], C values in whole words. ids: [T, K] int64, weights: [T, K] fp32. slots: [E, M] int64 and copies: [E] int64, an expert's
    physical slots; row i takes number (turn + i) modulo its copies. real: [T] bool, the rows that want experts; None for all of them.
    """
    fits = x.ndim == 2 and ids.shape == weights.shape and len(ids) == len(x) <= capacity and len(slots) == len(copies)
    whole = x.shape[1] * x.element_size() % 4 == 0 and (real is None or len(real) == len(x))
    check(fits and whole and weights.dtype == torch.float32, "pack_rows", x=x, ids=ids, weights=weights, slots=slots)
    packed: Tensor = PACK_ROWS(x, ids, weights, slots, copies, real, turn, capacity)
    return packed


def local_choices(rows: Tensor, width: int, chosen: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Slots [R, K] int64 of a rank that owns the physical slots [first, first + count), -1 for those of others, and weights [R, K] fp32.

    rows: [R, W] int32 as `pack_rows` makes them, contiguous; width: words of a row's values.
    """
    check(rows.dtype == torch.int32 and rows.is_contiguous() and width + 2 * chosen <= rows.shape[1], "local_choices", rows=rows)
    slots, weights = LOCAL_CHOICES(rows, width, chosen, first, count)
    return slots, weights


def add_rank_sums(returned: Tensor, shared: Tensor) -> Tensor:
    """The ranks' sums added up in fp32 in rank order from 0, then the shared expert's, rounded once to its dtype.

    returned: [ranks, capacity, C], rows contiguous. shared: [T, C] with T <= capacity. Returns [T, C].
    """
    fits = returned.ndim == 3 and shared.shape[1] == returned.shape[2] and len(shared) <= returned.shape[1]
    check(fits and returned.stride(2) == 1, "add_rank_sums", returned=returned, shared=shared)
    total: Tensor = ADD_RANK_SUMS(returned, shared)
    return total


def _pack(x: Tensor, ids: Tensor, weights: Tensor, slots: Tensor, copies: Tensor, real: Tensor | None, turn: int, capacity: int) -> Tensor:
    if slots.shape[1] == 1:
        physical = slots[:, 0][ids]
    else:
        row = torch.arange(turn, turn + len(ids), device=ids.device)[:, None]
        physical = slots[ids, row % copies[ids]]
    if real is not None:
        physical = torch.where(real[:, None], physical, -1)
    chosen = ids.shape[1]
    width, words = row_words(x, chosen)
    packed = torch.zeros(capacity, words, dtype=torch.int32, device=x.device)
    packed[: len(x), :width] = x.contiguous().view(torch.int32)
    packed[: len(x), width : width + chosen] = physical.int()
    packed[: len(x), width + chosen : width + 2 * chosen] = weights.contiguous().view(torch.int32)
    packed[len(x) :, width : width + chosen] = -1
    return packed


def _local(rows: Tensor, width: int, chosen: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    slot = rows[:, width : width + chosen].long() - first
    weights = rows[:, width + chosen : width + 2 * chosen].contiguous().view(torch.float32)
    return torch.where((slot >= 0) & (slot < count), slot, -1), weights


def _add(returned: Tensor, shared: Tensor) -> Tensor:
    total = torch.zeros(shared.shape, dtype=torch.float32, device=shared.device)
    for sums in returned[:, : len(shared)]:
        total += sums.float()
    return (total + shared).to(shared.dtype)


_KERNELS = "engine.ops.triton.exchange_rows"
PACK_ROWS = Op("pack_rows", reference=_pack, triton=f"{_KERNELS}:pack", tolerance=Tolerance())
LOCAL_CHOICES = Op("local_choices", reference=_local, triton=f"{_KERNELS}:choices", tolerance=Tolerance())
ADD_RANK_SUMS = Op("add_rank_sums", reference=_add, triton=f"{_KERNELS}:add", tolerance=Tolerance())
