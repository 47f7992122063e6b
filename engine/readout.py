"""Sampled ids that are still on the device: the next step may read them there before the host has seen them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.step import Sampled


class Readout:
    """One id per row on its way to the host.

    ids: [R] int64, always valid ids, also of rows that fail. best: [R] fp32, the largest logit; a row where it is not finite fails.
    """

    def __init__(self, ids: Tensor, best: Tensor) -> None:
        self.ids = ids
        self._host_ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=ids.is_cuda)
        self._host_best = torch.empty(best.shape, dtype=best.dtype, pin_memory=ids.is_cuda)
        self._host_ids.copy_(ids, non_blocking=True)
        self._host_best.copy_(best, non_blocking=True)
        self._copied = torch.cuda.Event() if ids.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> Sampled:
        """Wait for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return Sampled([[token] for token in self._host_ids.tolist()], errors=row_errors(self._host_best))


@dataclass(frozen=True, slots=True)
class Largest:
    """Every row's largest logit, ids without a token left out, NaN where a row has one; and the id that it stands at, the first of equals,
    or in a step that draws the id that was drawn."""

    ids: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def errors(self) -> dict[int, str]:
        """Rows whose value is not finite."""
        return value_errors(self.values)


def row_errors(best: Tensor) -> dict[int, str]:
    """Rows whose largest logit is not finite. best: [R]; the maximum carries NaN through."""
    return value_errors(best.tolist())


def value_errors(best: list[float]) -> dict[int, str]:
    """`row_errors` of plain numbers."""
    if math.isfinite(sum(best)):  # fp64 holds every sum of fp32 numbers
        return {}
    return {i: f"the model produced invalid logits (largest value {value})" for i, value in enumerate(best) if not math.isfinite(value)}


def to_device(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host numbers as a tensor, without waiting for the device. Lists, because torch pins no tensor made from a numpy array."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
