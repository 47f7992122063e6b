"""Random numbers without state: a function of (seed, position, purpose), so a token does not depend on its batch.

Source: SplitMix64 (Steele, Lea and Flood, 2014). Number = first output, top 53 bits, of the generator seeded with
seed + mix(stream * GOLDEN), stream = 3 * position + purpose.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
MASK64 = 2**64 - 1
DRAW_BITS = 53


class Purpose(IntEnum):
    """What a number decides; each purpose has its own stream at every position."""

    SAMPLE = 0
    RESIDUAL = 1
    ACCEPT = 2


def mix64(value: int) -> int:
    """Finaliser of SplitMix64, a bijection of 64-bit integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def draw53(seed: int, position: int, purpose: Purpose = Purpose.SAMPLE) -> int:
    """One number in [0, 2^53). position: absolute index of the token to be produced."""
    stream = 3 * position + purpose
    start = (seed + mix64(stream * GOLDEN & MASK64)) & MASK64
    return mix64((start + GOLDEN) & MASK64) >> (64 - DRAW_BITS)


def draws53(seeds: list[int], positions: list[int], purpose: Purpose = Purpose.SAMPLE) -> NDArray[np.int64]:
    """`draw53` for many rows at once. Returns [B] int64; seeds are in [0, 2^64)."""
    golden = np.uint64(GOLDEN)
    streams = np.asarray(positions, dtype=np.uint64) * np.uint64(3) + np.uint64(purpose)
    starts = np.asarray(seeds, dtype=np.uint64) + _mix64_rows(streams * golden)
    return (_mix64_rows(starts + golden) >> np.uint64(64 - DRAW_BITS)).astype(np.int64)


def _mix64_rows(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def race_keys(seeds: list[int], positions: list[int], purpose: Purpose = Purpose.SAMPLE) -> NDArray[np.int64]:
    """[B] int64, the start of a stream with one number per token id at each (seed, position): see `race` in `engine/draws.py`."""
    golden = np.uint64(GOLDEN)
    streams = np.asarray(positions, dtype=np.uint64) * np.uint64(3) + np.uint64(purpose)
    return _mix64_rows(np.asarray(seeds, dtype=np.uint64) + _mix64_rows(streams * golden)).view(np.int64)
