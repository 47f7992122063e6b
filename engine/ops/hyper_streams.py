"""Reading from and writing back to the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def collapse(h: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the streams. h: [T, n, C] bf16 or fp32, weights: [T, n] fp32. Returns [T, C] of h's dtype, summed in fp32."""
    check(h.ndim == 3 and weights.shape == h.shape[:2], "collapse", h=h, weights=weights)
    return COLLAPSE(h, weights)


def expand(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Mix the streams and add a sublayer's output: out[k] = post[k] * y + sum_j comb[j, k] * h[j].

    y: [T, C], h: [T, n, C], both bf16 or fp32; post: [T, n], comb: [T, n, n] fp32. Returns [T, n, C] of h's dtype, summed in fp32.
    The sum runs over the FIRST index of comb.
    """
    check(
        h.ndim == 3 and y.shape == h[:, 0].shape and comb.shape[:2] == post.shape == h.shape[:2], "expand", y=y, h=h, post=post, comb=comb
    )
    return EXPAND(y, h, post, comb)


def _collapse(h: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights[:, None], h.float())[:, 0].to(h.dtype)


def _expand(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    # Stream after stream, products rounded before they are added, the output last: the release's order. Fake-quantised keys that
    # lie on a rounding edge follow it; a batched product would round a few of them the other way.
    streams = h.float()
    mixed = comb[:, 0, :, None] * streams[:, 0, None]
    for j in range(1, h.shape[1]):
        mixed += comb[:, j, :, None] * streams[:, j, None]
    mixed += post[:, :, None] * y.float()[:, None]
    return mixed.to(h.dtype)


def _collapse_in_order(h: Tensor, weights: Tensor) -> Tensor:
    read = weights[:, 0, None] * h[:, 0].float()
    for j in range(1, h.shape[1]):
        read += weights[:, j, None] * h[:, j].float()
    return read.to(h.dtype)


COLLAPSE = Op("collapse", reference=_collapse, invariant={"reference": _collapse_in_order}, tolerance=Tolerance(fp32=1e-6, bf16=8e-3))
EXPAND = Op("expand", reference=_expand, tolerance=Tolerance(fp32=1e-6, bf16=8e-3))
