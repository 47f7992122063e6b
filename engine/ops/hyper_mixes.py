"""The weights with which a sublayer reads, writes back and mixes the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fixed_rows import in_groups, in_one_shape
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
    """
    if a.device.type == "cpu" and 0 < a.shape[0] <= _FEW and a.shape[1] == 4:
        return torch.tensor([_sinkhorn_4x4(m, num_iters, eps) for m in a.tolist()], dtype=torch.float32)
    return sinkhorn_tensors(a, num_iters, eps)


def sinkhorn_tensors(a: Tensor, num_iters: int, eps: float) -> Tensor:
    """`sinkhorn` for any number of rows and streams."""
    transposed = a.transpose(1, 2)
    u = torch.ones_like(a[:, :, :1])
    r, v = u, u
    c = u
    for i in range(num_iters):
        if i:
            u = torch.baddbmm(u, a, c, beta=eps)
            r = u.reciprocal()
        v = torch.baddbmm(v, transposed, r, beta=eps)
        c = v.reciprocal()
    return a * r * c.transpose(1, 2)


# Up to this many rows the interpreter's own floats are quicker than eighty tensor operations on a handful of numbers.
_FEW = 4


def _sinkhorn_4x4(a: list[list[float]], num_iters: int, eps: float) -> list[list[float]]:
    """`sinkhorn` of one 4x4 matrix."""
    (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3) = a
    r0 = r1 = r2 = r3 = u0 = u1 = u2 = u3 = v0 = v1 = v2 = v3 = x0 = x1 = x2 = x3 = 1.0
    for i in range(num_iters):
        if i:
            u0 = a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3 + eps * u0
            u1 = b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3 + eps * u1
            u2 = c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3 + eps * u2
            u3 = d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3 + eps * u3
            r0, r1, r2, r3 = 1 / u0, 1 / u1, 1 / u2, 1 / u3
        v0 = a0 * r0 + b0 * r1 + c0 * r2 + d0 * r3 + eps * v0
        v1 = a1 * r0 + b1 * r1 + c1 * r2 + d1 * r3 + eps * v1
        v2 = a2 * r0 + b2 * r1 + c2 * r2 + d2 * r3 + eps * v2
        v3 = a3 * r0 + b3 * r1 + c3 * r2 + d3 * r3 + eps * v3
        x0, x1, x2, x3 = 1 / v0, 1 / v1, 1 / v2, 1 / v3
    columns = (x0, x1, x2, x3)
    return [[m * r * x for m, x in zip(row, columns, strict=True)] for row, r in zip(a, (r0, r1, r2, r3), strict=True)]


def _reference(raw: Tensor, scale: Tensor, base: Tensor, num_iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, a = _parts(raw, scale, base, eps)
    return pre, post, sinkhorn(a, num_iters, eps)


def _invariant(raw: Tensor, scale: Tensor, base: Tensor, num_iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, a = in_one_shape(lambda rows: _parts(rows, scale, base, eps), raw)
    return pre, post, in_groups(lambda rows: sinkhorn_tensors(rows, num_iters, eps), a)


def _parts(raw: Tensor, scale: Tensor, base: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Read weights, write weights, and the stream matrices before they are balanced."""
    n = int((raw.shape[1] + 1) ** 0.5) - 1
    mixed = torch.addcmul(base, raw, scale)
    gates = mixed[:, : 2 * n].sigmoid()
    return gates[:, :n] + eps, gates[:, n:] * 2, mixed[:, 2 * n :].unflatten(1, (n, n)).softmax(-1).add_(eps)


HYPER_MIXES = Op("hyper_mixes", reference=_reference, invariant={"reference": _invariant}, tolerance=Tolerance(fp32=2e-6))
