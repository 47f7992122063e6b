"""From logits to tokens: exact greedy, or one inverse-CDF draw per row with integer sums and a position-keyed number.

Order of operations per row: ids without a token masked, edits of the raw logits (`engine/logit_edits.py`), grammar mask
(`engine/structured_output.py`), temperature, top-p, top-k, min-p, draw. Every operation works on a row alone, so a row's token does
not depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.logit_edits import LogitEdits, edits_logits
from engine.random_keys import draws53
from engine.request import SamplingParams, Sequence, TokenLogprob
from engine.scheduler import Sampled
from engine.structured_output import RowMasks, apply_masks, row_masks

FIXED_ONE = 2**31  # probability 1.0 in fixed point; sums of a row stay below 2^32, products with 31 random bits below 2^63
LOGPROB_FLOOR = -9999.0  # instead of minus infinity, which JSON cannot carry
NUM_CANDIDATES = 256  # ids that are sorted first when filtering; usual top-p and top-k keep far fewer
_LOW_BITS = 22  # 53 random bits = 31 high + 22 low, so that the product with a sum stays inside int64


@dataclass(frozen=True, slots=True)
class _Traits:
    """Which parts of the work a request's parameters need. Holds `params`, so that its id stays unique while cached."""

    params: SamplingParams
    edits: bool
    greedy: bool
    filters: bool
    logprobs: bool
    plain_greedy: bool


class Sampler:
    """Chooses one token per row. Ids from `num_tokens` on have no token in the tokenizer and are never chosen."""

    def __init__(self, num_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self.num_tokens = num_tokens
        self._edits = LogitEdits(eos_token_ids)
        self.poison_next_row = False  # fault injection: the next step's first row becomes NaN
        self._traits: dict[int, _Traits] = {}

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: list[Sequence]) -> Sampled:
        """logits: [R, V] fp32; may be changed in place at ids without a token. rows: the R sequences, in order.

        A row with NaN, +inf or nothing but -inf gets an error and harms no other row.
        """
        assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} sequences"
        if self.num_tokens < logits.shape[1]:
            logits[:, self.num_tokens :] = float("-inf")
        if self.poison_next_row and rows:
            self.poison_next_row = False
            logits[0] = float("nan")
        traits = [self._traits_of(seq.request.params) for seq in rows]
        masks = row_masks(rows, logits.shape[1])
        if masks is None and all(t.plain_greedy for t in traits):
            best, ids = logits.max(dim=-1)
            return Sampled([[token] for token in ids.tolist()], errors=_errors(best))
        return self._general(logits, rows, traits, masks)

    def _general(self, logits: Tensor, rows: list[Sequence], traits: list[_Traits], masks: RowMasks | None) -> Sampled:
        errors = _errors(logits.amax(dim=-1))
        work = self._edited(logits, rows, traits)
        if masks is not None:
            work = _constrained(logits, work, masks)
            errors = masks.errors | errors
        chosen = work.argmax(dim=-1)
        drawn = [i for i, t in enumerate(traits) if not t.greedy and i not in errors]
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            chosen[index] = draw(work[index], [rows[i] for i in drawn])
        tokens = chosen.tolist()
        wanted = [i for i, t in enumerate(traits) if t.logprobs and i not in errors]
        return Sampled([[token] for token in tokens], _logprobs(logits, tokens, rows, wanted), errors)

    def _edited(self, logits: Tensor, rows: list[Sequence], traits: list[_Traits]) -> Tensor:
        """A copy with the edited rows, or the same tensor when no row needs an edit: raw log-probabilities read the original."""
        if not any(t.edits for t in traits):
            return logits
        work = logits.clone()
        for i, (seq, t) in enumerate(zip(rows, traits, strict=True)):
            if t.edits:
                self._edits.apply(work[i], seq)
        return work

    def _traits_of(self, params: SamplingParams) -> _Traits:
        traits = self._traits.get(id(params))
        if traits is None:
            if len(self._traits) > 4096:
                self._traits.clear()
            traits = self._traits[id(params)] = _classify(params)
        return traits


def _classify(params: SamplingParams) -> _Traits:
    edits = edits_logits(params)
    greedy = params.temperature == 0.0
    filters = params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0
    logprobs = params.logprobs or params.top_logprobs > 0
    return _Traits(params, edits, greedy, filters, logprobs, greedy and not edits and not logprobs)


