"""Muon for the large matrices of the layers, AdamW for everything else."""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor

from recipes.tiny.params import Params

MUON_LR, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.02
ADAM_LR, EMBED_LR, ENGRAM_LR = 3e-3, 4e-3, 8e-3
_MUON = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight$|ffn\.w[123]$|compressor\.(wkv|wgate)\.weight$|engram\.wkv|main_proj")


def orthogonalise(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps in bf16 towards the nearest semi-orthogonal matrices. g [k, a, b]."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """Both optimisers over the given parameters. `factor` scales every learning rate."""

    def __init__(self, params: Params, fused: bool) -> None:
        self.muon: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        adam: dict[float, list[Tensor]] = defaultdict(list)
        for name, p in sorted(params.items()):
            if not p.requires_grad:
                continue
            if _MUON.search(name):
                self.muon[p.shape[-2], p.shape[-1]].append(p)
            else:
                rate = ENGRAM_LR if "engram.embed" in name else EMBED_LR if name in ("embed.weight", "head.weight") else ADAM_LR
                adam[rate].append(p)
        self.momentum = {shape: [torch.zeros_like(p) for p in ps] for shape, ps in self.muon.items()}
        groups = [{"params": ps, "lr": rate, "base": rate} for rate, ps in adam.items()]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)
        self.adam_params = [p for ps in adam.values() for p in ps]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.adam_params, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * factor
        self.adam.step()
        for (rows, cols), params in self.muon.items():
            live = [(p, m) for p, m in zip(params, self.momentum[rows, cols], strict=True) if p.grad is not None]
            if not live:
                continue
            ps, ms = [p for p, _ in live], [m for _, m in live]
            gs = [p.grad for p in ps]
            torch._foreach_lerp_(ms, gs, 1 - MUON_MOMENTUM)
            updates = torch._foreach_lerp(gs, ms, MUON_MOMENTUM)
            flat = orthogonalise(torch.cat([u.reshape(-1, rows, cols) for u in updates]))
            parts = flat.split([p.numel() // (rows * cols) for p in ps])
            rate = MUON_LR * factor
            torch._foreach_mul_(ps, 1 - rate * MUON_DECAY)
            torch._foreach_add_(ps, [u.view_as(p) for u, p in zip(parts, ps, strict=True)], alpha=-rate * max(1.0, rows / cols) ** 0.5)
        for p in (*self.adam_params, *(p for ps in self.muon.values() for p in ps)):
            p.grad = None

    def state(self) -> dict[str, object]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load(self, state: dict[str, object]) -> None:
        self.adam.load_state_dict(state["adam"])
        for shape, saved in state["momentum"].items():
            for mine, theirs in zip(self.momentum[shape], saved, strict=True):
                mine.copy_(theirs)
