"""Weights on their way to the device: what is read goes there, and n-gram tables where a kernel can read them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.loader import Checkpoint, RandomWeights

log = logging.getLogger(__name__)

# A table up to this size is nothing beside the weights of a model that needs a GPU.
_SMALL_TABLE_BYTES = 256 * 2**20


class PlacedWeights:
    """A `WeightSource` that moves what it reads to the device.

    Tables may exceed the device. On a GPU small ones move there and others become page-locked, so that kernels read them from the host.
    """

    def __init__(self, source: Checkpoint | RandomWeights, device: str) -> None:
        self._source, self._device = source, device

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._source.tensor(name, dtype).to(self._device)

    def stored(self, name: str) -> tuple[Tensor, Tensor | None]:
        values, scale = self._source.stored(name)
        return values.to(self._device), None if scale is None else scale.to(self._device)

    def table(self, name: str) -> tuple[Tensor, Tensor | None]:
        values, scale = self._source.table(name)
        if self._device != "cuda":
            return values, scale
        small = values.numel() * values.element_size() <= _SMALL_TABLE_BYTES
        return self._reachable(name, values, small), None if scale is None else self._reachable(name, scale, small)

    def skip(self, names: Iterable[str]) -> None:
        self._source.skip(names)

    def _reachable(self, name: str, part: Tensor, small: bool) -> Tensor:
        if small:
            return part.to(self._device)
        try:
            return part if part.is_pinned() else part.pin_memory()
        except RuntimeError as error:
            log.warning("%s stays in pageable memory, where the host has to gather its rows: %s", name, error)
            return part
