"""From logits to what a token is drawn from: temperature, then top-p, top-k and min-p, for every row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.draws import FIXED_ONE, fixed_point
from engine.ops.sample_rows import Filters
from engine.readout import to_device
from engine.request import SamplingParams

NUM_CANDIDATES = 256  # ids that are sorted first when filtering; usual top-p and top-k keep far fewer
_NO_TOP_K = 2**31 - 1


def probabilities(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Tempered softmax with filtered tokens at 0, not renormalised. logits: [B, V]. Returns [B, V] fp32.

    The sum is left as it is: the draw scales by the integer sum, and a floating sum could depend on the batch's shape.
    """
    temperature = to_device([p.temperature for p in params], logits.dtype, logits.device)
    # The maximum is subtracted first: tiny temperatures would overflow otherwise.
    probs = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None], dim=-1)
    filtered = [i for i, p in enumerate(params) if p.is_filtered]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        probs[index] = filter_candidates(probs[index], [params[i] for i in filtered])
    return probs


def filter_sorted(probs: Tensor, params: list[SamplingParams]) -> Tensor:
    """Zero what top-p, top-k and min-p drop. Order: probability falling, ties by lower id; each filter keeps a prefix of it.

    probs: [B, V] fp32. Returns a new tensor. The plain form, for any distribution; `filter_candidates` is the quick one.
    """
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    keep = _kept(ordered, params)
    return torch.zeros_like(probs).scatter_(-1, ids, torch.where(keep, ordered, 0.0))


def filter_candidates(probs: Tensor, params: list[SamplingParams], num_candidates: int = NUM_CANDIDATES) -> Tensor:
    """As `filter_sorted`, bit for bit, but sorts only the most probable ids where those decide; other rows are sorted in full."""
    if probs.shape[-1] <= 2 * num_candidates:
        return filter_sorted(probs, params)
    ids = probs.topk(num_candidates, dim=-1).indices.sort(dim=-1).values  # by id first: the stable sort then breaks ties by id
    ordered, order = probs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    keep = _kept(ordered, params)
    kept = torch.where(keep, ordered, 0.0)
    result = torch.zeros_like(probs).scatter_(-1, ids.gather(-1, order), kept)
    # Candidates hold every id that is more probable than the last of them. So they decide if the last kept one is.
    last_kept = torch.where(keep, ordered, float("inf")).amin(dim=-1)
    undecided = (last_kept <= ordered[:, -1]).nonzero()[:, 0]
    if len(undecided):
        result[undecided] = filter_sorted(probs[undecided], [params[i] for i in undecided.tolist()])
    return result


def _kept(ordered: Tensor, params: list[SamplingParams]) -> Tensor:
    """[B, K] bool: which of the ordered probabilities stay.

    top-p keeps tokens whose preceding mass is <= top_p, in fixed point so that the sum has no rounding.
    """
    device = ordered.device
    weights = fixed_point(ordered)
    preceding = weights.cumsum(dim=-1) - weights
    top_p = torch.tensor([_fixed_top_p(p) for p in params], device=device)
    top_k = torch.tensor([p.top_k if p.top_k > 0 else 2**62 for p in params], device=device)
    min_p = torch.tensor([p.min_p for p in params], dtype=ordered.dtype, device=device)
    keep = preceding <= top_p[:, None]
    keep &= torch.arange(ordered.shape[-1], device=device) < top_k[:, None]
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    return keep


def device_filters(params: list[SamplingParams], device: torch.device) -> Filters:
    """Every row's filters for `sample_rows`, see `_kept`."""
    top_p, top_k, min_p = zip(*map(filter_numbers, params), strict=True)
    return Filters(
        to_device(list(top_p), torch.int64, device),
        to_device(list(top_k), torch.int32, device),
        to_device(list(min_p), torch.float32, device),
    )


def filter_numbers(params: SamplingParams) -> tuple[int, int, float]:
    """top_p in fixed point, top_k in 31 bits and min_p; where one is off, it is a number that leaves nothing out."""
    return _fixed_top_p(params), min(params.top_k, _NO_TOP_K) if params.top_k > 0 else _NO_TOP_K, params.min_p


def _fixed_top_p(params: SamplingParams) -> int:
    """In fixed point; more than any sum when nothing is left out."""
    return int(params.top_p * FIXED_ONE) if params.top_p < 1.0 else 2 * FIXED_ONE
