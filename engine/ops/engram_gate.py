"""Add looked-up values to the streams, gated by how well each stream matches the looked-up keys."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fixed_rows import in_one_shape
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

# Source: the release's gate: floor of |dot| under the square root.
_FLOOR = 1e-6


def engram_gate(h: Tensor, kv: Tensor, weight: Tensor, eps: float) -> Tensor:
    """h[i] + sigmoid(signed sqrt of the normalised match of h[i] and key[i]) * value.

    h: [T, n, C] bf16 or fp32. kv: [T, (n+1)*C]: n keys, then one value. weight: [n, C] fp32, product of query and key weights.
    Returns [T, n, C] of h's dtype, fp32 inside. Source: config key `rms_norm_eps` for eps.
    """
    check(
        h.ndim == 3 and kv.shape == (h.shape[0], (h.shape[1] + 1) * h.shape[2]) and weight.shape == h.shape[1:], "engram_gate", h=h, kv=kv
    )
    return ENGRAM_GATE(h, kv, weight, eps)


def _reference(h: Tensor, kv: Tensor, weight: Tensor, eps: float) -> Tensor:
    streams = h.float()
    keys, value = kv.float().unflatten(1, (-1, h.shape[2])).split([h.shape[1], 1], dim=1)
    dot = (streams * weight * keys).sum(-1)
    norms = ((streams * streams).mean(-1) + eps).rsqrt() * ((keys * keys).mean(-1) + eps).rsqrt()
    dot = dot * norms * h.shape[2] ** -0.5
    gate = dot.abs().clamp(min=_FLOOR).sqrt().copysign(dot).sigmoid()
    return torch.addcmul(streams, gate[..., None], value).to(h.dtype)


def _invariant(h: Tensor, kv: Tensor, weight: Tensor, eps: float) -> Tensor:
    changed: Tensor = in_one_shape(lambda streams, looked_up: _reference(streams, looked_up, weight, eps), h, kv)
    return changed


ENGRAM_GATE = Op(
    "engram_gate",
    reference=_reference,
    triton="engine.ops.triton.engram_gate:launch",
    invariant={"reference": _invariant},
    tolerance=Tolerance(fp32=2e-6, bf16=8e-3),
)
