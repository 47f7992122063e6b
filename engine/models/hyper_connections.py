"""Hyper-connections: n residual streams that sublayers read from and write back to (shifted variant)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.loader import WeightSource
from engine.models.config import TextConfig
from engine.ops.hyper_boundary import Mixer
from engine.ops.hyper_mixes import spread_scale


def load_mixer(source: WeightSource, prefix: str, text: TextConfig) -> Mixer:
    """The mixes of one sublayer. prefix: `layers.3.hc_attn`."""
    fn, base, scale = (source.tensor(f"{prefix}_{part}", torch.float32) for part in ("fn", "base", "scale"))
    return Mixer(fn, spread_scale(scale, text.hc_mult), base, text.hc_sinkhorn_iters, text.hc_eps)


def first_mix(num_rows: int, n: int, device: torch.device) -> Tensor:
    """What the first sublayer reads with: stream 0 only. [T, n] fp32."""
    pre = torch.zeros(num_rows, n, device=device)
    pre[:, 0] = 1
    return pre
