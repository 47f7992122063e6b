"""Rows of an n-gram table in pinned host memory: gathered and decoded by the GPU, without the host."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from deepinfer_cli.opbench.case import Case, Prepared, Setting, Target, relative_error
from engine.ops.engram_gather import ENGRAM_GATHER
from engine.ops.weight_formats import encode_table_rows

# Source: config keys engram_head_dim, engram_n_heads, engram_max_ngram_size. Of 384 million rows a few million are enough: a row is met
# about once, whatever the size beyond the caches.
_WIDTH, _COLUMNS, _ROWS = 256, 24, 4_000_000


def _table(setting: Setting, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Random rows through our own quantiser, repeated; pinned on a machine with a GPU."""

    def make() -> tuple[Tensor, Tensor]:
        some, scale = encode_table_rows(torch.randn(min(rows, 20_000), width, generator=torch.Generator().manual_seed(setting.seed)))
        times = -(-rows // len(some))
        both = some.view(torch.uint8).repeat(times, 1).view(torch.float8_e4m3fn), scale.repeat(times, 1)
        return (both[0].pin_memory(), both[1].pin_memory()) if setting.device == "cuda" else both

    return setting.shared("engram table", make)


def _case(rows: int, must: float, aim: float) -> Case:
    def prepare(setting: Setting) -> Prepared:
        count, width, tokens = (200, 64, 3) if setting.small else (_ROWS, _WIDTH, rows // _COLUMNS)
        table, scale = _table(setting, count, width)
        setting.select(ENGRAM_GATHER)
        ids = [
            torch.randint(0, len(table), (tokens, _COLUMNS), device=setting.device, generator=setting.generator())
            for _ in range(1 if setting.small else 8)
        ]
        calls = [partial(ENGRAM_GATHER, i, table, scale, torch.bfloat16) for i in ids]
        plain = [partial(ENGRAM_GATHER.reference, i, table, scale, torch.bfloat16) for i in ids]
        num_bytes = tokens * _COLUMNS * (width + width // 32)

        def check() -> tuple[float, float]:
            return relative_error(calls[0](), plain[0]()), 0.0

        return Prepared(calls, num_bytes, peers={"gather on the host": plain}, check=check)

    return Case("k.engram", {"rows": rows}, prepare, Target("h2d", must, aim))


CASES = [_case(3_072, 0.35, 0.50), _case(50_016, 0.30, 0.50)]
