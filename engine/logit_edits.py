"""Changes to a row's raw logits before temperature: bias, penalties, forbidden ends. Neutral parameters touch nothing."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from engine.request import SamplingParams, Sequence


def edits_logits(params: SamplingParams) -> bool:
    """Whether a request with these parameters can need `edit_row` at all."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.min_tokens > 0
    )


def edit_row(row: Tensor, seq: Sequence, eos_token_ids: frozenset[int]) -> None:
    """Change one row in place, in this order: logit_bias, repetition, frequency and presence penalty, no end before min_tokens.

    row: [V] fp32, raw logits. Repetition counts prompt and output ids, the other two output ids only.
    """
    params = seq.request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(seq.token_ids)), device=row.device)
        values = row[ids]
        row[ids] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if seq.output_len and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
        counts = Counter(seq.token_ids[seq.prompt_len :])
        ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.frequency_penalty * times + params.presence_penalty
    if seq.output_len < params.min_tokens:
        row[sorted(eos_token_ids.union(params.stop_token_ids))] = float("-inf")
