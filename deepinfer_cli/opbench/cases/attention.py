"""Attention over packed cache rows at the released shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from deepinfer_cli.opbench.case import Call, Case, Prepared, Setting, Target, num_copies, relative_error
from deepinfer_cli.opbench.public_peers import flash_mla
from engine.ops.cache_rows import entry_row_bytes, pack_entry_rows, pack_window_rows, window_row_bytes
from engine.ops.rope import plain_frequencies, rotation
from engine.ops.row_attention import ROW_ATTENTION, PackedKeys, row_attention

# Source: config keys `num_attention_heads`, `head_dim`, `qk_rope_head_dim`, `sliding_window`, `index_topk`.
_HEADS, _WIDTH, _ROTARY, _WINDOW, _TOPK = 64, 512, 64, 128, 512


def make_problem(setting: Setting, rows: int, shared_keys: bool) -> tuple[torch.Tensor, torch.Tensor, list[PackedKeys], torch.Tensor]:
    """shared_keys: queries of one sequence pick from the same entries, as in prefill; else every row has its own."""
    heads, width, rotary, window, topk = (4, 64, 16, 16, 12) if setting.small else (_HEADS, _WIDTH, _ROTARY, _WINDOW, _TOPK)
    generator = setting.generator()
    q = setting.normal(rows, heads, width)
    rot = rotation(torch.arange(rows, device=setting.device) + 8000, plain_frequencies(rotary, 10_000.0).to(setting.device))
    pool = 4096 if shared_keys else rows * topk
    entries = pack_entry_rows(setting.normal(pool, width))
    keys = pack_window_rows(setting.normal(rows + window if shared_keys else rows * window, width))
    picked = torch.stack([torch.randperm(pool, device=setting.device, generator=generator)[:topk].sort().values for _ in range(rows)])
    step = 1 if shared_keys else window
    near = torch.arange(rows, device=setting.device)[:, None] * step + torch.arange(window, device=setting.device)
    sources = [PackedKeys(keys, near.int()), PackedKeys(entries, picked.int())]
    return q, rot, sources, torch.randn(heads, device=setting.device, generator=generator)


def _library(q: torch.Tensor, sources: list[PackedKeys]) -> Call:
    """The same sums by the library over gathered bf16 keys. Gathering is part of it, rotations are not."""
    rows = [torch.randn(s.rows.shape[0], q.shape[2], device=q.device).to(q.dtype) for s in sources]
    index = [s.index.long() for s in sources]

    def run() -> torch.Tensor:
        keys = torch.cat([r[i.flatten()].view(*i.shape, -1) for r, i in zip(rows, index, strict=True)], 1)
        return torch.nn.functional.scaled_dot_product_attention(q[:, None], keys[:, None], keys[:, None])

    return run


def _attention(id: str, rows: int, target: Target, *, shared_keys: bool = False) -> Case:
    def prepare(setting: Setting) -> Prepared:
        count = min(rows, 4) if setting.small else rows
        heads, width = (4, 64) if setting.small else (_HEADS, _WIDTH)
        window, topk = (16, 12) if setting.small else (_WINDOW, _TOPK)
        keys_bytes = window * window_row_bytes(width) + topk * entry_row_bytes(width)
        num_bytes = count * (2 * heads * width * 2 + (0 if shared_keys else keys_bytes))
        if shared_keys:
            num_bytes += 4096 * entry_row_bytes(width) + (count + window) * window_row_bytes(width)
        made = [make_problem(setting, count, shared_keys) for _ in range(min(8, num_copies(num_bytes, setting)))]
        scale = width**-0.5
        setting.select(ROW_ATTENTION)

        def check() -> tuple[float, float]:
            part = slice(0, min(count, 64))
            q, rot, sources, sink = made[0]
            few = [PackedKeys(s.rows, s.index[part].contiguous()) for s in sources]
            wanted = ROW_ATTENTION.reference(q[part].float(), rot[part], few, sink, scale, 0)
            return relative_error(row_attention(q, rot, sources, sink, scale)[part], wanted), ROW_ATTENTION.tolerance.bf16

        calls = [partial(row_attention, *problem, scale) for problem in made]
        peers: dict[str, Sequence[Call]] = {}
        if count <= 256:
            peers["torch sdpa on bf16 rows"] = [_library(q, sources) for q, _, sources, _ in made]
        if setting.device == "cuda" and not shared_keys:
            peers |= flash_mla([problem[0] for problem in made], window + topk, scale)
        flops = count * heads * (window + topk) * width * 4
        return Prepared(calls, num_bytes, flops, peers, check)

    return Case(id, {"rows": rows}, prepare, target)


CASES = [
    *(_attention("k.attn.decode", rows, Target("time", 16, 10)) for rows in (1, 8)),
    _attention("k.attn.decode", 64, Target("time", 40, 25)),
    *(_attention("k.attn.decode", rows, Target("bf16", 0.34, 0.50)) for rows in (256, 1536)),
    _attention("k.attn.prefill", 4096, Target("bf16", 0.35, 0.50), shared_keys=True),
]
