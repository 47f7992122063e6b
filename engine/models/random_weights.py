"""Random weights of realistic size for `--load-format dummy`, tests and the first embedded checkpoint."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.inventory import Parameter, parameters


def random_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Every text tensor of a checkpoint at its logical shape, fp32, by logical name. Never zeros."""
    return {p.name: random_tensor(p, seed) for p in parameters(config) if not p.vision}


def random_tensor(parameter: Parameter, seed: int) -> Tensor:
    """One parameter, fp32. The stream depends on name and seed only, so loading order does not matter."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(parameter.name.encode()))
    mean, std = _moments(parameter)
    return torch.randn(parameter.shape, generator=generator).mul_(std).add_(mean)


def _moments(parameter: Parameter) -> tuple[float, float]:
    """Mean and standard deviation that keep activations near unit size through all layers."""
    name, shape = parameter.name, parameter.shape
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return 1.0, 0.1
    if name.endswith(("_base", "attn_sink", "embed.weight")):
        return 0.0, 1.0
    if name.endswith("_scale"):
        return 1.0, 0.15
    if name.endswith(("gate.bias", "gate.bias_vl")):
        return 0.0, 0.05
    if name.endswith("_fn"):
        return 0.0, min(0.1, shape[-1] ** -0.5)
    return 0.0, shape[-1] ** -0.5