def _constrained(logits: Tensor, work: Tensor, masks: RowMasks) -> Tensor:
    """`work` with the grammars' masks, as a tensor that is not `logits`: raw log-probabilities read that one.

    Where the edits leave nothing that a grammar allows (before min_tokens, when only the end may follow), the grammar wins.
    """
    work = logits.clone() if work is logits else work
    apply_masks(work, masks)
    index = torch.tensor(masks.rows, dtype=torch.int64, device=work.device)
    empty = index[work[index].amax(dim=-1) == float("-inf")] if masks.rows else index
    if len(empty):
        work[empty] = logits[empty]
        apply_masks(work, masks)
    return work


def _errors(best: Tensor) -> dict[int, str]:
    """Rows whose largest logit is not finite. best: [R]; the maximum carries NaN through."""
    if bool(torch.isfinite(best).all()):
        return {}
    return {
        i: f"the model produced invalid logits (largest value {value})"
        for i, value in enumerate(best.tolist())
        if abs(value) == float("inf") or value != value
    }


def draw(logits: Tensor, rows: list[Sequence]) -> Tensor:
    """One token per row from the tempered and filtered distribution. logits: [B, V], finite maximum. Returns [B] int64."""
    params = [seq.request.params for seq in rows]
    weights = fixed_point(probabilities(logits, params))
    cdf = weights.cumsum(dim=-1)
    numbers = torch.from_numpy(draws53([seq.seed for seq in rows], [len(seq.token_ids) for seq in rows])).to(logits.device)
    # target = floor(number / 2^53 * total); tokens of weight 0 own no target and are never drawn.
    total = cdf[:, -1]
    low = ((numbers & (2**_LOW_BITS - 1)) * total) >> _LOW_BITS
    target = ((numbers >> _LOW_BITS) * total + low) >> 31
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0]


def probabilities(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Tempered softmax with filtered tokens at 0, not renormalised. logits: [B, V]. Returns [B, V] fp32.

    The sum is left as it is: the draw scales by the integer sum, and a floating sum could depend on the batch's shape.
    """
    temperature = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=logits.device)
    # The maximum is subtracted first: tiny temperatures would overflow otherwise.
    probs = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None], dim=-1)
    filtered = [i for i, p in enumerate(params) if p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0]
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
    top_p = torch.tensor([int(p.top_p * FIXED_ONE) if p.top_p < 1.0 else 2 * FIXED_ONE for p in params], device=device)
    top_k = torch.tensor([p.top_k if p.top_k > 0 else 2**62 for p in params], device=device)
    min_p = torch.tensor([p.min_p for p in params], dtype=ordered.dtype, device=device)
    keep = preceding <= top_p[:, None]
    keep &= torch.arange(ordered.shape[-1], device=device) < top_k[:, None]
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    return keep


def fixed_point(probs: Tensor) -> Tensor:
    """floor(p * 2^31), int64; exact, since the scale is a power of two."""
    return (probs * FIXED_ONE).to(torch.int64)


def _logprobs(logits: Tensor, tokens: list[int], rows: list[Sequence], wanted: list[int]) -> dict[int, list[TokenLogprob]]:
    """Log-probabilities of the model's own distribution for the rows that ask: temperature 1, no edit, no filter."""
    if not wanted:
        return {}
    index = torch.tensor(wanted, device=logits.device)
    logprobs = torch.log_softmax(logits[index], dim=-1)
    chosen = logprobs.gather(-1, torch.tensor([[tokens[i]] for i in wanted], device=logits.device))[:, 0].tolist()
    most = min(max(rows[i].request.params.top_logprobs for i in wanted), logits.shape[-1])
    values, ids = logprobs.topk(most, dim=-1)
    result = {}
    for i, logprob, row_ids, row_values in zip(wanted, chosen, ids.tolist(), values.tolist(), strict=True):
        pairs = sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        top = [(token, max(value, LOGPROB_FLOOR)) for token, value in pairs[: rows[i].request.params.top_logprobs]]
        result[i] = [TokenLogprob(max(logprob, LOGPROB_FLOOR), top)]
    return result
