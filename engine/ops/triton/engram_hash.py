"""Table rows of n-grams in one kernel. Integer arithmetic in 64 bits throughout."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.engram_hash import DEAD

_DEAD = tl.constexpr(DEAD)


@triton.jit
def hash_rows(
    grams, multipliers, primes, offsets, rows, num_rows, pad_id, GRAMS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """grams: [T, GRAMS], rows: [T, (GRAMS - 1) * HEADS], both int64. LANES >= HEADS, a power of two."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < num_rows
    head = tl.arange(0, LANES)
    inside = head < HEADS
    first = tl.load(grams + row * GRAMS, mask=alive, other=0)
    blocked = first == _DEAD
    key = tl.where(blocked, pad_id, first) * tl.load(multipliers)
    for size in tl.static_range(1, GRAMS):
        term = tl.load(grams + row * GRAMS + size, mask=alive, other=0)
        blocked = blocked | (term == _DEAD)
        key = key ^ (tl.where(blocked, pad_id, term) * tl.load(multipliers + size))
        at = (size - 1) * HEADS + head
        prime = tl.load(primes + at, mask=inside, other=1)
        offset = tl.load(offsets + at, mask=inside, other=0)
        to = rows + row[:, None] * ((GRAMS - 1) * HEADS) + at[None, :]
        tl.store(to, key[:, None] % prime[None, :] + offset[None, :], mask=alive[:, None] & inside[None, :])


def launch(grams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_id: int) -> Tensor:
    """The op `engram_hash`."""
    (num_rows, num_grams), heads = grams.shape, primes.shape[1]
    rows = torch.empty(num_rows, (num_grams - 1) * heads, dtype=torch.int64, device=grams.device)
    if num_rows:
        tile = 16
        hash_rows[(triton.cdiv(num_rows, tile),)](
            grams.contiguous(), multipliers, primes.contiguous(), offsets.contiguous(), rows, num_rows, pad_id, num_grams, heads, tile,
            triton.next_power_of_2(heads), num_warps=1,
        )  # fmt: skip
    return rows
