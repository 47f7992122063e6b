"""How many drafts a step verifies: survival rates from confidences, and policies that turn them into lengths."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

MAX_CONFIDENCE = 60.0  # raw confidences are clamped to this size. Source: the release's draft head
MIN_TEMPERATURE = 1e-5


def survival_rates(confidence: Tensor, temperatures: Tensor) -> list[list[float]]:
    """Probability that a draft and all before it are kept. confidence: [B, N] fp32, raw. temperatures: [N]. Rows never rise."""
    scaled = (confidence / temperatures.clamp(min=MIN_TEMPERATURE)).clamp(-MAX_CONFIDENCE, MAX_CONFIDENCE)
    rates: list[list[float]] = torch.sigmoid(scaled).cumprod(-1).tolist()
    return rates


class LengthPolicy(Protocol):
    """Two calls per step: how many drafts in all, before drafting; then whose."""

    def budget(self, rates: list[list[float]], rooms: list[int]) -> int | None:
        """Drafts to verify in this step, from the rates of the round before (empty: unknown). None: all. 0: do not even draft."""

    def lengths(self, rates: list[list[float]], rooms: list[int], budget: int | None) -> list[int]:
        """Drafts of each sequence, from the newest rates; at most `rooms` each and `budget` in all."""


class FixedLength:
    """Verifies every draft that has room."""

    def budget(self, rates: list[list[float]], rooms: list[int]) -> int | None:
        return None

    def lengths(self, rates: list[list[float]], rooms: list[int], budget: int | None) -> list[int]:
        return rooms
