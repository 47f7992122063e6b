"""The library's own dense products at the model's shapes: what our kernels stand beside, and a check of the frame itself."""

from __future__ import annotations

import torch

from deepinfer_cli.opbench.case import Case, Prepared, Setting, Target, num_copies

# Source: shape of the output head, config keys `vocab_size` and `hidden_size`.
_VOCAB, _HIDDEN = 129_280, 5_120


def _head(rows: int) -> Case:
    def prepare(setting: Setting) -> Prepared:
        vocab, hidden = (512, 64) if setting.small else (_VOCAB, _HIDDEN)
        weight = setting.normal(vocab, hidden, std=hidden**-0.5)
        num_bytes = weight.numel() * 2 + rows * (hidden * 2 + vocab * 2)
        inputs = [setting.normal(rows, hidden) for _ in range(num_copies(num_bytes, setting))]
        calls = [lambda x=x: torch.nn.functional.linear(x, weight) for x in inputs]
        return Prepared(calls, num_bytes, flops=2 * rows * vocab * hidden)

    return Case("k.head", {"rows": rows}, prepare, Target("floor", 0.80, 0.95))


CASES = [_head(rows) for rows in (1, 64, 256)]
