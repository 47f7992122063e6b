"""Intervals: Student's t between runs, Welch between two groups of runs, a block bootstrap within one run. Only numpy is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the ends of its interval, all in the same unit."""

    value: float
    low: float
    high: float


def t_quantile(p: float, df: float) -> float:
    """Quantile of Student's t by bisection on its distribution function.

    p in (0.5, 1). df > 0, fractions allowed (Welch).
    """
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, df: float) -> float:
    """P(T <= t) for t >= 0, from the regularised incomplete beta function."""
    return 1.0 - 0.5 * _beta_regularised(df / (df + t * t), df / 2, 0.5)


def _beta_regularised(x: float, a: float, b: float) -> float:
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    # The fraction converges quickly on the left of the mean only; the symmetry covers the right.
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1.0 - front * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Continued fraction of the incomplete beta function, evaluated by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1) or tiny)
    out = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + numerator * d or tiny)
            c = 1.0 + numerator / c or tiny
            out *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return out


def mean_interval(values: Sequence[float], confidence: float) -> Interval | None:
    """The geometric mean of positive per-run values with Student's interval on their logarithms; None below two runs."""
    if len(values) < 2 or min(values) <= 0:
        return None
    logs = np.log(np.asarray(values, dtype=np.float64))
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(values))
    middle = float(logs.mean())
    return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def welch_ratio(base: Sequence[float], new: Sequence[float], confidence: float) -> Interval | None:
    """new / base - 1 with Welch's interval on the logarithms of per-run values; None below two runs on a side."""
    if len(base) < 2 or len(new) < 2 or min(*base, *new) <= 0:
        return None
    a, b = np.log(np.asarray(base, dtype=np.float64)), np.log(np.asarray(new, dtype=np.float64))
    va, vb = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    change = float(b.mean() - a.mean())
    if va + vb == 0.0:
        return Interval(math.expm1(change), math.expm1(change), math.expm1(change))
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = t_quantile(0.5 + confidence / 2, df) * math.sqrt(va + vb)
    return Interval(math.expm1(change), math.expm1(change - half), math.expm1(change + half))


def bootstrap_ratio(
    base: list[Array], new: list[Array], statistic: Callable[[Array], float], confidence: float, *, draws: int = 1000, seed: int = 0
) -> Interval | None:
    """new / base - 1 of a statistic, resampling whole blocks of each run: neighbours in time share a queue.

    base, new: the values of each block. None when a side has fewer than two blocks with values.
    """
    base, new = [b for b in base if len(b)], [b for b in new if len(b)]
    if len(base) < 2 or len(new) < 2:
        return None
    rng = np.random.default_rng(seed)
    ratios = []
    for _ in range(draws):
        a = statistic(np.concatenate([base[i] for i in rng.integers(len(base), size=len(base))]))
        b = statistic(np.concatenate([new[i] for i in rng.integers(len(new), size=len(new))]))
        if a > 0:
            ratios.append(b / a - 1)
    point_base, point_new = statistic(np.concatenate(base)), statistic(np.concatenate(new))
    if not ratios or point_base <= 0:
        return None
    low, high = np.quantile(ratios, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(point_new / point_base - 1, float(low), float(high))
