"""How relevant each compressed entry is to a query, by the indexer's small heads."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fixed_rows import fixed_linear
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, count: Tensor) -> Tensor:
    """Weighted sum over heads of relu(q . key); entries a query cannot see get -inf.

    q: [B, R, H, D], weights: [B, R, H], keys: [B, N, D], all of one dtype (bf16 or fp32); R query rows of each of B sequences.
    count: [B, R] int64 visible entries of each row, at most N. Returns [B, R, N] fp32, accumulated in fp32. Scores may be negative.
    Keys at or beyond a row's count may hold anything, NaN included.
    """
    check(q.ndim == 4 and weights.shape == q.shape[:3] and count.shape == q.shape[:2], "index_scores", q=q, weights=weights, count=count)
    return INDEX_SCORES(q, weights, keys, count)


def _reference(q: Tensor, weights: Tensor, keys: Tensor, count: Tensor) -> Tensor:
    num_seqs, rows, heads, _ = q.shape
    entries = keys.shape[1]
    products = torch.bmm(q.float().flatten(1, 2), keys.float().transpose(1, 2)).relu_()
    products = products.view(num_seqs * rows, heads, entries)
    scores = torch.bmm(weights.float().view(num_seqs * rows, 1, heads), products).view(num_seqs, rows, entries)
    hidden = torch.arange(entries, device=q.device) >= count[..., None]
    return scores.masked_fill_(hidden, float("-inf"))


def _invariant(q: Tensor, weights: Tensor, keys: Tensor, count: Tensor) -> Tensor:
    """Keys in tiles of one size, heads added up in their order."""
    num_seqs, rows, heads, width = q.shape
    entries = keys.shape[1]
    scores = torch.empty(num_seqs, rows, entries, device=q.device)
    filled = torch.nn.functional.pad(keys, (0, 0, 0, -entries % _TILE)).float()
    for seq in range(num_seqs):
        query, weight = q[seq].float().view(-1, width), weights[seq].float()
        for begin in range(0, entries, _TILE):
            products = fixed_linear(query, filled[seq, begin : begin + _TILE]).relu_().view(rows, heads, _TILE)
            total = products[:, 0] * weight[:, 0, None]
            for head in range(1, heads):
                total += products[:, head] * weight[:, head, None]
            scores[seq, :, begin : begin + _TILE] = total[:, : entries - begin]
    return scores.masked_fill_(torch.arange(entries, device=q.device) >= count[..., None], float("-inf"))


_TILE = 128

INDEX_SCORES = Op("index_scores", reference=_reference, invariant={"reference": _invariant}, tolerance=Tolerance(fp32=2e-6, bf16=8e-3))
