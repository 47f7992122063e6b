"""Log-probabilities of the tokens that were chosen, for requests that ask."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.request import Sequence, TokenLogprob

LOGPROB_FLOOR = -9999.0  # instead of minus infinity, which JSON cannot carry


def logprobs_of(logits: Tensor, tokens: list[int], rows: list[Sequence], wanted: list[int]) -> dict[int, TokenLogprob]:
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
        result[i] = TokenLogprob(max(logprob, LOGPROB_FLOOR), top)
    return result
