"""How far an implementation of an op may be from its reference."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest error relative to the largest reference value of the row, per dtype. 0 means bitwise."""

    fp32: float = 0.0
    bf16: float = 0.0
