"""Changes to a row's raw logits before temperature: bias, penalties, forbidden ends. Neutral parameters (`traits.edits`) touch nothing."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import Sequence


@dataclass(slots=True)
class _Seen:
    """Which ids occur in the first `num_tokens` tokens of a sequence. mask: [V] bool."""

    mask: Tensor
    num_tokens: int


class LogitEdits:
    """Edits rows in place. Remembers the ids that a sequence has seen, so that a step costs its new tokens, not its whole prompt."""

    def __init__(self, eos_token_ids: frozenset[int], max_remembered: int = 512) -> None:
        self._eos_token_ids = eos_token_ids
        self._max_remembered = max_remembered
        self._seen: OrderedDict[int, _Seen] = OrderedDict()

    def apply(self, row: Tensor, seq: Sequence, ahead: Ids[int] = ()) -> None:
        """In this order: logit_bias, repetition, frequency and presence penalty, no end before min_tokens.

        row: [V] fp32, raw logits. Repetition counts prompt and output ids, the other two output ids only.
        ahead: drafts between the sequence and this row, which count as output.
        """
        params = seq.request.params
        output_len = seq.output_len + len(ahead)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
        if params.repetition_penalty != 1.0:
            limits = torch.finfo(row.dtype)
            penalty = max(params.repetition_penalty, limits.tiny)  # a smaller one is 0 on some devices, and minus infinity times 0 is NaN
            penalised = torch.where(row > 0, row / penalty, row * penalty).clamp_(max=limits.max)  # two infinite logits have no softmax
            row.copy_(torch.where(self._seen_mask(row, seq, ahead), penalised, row))
        if output_len and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
            counts = Counter(seq.token_ids[seq.prompt_len :])
            counts.update(ahead)
            ids = torch.tensor(list(counts), device=row.device)
            times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= params.frequency_penalty * times + params.presence_penalty
        if output_len < params.min_tokens:
            row[sorted(self._eos_token_ids.union(params.stop_token_ids))] = float("-inf")

    def _seen_mask(self, row: Tensor, seq: Sequence, ahead: Ids[int]) -> Tensor:
        """[V] bool of the ids in prompt, output and `ahead`. Tokens are only ever appended, so the remembered mask only grows."""
        seen = self._seen.pop(seq.seq_id, None)
        if seen is None:
            seen = _Seen(torch.zeros_like(row, dtype=torch.bool), 0)
        seen.mask[torch.tensor(seq.token_ids[seen.num_tokens :], device=row.device, dtype=torch.int64)] = True
        seen.num_tokens = len(seq.token_ids)
        self._seen[seq.seq_id] = seen
        if len(self._seen) > self._max_remembered:
            self._seen.popitem(last=False)
        if not ahead:
            return seen.mask
        mask = seen.mask.clone()
        mask[torch.tensor(ahead, device=row.device)] = True
        return mask
