"""The weights with which a sublayer reads, writes back and mixes the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def hyper_mixes(raw: Tensor, scale: Tensor, base: Tensor, num_iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Split raw mixes into read weights, write weights and a doubly stochastic stream matrix.

    raw: [T, (2+n)*n] fp32 (normalised projection of the streams). scale, base: [(2+n)*n] fp32, scale already spread over its parts.
    Returns pre [T, n], post [T, n], comb [T, n, n], all fp32. `comb[j, k]` carries stream j into stream k.
    Source: config keys `hc_mult`, `hc_sinkhorn_iters`, `hc_eps`; eps stands in every denominator.
    """
    check(raw.ndim == 2 and scale.shape == base.shape == raw.shape[1:], "hyper_mixes", raw=raw, scale=scale, base=base)
    return HYPER_MIXES(raw, scale, base, num_iters, eps)


def spread_scale(scale: Tensor, n: int) -> Tensor:
    """[3] -> [(2+n)*n]: one factor each for pre, post and comb."""
    return scale.repeat_interleave(torch.tensor([n, n, n * n], device=scale.device))


def sinkhorn(a: Tensor, num_iters: int, eps: float) -> Tensor:
    """Alternate normalisations of `a` [T, n, n] fp32, whose rows are normalised already: columns, then rows and columns.

    Computed as diag(r) a diag(c): with u = 1/r the row step A / (rowsum + eps) is u <- a c + eps u, and likewise for columns.
    Once no vector changes any more the remaining rounds cannot change them either, so the loop ends early.
    """
    transposed = a.transpose(1, 2)
    u = torch.ones_like(a[:, :, :1])
    r, v = u, u
    for i in range(num_iters):
        previous = v
        v = torch.baddbmm(v, transposed, r, beta=eps)
        c = v.reciprocal()
        if i == num_iters - 1 or torch.equal(v, previous):
            break
        u = torch.baddbmm(u, a, c, beta=eps)
        r = u.reciprocal()
    return a * r * c.transpose(1, 2)


def _reference(raw: Tensor, scale: Tensor, base: Tensor, num_iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    n = int((raw.shape[1] + 1) ** 0.5) - 1
    mixed = torch.addcmul(base, raw, scale)
    gates = mixed[:, : 2 * n].sigmoid()
    a = mixed[:, 2 * n :].unflatten(1, (n, n)).softmax(-1).add_(eps)
    return gates[:, :n] + eps, gates[:, n:] * 2, sinkhorn(a, num_iters, eps)


HYPER_MIXES = Op("hyper_mixes", reference=_reference, tolerance=Tolerance(fp32=2e-6))
