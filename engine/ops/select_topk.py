"""The best entries of each row; ties go to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def select_topk(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` highest scores of each row, as a set in any order.

    scores: [T, N] fp32. Returns [T, min(k, N)] int64; -1 stands for picks whose score is -inf.
    """
    check(scores.ndim == 2, "select_topk", scores=scores)
    return SELECT_TOPK(scores, k)


def _reference(scores: Tensor, k: int) -> Tensor:
    if scores.shape[1] <= k:
        index = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
        return index.masked_fill(scores == float("-inf"), -1)
    values, index = scores.topk(k)
    threshold = values[:, -1:]
    # topk leaves ties at the threshold undefined: rows that have more of them than picks are sorted again, stably.
    tied = (scores == threshold).sum(1) > (values == threshold).sum(1)
    tied &= threshold[:, 0] > float("-inf")
    rows = tied.nonzero()[:, 0]
    if len(rows):
        index[rows] = scores[rows].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return index.masked_fill_(values == float("-inf"), -1)


SELECT_TOPK = Op(
    "select_topk",
    reference=_reference,
    triton="engine.ops.triton.select_topk:launch",
    cuda="engine.ops.cuda.select_topk:launch",
    tolerance=Tolerance(),
)
