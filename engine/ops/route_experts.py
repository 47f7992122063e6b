"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from engine.ops.fixed_rows import in_one_shape
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

# Source: the release's router: its own constant under the normalisation.
_EPS = 1e-20


def route_experts(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Pick `k` experts by biased score, weigh them by unbiased score.

    logits: [T, E] fp32. bias: [E] fp32, for selection only. Returns ids [T, k] int64 and weights [T, k] fp32 that add up to `scale`.
    Ties go to the lower expert. Source: config keys `scoring_func`, `norm_topk_prob`, `routed_scaling_factor`.
    """
    check(logits.ndim == 2 and bias.shape == logits.shape[1:], "route_experts", logits=logits, bias=bias)
    return ROUTE_EXPERTS(logits, bias, k, scale)


def _reference(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    scores = softplus(logits).sqrt_()
    ids = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    return ids, weights * (scale / (weights.sum(1, keepdim=True) + _EPS))


def _invariant(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    ids, weights = in_one_shape(lambda rows: _reference(rows, bias, k, scale), logits)
    return ids, weights


ROUTE_EXPERTS = Op(
    "route_experts",
    reference=_reference,
    triton="engine.ops.triton.route_experts:launch",
    invariant={"reference": _invariant},
    tolerance=Tolerance(fp32=2e-6),
)
