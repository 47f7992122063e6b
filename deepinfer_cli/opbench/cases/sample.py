"""One token for each of many rows of logits: the largest, or a draw."""

from __future__ import annotations

import torch

from deepinfer_cli.opbench.case import Call, Case, Prepared, Setting, Target
from engine.draws import FIXED_ONE
from engine.ops.sample_rows import SAMPLE_ROWS, Draws, Filters, Mode

# Source: config key vocab_size.
_VOCAB, _ROWS = 129_280, 256


def _case(mode: Mode, filtered: bool = False) -> Case:
    def prepare(setting: Setting) -> Prepared:
        rows, vocab = (3, 500) if setting.small else (_ROWS, _VOCAB)
        setting.select(SAMPLE_ROWS)
        logits = setting.normal(rows, vocab, std=3.0, dtype=torch.float32)
        numbers = torch.randint(0, 2**53, (rows,), device=setting.device, generator=setting.generator())
        modes = torch.full((rows,), int(mode), dtype=torch.int32, device=setting.device)
        filters = Filters(
            torch.full((rows,), int(0.95 * FIXED_ONE), device=setting.device),
            torch.full((rows,), 50, dtype=torch.int32, device=setting.device),
            torch.zeros(rows, device=setting.device),
        )
        draws = Draws(torch.ones(rows, device=setting.device), modes, numbers, filters if filtered else None, frozenset({mode}))
        plain: list[Call] = [lambda: SAMPLE_ROWS.reference(logits, draws, vocab)]
        if mode is Mode.GREEDY:
            plain = [lambda: logits.max(dim=-1)]

        def check() -> tuple[float, float]:
            wrong = SAMPLE_ROWS(logits, draws, vocab)[0] != SAMPLE_ROWS.reference(logits, draws, vocab)[0]
            # Probabilities are rounded in another order than the library's: of many rows one may lie on the edge.
            return float(wrong.float().mean()), 0.01

        # The logits of one call are twice the L2 cache.
        return Prepared([lambda: SAMPLE_ROWS(logits, draws, vocab)], rows * vocab * 4, peers={"torch": plain}, check=check)

    params: dict[str, int | str] = {"rows": _ROWS, "mode": mode.name.lower()}
    if filtered:
        params["filter"] = "top-k, top-p"
    return Case("k.sample", params, prepare, Target("time", 250.0, 120.0) if filtered else Target("time", 80.0, 45.0))


CASES = [*(_case(mode) for mode in Mode), _case(Mode.INVERSE, filtered=True)]
