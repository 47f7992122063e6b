"""Routing by count instead of by the router: how evenly ranks are loaded is then known. For measurements with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

_PARTS = 1 << 16  # shares are counted in these, in integers


@dataclass(frozen=True, slots=True)
class ForcedRouting:
    """Sends `ratio` times the mean to the first rank of `ranks`, evenly to its experts, and the rest evenly to all others.

    first: experts [0, first) are those that the first rank holds at the start; they stay the busy ones wherever a balancer moves them.
    ratio: from 1 (even) to `ranks` (all). Source: `engine` 11, settings for experiments.
    """

    ratio: float
    ranks: int
    first: int
    num_experts: int

    def __call__(self, ids: Tensor, layer: int, rank: int) -> Tensor:
        """ids: [T, K] of the router, of which only the shape counts. Returns [T, K] int64, distinct within a row when every part has K."""
        part = round(self.ratio / self.ranks * _PARTS)
        number = torch.arange(ids.numel(), device=ids.device) + (layer * self.ranks + rank) * ids.shape[1]
        busy = number * part // _PARTS  # busy choices before this one
        is_busy = (number + 1) * part // _PARTS > busy
        others = self.num_experts - self.first
        chosen = torch.where(is_busy, _spread(busy, self.first), self.first + _spread(number - busy, others))
        return chosen.view(ids.shape)


def _spread(number: Tensor, count: int) -> Tensor:
    """The same number of times each of [0, count), and nearly so for every run of consecutive numbers."""
    step = next(step for step in range(max(1, round(0.618 * count)), 2 * count + 2) if gcd(step, count) == 1)
    return number * step % count
