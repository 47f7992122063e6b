"""Blocks of entries to which later indexers are restricted."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.ops.registry import Op, check
from engine.ops.select_topk import select_topk
from engine.ops.tolerance import Tolerance


def candidate_blocks(scores: Tensor, count: Tensor, num_kept: int, block_size: int) -> Tensor:
    """Keep the `num_kept` blocks with the highest best score; each row's newest block is always among them.

    scores: [T, N] fp32 with -inf for entries a row cannot see. count: [T] int64 visible entries.
    Returns [T, ceil(N / block_size)] bool. Blocks without a visible entry are never kept. Ties go to the lower block.
    Source: config keys `candidate_topk_blocks`, `candidate_block_size`.
    """
    check(scores.ndim == 2 and count.shape == scores.shape[:1], "candidate_blocks", scores=scores, count=count)
    return CANDIDATE_BLOCKS(scores, count, num_kept, block_size)


def _reference(scores: Tensor, count: Tensor, num_kept: int, block_size: int) -> Tensor:
    best = best_of_blocks(scores, count, block_size)
    picked = select_topk(best, num_kept)
    # Column 0 collects the absent picks and is dropped.
    kept = torch.zeros(best.shape[0], best.shape[1] + 1, dtype=torch.bool, device=scores.device)
    return kept.scatter_(1, picked + 1, True)[:, 1:]


def best_of_blocks(scores: Tensor, count: Tensor, block_size: int) -> Tensor:
    """[T, N] scores -> [T, blocks] best score of each block; the newest block of a row is +inf."""
    best = pad(scores, (0, -scores.shape[1] % block_size), value=float("-inf")).unflatten(1, (-1, block_size)).amax(-1)
    newest = (count - 1).div(block_size, rounding_mode="floor")
    block = torch.arange(best.shape[1], device=scores.device)
    return best.masked_fill(block == newest[:, None], float("inf"))


CANDIDATE_BLOCKS = Op("candidate_blocks", reference=_reference, tolerance=Tolerance())
