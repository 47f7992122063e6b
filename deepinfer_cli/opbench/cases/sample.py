"""One token for each of many rows of logits: the largest, or a draw."""

from __future__ import annotations

import torch

from deepinfer_cli.opbench.case import Call, Case, Prepared, Setting, Target
from engine.ops.sample_rows import SAMPLE_ROWS, Draws, Mode

# Source: config key vocab_size.
_VOCAB, _ROWS = 129_280, 256


def _case(mode: Mode) -> Case:
    def prepare(setting: Setting) -> Prepared:
        rows, vocab = (3, 500) if setting.small else (_ROWS, _VOCAB)
        SAMPLE_ROWS.use(SAMPLE_ROWS.backends()[0] if setting.device == "cuda" else "reference")
        logits = setting.normal(rows, vocab, std=3.0, dtype=torch.float32)
        numbers = torch.randint(0, 2**53, (rows,), device=setting.device, generator=setting.generator())
        modes = torch.full((rows,), int(mode), dtype=torch.int32, device=setting.device)
        draws = Draws(torch.ones(rows, device=setting.device), modes, numbers)
        plain: list[Call] = [lambda: SAMPLE_ROWS.reference(logits, draws, vocab)]
        if mode is Mode.GREEDY:
            plain = [lambda: logits.max(dim=-1)]

        def check() -> tuple[float, float]:
            wrong = SAMPLE_ROWS(logits, draws, vocab)[0] != SAMPLE_ROWS.reference(logits, draws, vocab)[0]
            # Probabilities are rounded in another order than the library's: of many rows one may lie on the edge.
            return float(wrong.float().mean()), 0.01

        # The logits of one call are twice the L2 cache.
        return Prepared([lambda: SAMPLE_ROWS(logits, draws, vocab)], rows * vocab * 4, peers={"torch": plain}, check=check)

    return Case("k.sample", {"rows": _ROWS, "mode": mode.name.lower()}, prepare, Target("time", 80.0, 45.0))


CASES = [_case(mode) for mode in Mode]
