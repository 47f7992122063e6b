"""Which compressed entries each row attends to, and the loss that teaches the indexer to pick the attended ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.tiny.attention import NO_KEY, Visibility


def select(scores: Tensor, top_k: int) -> Tensor:
    """The best `top_k` finite scores of each row: [N, L] f32 -> [N, L] uint8. Ties: lower index on the CPU, any on a GPU."""
    if scores.is_cuda:
        values, at = scores.topk(min(top_k, scores.shape[1]), dim=1, sorted=False)
    else:
        values, at = (t[:, :top_k] for t in scores.sort(dim=1, descending=True, stable=True))
    sel = torch.zeros(scores.shape, dtype=torch.uint8, device=scores.device)
    return sel.scatter_(1, at, (values > float("-inf")).to(torch.uint8))


def candidate_mask(scores: Tensor, vis: Visibility, num_blocks: int, size: int) -> Tensor:
    """The best `num_blocks` blocks of `size` entries of each row, the newest one pinned: [N, L] -> [N, ceil(L/size)] bool."""
    padded = F.pad(scores, (0, -scores.shape[1] % size), value=float("-inf"))
    best = padded.unflatten(1, (-1, size)).amax(-1)
    count = (vis.hi - vis.start).long()
    newest = ((count - 1) // size).clamp(min=0)[:, None]
    pinned = torch.where(count[:, None] > 0, float("inf"), best.gather(1, newest))
    best = best.scatter(1, newest, pinned)
    return select(best, num_blocks).bool()


def attention_mass(q: Tensor, lse: Tensor, sink: Tensor, entries: Tensor, visible: Tensor, sparse: bool) -> Tensor:
    """Softmax weight on each entry, summed over heads. Nothing here has a gradient.

    q [G, R, H, D]; lse [G, R, H] f32 of window and attended entries; sink [H]; entries [G, E, D]; visible [G, R, E] bool.
    sparse: lse covers selected entries only, so the weights are renormalised over all visible ones. Returns [G, R, E] f32.
    """
    groups, rows, heads, dim = q.shape
    s = torch.bmm(q.reshape(groups, rows * heads, dim), entries.mT).float().unflatten(1, (rows, heads)) * dim**-0.5
    s = s.masked_fill_(~visible[:, :, None], NO_KEY)
    total = torch.logaddexp(lse, sink)
    if sparse:
        total = torch.logaddexp(total, torch.logsumexp(s, -1))
    return torch.exp(s - total[..., None]).sum(2)


def _cross_entropy(mass: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """KL divergence from the normalised mass to the softmax of the scores, mean over rows that see something."""
    target = mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)
    log_p = F.log_softmax(scores, -1)
    terms = torch.where(target > 0, target * (target.clamp(min=1e-20).log() - log_p), 0.0).sum(-1)
    return (terms * seen).sum() / seen.sum().clamp(min=1)


def index_scores_with_gradient(iq: Tensor, w: Tensor, ik: Tensor, visible: Tensor) -> Tensor:
    """Scores of sampled rows: iq [G, R, Hi, Di], w [G, R, Hi], ik [G, E, Di] -> [G, R, E] f32, very low where invisible."""
    groups, rows, heads, dim = iq.shape
    dots = torch.bmm(iq.reshape(groups, rows * heads, dim), ik.mT).float().unflatten(1, (rows, heads)).relu()
    return (w[..., None] * dots).sum(2).masked_fill(~visible, NO_KEY)


def index_divergence(masses: list[Tensor], scores: Tensor, visible: Tensor, block: int) -> Tensor:
    """Loss of one index source. Each mass is one group of layers with an equal say; block > 0 adds the loss of block maxima."""
    target = sum(m / m.sum(-1, keepdim=True).clamp(min=1e-20) for m in masses)
    seen = visible.any(-1).float()
    loss = _cross_entropy(target, scores, seen)
    if block:
        pad = -scores.shape[-1] % block
        best = F.pad(scores, (0, pad), value=NO_KEY).unflatten(-1, (-1, block)).amax(-1)
        loss = loss + _cross_entropy(F.pad(target, (0, pad)).unflatten(-1, (-1, block)).sum(-1), best, seen)
    return loss
