"""Random weights of realistic size for `--load-format dummy`, tests and the first embedded checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.inventory import Parameter, parameters


def random_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Every text tensor of a checkpoint at its logical shape, fp32, by logical name. Never zeros."""
    return {p.name: random_tensor(p, seed) for p in parameters(config) if not p.vision}


def random_tensor(parameter: Parameter, seed: int, device: str = "cpu") -> Tensor:
    """One parameter, fp32. The stream depends on name, seed and kind of device only, so loading order does not matter."""
    mean, std = _moments(parameter)
    return torch.randn(parameter.shape, generator=_generator(parameter, seed, device), device=device).mul_(std).add_(mean)


def random_rows(parameter: Parameter, seed: int, device: str = "cpu", piece: int = 2**20) -> Iterator[Tensor]:
    """The rows of one parameter as `random_tensor` would draw them on a CPU, at most `piece` of them at a time."""
    mean, std = _moments(parameter)
    generator, (rows, width) = _generator(parameter, seed, device), parameter.shape
    for begin in range(0, rows, piece):
        shape = (min(piece, rows - begin), width)
        yield torch.randn(shape, generator=generator, device=device).mul_(std).add_(mean)


def _generator(parameter: Parameter, seed: int, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed * 1_000_003 + zlib.crc32(parameter.name.encode()))


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
