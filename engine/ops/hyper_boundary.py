"""Everything between two sublayers: write back, mix, read, normalise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from engine.ops.dense_linear import dense_linear
from engine.ops.fixed_rows import in_groups
from engine.ops.hyper_mixes import HYPER_MIXES
from engine.ops.hyper_streams import COLLAPSE, EXPAND
from engine.ops.registry import Op, check
from engine.ops.rms_norm import RMS_NORM
from engine.ops.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class Written:
    """A finished sublayer: its output y [T, C] and the weights with which it goes back, post [T, n] and comb [T, n, n] fp32."""

    y: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True, slots=True)
class Mixer:
    """The next sublayer's own mixes. fn: [(2+n)*n, n*C], scale (spread over its parts) and base: [(2+n)*n], all fp32.

    Source: config keys `hc_mult`, `hc_sinkhorn_iters`, `hc_eps`.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    num_iters: int
    eps: float


@dataclass(frozen=True, slots=True)
class Boundary:
    """h: [T, n, C] the streams as the next sublayer finds them. x: [T, C] its input. pre, post, comb: its mixes, None without a mixer."""

    h: Tensor
    x: Tensor
    pre: Tensor | None
    post: Tensor | None
    comb: Tensor | None


def hyper_boundary(h: Tensor, written: Written | None, mixer: Mixer | None, pre: Tensor, norm: Tensor, eps: float) -> Boundary:
    """Write a sublayer's output back, compute the next sublayer's mixes, read its input with the previous `pre` and normalise it.

    h: [T, n, C] bf16 or fp32, never changed. written: None when the streams already are what the next sublayer finds. mixer: None behind
    the last sublayer. pre: [T, n] fp32. norm: [C] of h's dtype, eps of the norm and of the mixes' statistic. All sums fp32.
    """
    check(h.ndim == 3 and pre.shape == h.shape[:2] and norm.shape == h.shape[2:], "hyper_boundary", h=h, pre=pre, norm=norm)
    if written is not None:
        fits = written.y.shape == h[:, 0].shape and written.comb.shape == (*h.shape[:2], h.shape[1])
        check(fits and written.post.shape == pre.shape, "hyper_boundary", h=h, y=written.y, post=written.post, comb=written.comb)
    if mixer is not None:
        check(mixer.fn.shape[1] == h.shape[1] * h.shape[2], "hyper_boundary", h=h, fn=mixer.fn)
    boundary: Boundary = HYPER_BOUNDARY(h, written, mixer, pre, norm, eps)
    return boundary


def _reference(h: Tensor, written: Written | None, mixer: Mixer | None, pre: Tensor, norm: Tensor, eps: float) -> Boundary:
    return _with_statistic(_mean_square, h, written, mixer, pre, norm, eps)


def _invariant(h: Tensor, written: Written | None, mixer: Mixer | None, pre: Tensor, norm: Tensor, eps: float) -> Boundary:
    return _with_statistic(partial(in_groups, _mean_square), h, written, mixer, pre, norm, eps)


def _mean_square(z: Tensor) -> Tensor:
    return (z * z).mean(-1, keepdim=True)


def _with_statistic(
    mean_square: Callable[[Tensor], Tensor], h: Tensor, written: Written | None, mixer: Mixer | None, pre: Tensor, norm: Tensor, eps: float
) -> Boundary:
    if written is not None:
        h = EXPAND(written.y, h, written.post, written.comb)
    x = RMS_NORM(COLLAPSE(h, pre), norm, eps)
    if mixer is None:
        return Boundary(h, x, None, None, None)
    z = h.float().flatten(1)
    raw = dense_linear(z, mixer.fn) * (mean_square(z) + eps).rsqrt()
    return Boundary(h, x, *HYPER_MIXES(raw, mixer.scale, mixer.base, mixer.num_iters, mixer.eps))


HYPER_BOUNDARY = Op(
    "hyper_boundary",
    reference=_reference,
    triton="engine.ops.triton.hyper_boundary:launch",
    invariant={"reference": _invariant, "triton": "engine.ops.triton.hyper_boundary:launch_invariant"},
    tolerance=Tolerance(fp32=4e-6, bf16=1e-2),
)
