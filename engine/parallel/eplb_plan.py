"""Expert load balancing: how many copies each expert gets and on which rank each copy goes. Pure and the same on every rank.

A load is a table [steps, E] of tokens per expert. What a plan is judged by is the sum over the steps of the busiest rank's tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.parallel.placement import Placement

Counts = NDArray[np.float64]

# Between copies that help alike the lower expert gets one; no difference in tokens is as small.
_TIE = 1e-4


def busiest(counts: Counts, placement: Placement) -> float:
    """Sum over steps of the busiest rank's tokens, when an expert's tokens are shared evenly by its copies. counts: [steps, E]."""
    return float(rank_loads(counts, placement).max(1).sum())


def rank_loads(counts: Counts, placement: Placement) -> Counts:
    """[steps, ranks] tokens."""
    experts = np.array(placement.experts)
    copies = np.bincount(experts, minlength=placement.num_experts)
    return (counts / copies)[:, experts].reshape(len(counts), placement.ranks, -1).sum(2)


def plan(counts: Counts, current: Placement) -> Placement:
    """A better placement for loads like `counts` [steps, E] with the slots of `current`, or `current` when none is found.

    Source: `engine` 11, with one addition: a plan that is not better than what is there moves nothing.
    """
    counts = np.asarray(counts, dtype=np.float64)
    copies = _copies(counts, len(current.experts) - current.num_experts)
    planned = _place(counts, copies, current).settled(current)
    return planned if busiest(counts, planned) < busiest(counts, current) else current


def _copies(counts: Counts, extra: int) -> NDArray[np.int64]:
    """[E]: one by one, every further copy goes where it lowers the sum over steps of the busiest copy's load most."""
    steps, experts = counts.shape
    copies = np.ones(experts, dtype=np.int64)
    ties = _TIE * np.arange(experts)
    for _ in range(extra):
        loads = counts / copies
        order = np.argsort(loads, axis=1)
        first = order[:, -1]
        row = np.arange(steps)
        most = loads[row, first]
        second = loads[row, order[:, -2]] if experts > 1 else np.zeros(steps)
        others = np.where(np.arange(experts) == first[:, None], second[:, None], most[:, None])
        result = np.maximum(others, counts / (copies + 1)).sum(0)
        copies[int(np.argmin(result + ties))] += 1
    return copies


def _place(counts: Counts, copies: NDArray[np.int64], current: Placement) -> Placement:
    """Copies by falling average load; each goes to the rank with room where the busiest rank stays lowest, the lowest rank among equals."""
    steps, ranks, room = len(counts), current.ranks, current.slots_per_rank
    experts = np.repeat(np.arange(len(copies)), copies)
    loads = (counts / copies)[:, experts]
    held: list[list[int]] = [[] for _ in range(ranks)]
    sums = np.zeros((steps, ranks))
    for copy in np.argsort(-loads.mean(0), kind="stable"):
        order = np.sort(sums, axis=1)
        top, below = order[:, -1], order[:, -2] if ranks > 1 else np.zeros(steps)
        others = np.where(sums == top[:, None], below[:, None], top[:, None])
        # Where two ranks share the top both see it in `below`, so the mask above is right for either.
        costs = np.maximum(others, sums + loads[:, copy, None]).sum(0)
        free = [rank for rank in range(ranks) if len(held[rank]) < room]
        rank = min(free, key=lambda rank: (costs[rank], rank))
        held[rank].append(int(experts[copy]))
        sums[:, rank] += loads[:, copy]
    return Placement(tuple(expert for own in held for expert in own), current.num_experts, ranks)
