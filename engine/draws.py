"""Ways to draw a token from a distribution with given random numbers. All are exact, and a row's token depends on that row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.random_keys import DRAW_BITS, GOLDEN

FIXED_ONE = 2**31  # probability 1.0 in fixed point; sums of a row stay below 2^32, products with 31 random bits below 2^63
_LOW_BITS = DRAW_BITS - 31  # 53 random bits = 31 high + 22 low, so that the product with a sum stays inside int64
_NUMBERS_AT_ONCE = 2**14  # of a race on a CPU: about what the caches of a core hold


def fixed_point(probs: Tensor) -> Tensor:
    """floor(p * 2^31), int64; exact, since the scale is a power of two."""
    return (probs * FIXED_ONE).to(torch.int64)


def inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token in whose share of the cumulated weights a number falls. weights: [B, V] int64, sums below 2^32. numbers: [B], 53 bits."""
    cdf = weights.cumsum(dim=-1)
    # target = floor(number / 2^53 * total); tokens of weight 0 own no target and are never drawn.
    total = cdf[:, -1]
    low = ((numbers & (2**_LOW_BITS - 1)) * total) >> _LOW_BITS
    target = ((numbers >> _LOW_BITS) * total + low) >> 31
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0]


def race(probs: Tensor, keys: Tensor) -> Tensor:
    """The token whose exponential waiting time of rate p ends first; it is token x with probability p(x).

    Every token id has its own random number. So two similar distributions with the same keys mostly draw the same token: for total
    variation distance TV with probability at least (1 - TV) / (1 + TV).

    probs: [B, V], need not sum to 1. keys: [B] int64, see `race_keys`. Returns [B] int64.
    """
    step = max(1, _NUMBERS_AT_ONCE // probs.shape[1]) if probs.device.type == "cpu" else max(1, len(probs))
    parts = [(_waiting_times(keys[i : i + step], probs.shape[1]) / probs[i : i + step]).argmin(dim=-1) for i in range(0, len(probs), step)]
    return torch.cat(parts)


def _waiting_times(keys: Tensor, num_ids: int) -> Tensor:
    """[B, V] float64, exponentially distributed with rate 1: -log(1 - u) of SplitMix64's number for every (key, id)."""
    x = keys[:, None] + torch.arange(1, num_ids + 1, device=keys.device) * _signed(GOLDEN)
    shifted = torch.empty_like(x)
    for bits, factor in ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1)):
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - bits) - 1))  # int64 shifts keep the sign, SplitMix64's do not
        if factor != 1:
            x.mul_(factor)
    x.bitwise_right_shift_(64 - DRAW_BITS).bitwise_and_(2**DRAW_BITS - 1)
    # The middle of each number's interval: never 0, so that no waiting time is 0.
    return x.double().add_(0.5).mul_(-(2.0**-DRAW_BITS)).log1p_().neg_()


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value
