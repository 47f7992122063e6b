"""The golden vectors and ways to run their prompts through the paged model."""

import json
from collections import defaultdict

import torch
from safetensors.torch import load_file

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from tests.models.tiny_configs import GOLDEN

PROMPTS = [p["token_ids"] for p in json.loads((GOLDEN / "prompts.json").read_text())]


class Recorder:
    """A probe that keeps copies, chunk by chunk."""

    def __init__(self):
        self.seen = defaultdict(list)

    def record(self, name, layer, value):
        self.seen[name, layer].append(value.clone())


def vectors(mode):
    return load_file(GOLDEN / f"vectors-{mode}.safetensors")


def golden_runner(precision, checkpoint="tiny-a-bf16", block_size=16, draft=False, **changes):
    config = EngineConfig(
        model=str(GOLDEN / checkpoint),
        precision=precision,
        block_size=block_size,
        num_blocks=200,
        max_num_seqs=6,
        num_draft_tokens=4,
        **changes,
    )
    runner = ModelRunner(config, draft=draft)
    runner.native.wait()
    return runner


class Seq:
    """One sequence driven by hand. Blocks are handed out in a scrambled order, so that a wrong table shows."""

    def __init__(self, runner, ids, slot, total_len=None):
        self.runner, self.ids, self.slot = runner, list(ids), slot
        per_seq = (runner.limits.num_blocks - 1) // (runner.limits.num_state_slots - 1)
        first = 1 + (slot - 1) * per_seq
        self.table = [first + (5 * i) % per_seq for i in range(per_seq)] if per_seq % 5 else list(range(first, first + per_seq))
        self.total_len = total_len or len(self.ids)
        self.done = 0

    def slice(self, end, rows=LogitRows.ALL):
        start, self.done = self.done, end
        history = tuple(self.ids[max(0, start - self.runner.limits.ngram_history) : start])
        return SequenceSlice(self.ids[start:end], start, self.total_len, self.table, self.slot, history, logit_rows=rows)


def prefill(seq, chunks, probe=None):
    """Run the next chunks (lengths) and return the logits of all rows."""
    out = [seq.runner.run(Batch(StepKind.PREFILL, [seq.slice(min(seq.done + n, len(seq.ids)))]), probe) for n in chunks]
    return torch.cat(out)


def decode(seqs, rows=1, kind=StepKind.DECODE):
    """One step of `rows` tokens for each sequence; returns [B, rows, V]."""
    logits = seqs[0].runner.run(Batch(kind, [s.slice(s.done + rows) for s in seqs]))
    return logits.clone().unflatten(0, (len(seqs), rows))  # recorded steps write the next one's to the same place
