"""A model that costs nothing: what remains is the engine's own time for scheduling, sampling and accounting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import Batch, LogitRows, StepKind

VOCAB = 4096
BLOCK_SIZE = 128


@dataclass(frozen=True, slots=True)
class NullKV:
    """No memory at all."""

    block_size: int = BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class NullLimits:
    """Room for every sequence at its longest, so that nothing is ever preempted."""

    max_num_seqs: int
    max_model_len: int = 32768
    max_num_batched_tokens: int = 8192
    vocab_size: int = VOCAB
    tokenizer_size: int = VOCAB
    eos_token_id: int = 1
    keep_tokens: int = 0
    ngram_history: int = 2
    draft_block_size: int = 0
    mode: str = "off"
    precision: str = "fp32"
    device: str = "cpu"
    fingerprint: str = "null"

    @property
    def num_blocks(self) -> int:
        return self.max_num_seqs * (self.max_model_len // BLOCK_SIZE + 1) + 1

    @property
    def num_state_slots(self) -> int:
        return self.max_num_seqs + 2


class NullRunner:
    """Constant logits, made before the clock starts."""

    def __init__(self, max_num_seqs: int) -> None:
        self.limits = NullLimits(max_num_seqs)
        self.kv: Any = NullKV()
        self._logits = torch.rand(max_num_seqs, VOCAB)

    def run(self, batch: Batch) -> Any:
        """[R, V] fp32: one row for every slice that asks for one."""
        slices = batch.slices
        rows = len(slices) if batch.kind is StepKind.DECODE else sum(piece.logit_rows is not LogitRows.NONE for piece in slices)
        return self._logits[:rows]

    run_greedy = run
