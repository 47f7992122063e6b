"""Hyper-connections: n residual streams that sublayers read from and write back to (shifted variant)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.loader import WeightSource
from engine.models.config import TextConfig
from engine.ops.hyper_mixes import hyper_mixes, spread_scale
from engine.ops.hyper_streams import collapse, expand

__all__ = ["HyperConnection", "collapse", "expand", "first_mix"]


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """The mixes of one sublayer, computed from the streams as it finds them. All parameters fp32."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    num_iters: int
    hc_eps: float
    rms_eps: float

    @staticmethod
    def load(source: WeightSource, prefix: str, text: TextConfig) -> HyperConnection:
        """prefix: `layers.3.hc_attn`."""
        read = {part: source.tensor(f"{prefix}_{part}", torch.float32) for part in ("fn", "base", "scale")}
        scale = spread_scale(read["scale"], text.hc_mult)
        return HyperConnection(read["fn"], read["base"], scale, text.hc_sinkhorn_iters, text.hc_eps, text.rms_norm_eps)

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h: [T, n, C]. Returns pre [T, n], post [T, n], comb [T, n, n], fp32."""
        z = h.float().flatten(1)
        raw = linear(z, self.fn) * ((z * z).mean(-1, keepdim=True) + self.rms_eps).rsqrt()
        return hyper_mixes(raw, self.scale, self.base, self.num_iters, self.hc_eps)


def first_mix(num_rows: int, n: int, device: torch.device) -> Tensor:
    """What the first sublayer reads with: stream 0 only. [T, n] fp32."""
    pre = torch.zeros(num_rows, n, device=device)
    pre[:, 0] = 1
    return pre
