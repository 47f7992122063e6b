"""Which table rows the last n tokens of each position select."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

DEAD = -1


def engram_hash(grams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_id: int) -> Tensor:
    """Multiply, xor and reduce the ids of every n-gram size to one row per head.

    grams: [T, G] int64 compressed ids, column s holds the id s positions back; DEAD (-1) marks positions before the sequence and
    image positions, and blocks everything older. multipliers: [G] int64. primes, offsets: [G-1, heads] int64. pad_id: compressed id
    that replaces blocked ones. Returns [T, (G-1)*heads] int64 rows, sizes 2..G in order.
    """
    check(grams.ndim == 2 and grams.shape[1:] == multipliers.shape, "engram_hash", grams=grams, multipliers=multipliers)
    return ENGRAM_HASH(grams, multipliers, primes, offsets, pad_id)


def _reference(grams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_id: int) -> Tensor:
    blocked = (grams == DEAD).cummax(dim=1).values
    terms = grams.masked_fill(blocked, pad_id) * multipliers
    key = terms[:, 0]
    rows = []
    for size in range(1, grams.shape[1]):
        key = key ^ terms[:, size]
        rows.append(key[:, None] % primes[size - 1] + offsets[size - 1])
    return torch.cat(rows, dim=1)


ENGRAM_HASH = Op("engram_hash", reference=_reference, triton="engine.ops.triton.engram_hash:launch", tolerance=Tolerance())
