"""Experts that several ranks share, in the compiled CPU step: it calls back for every layer, and computes what arrives from all ranks."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.models.native_layout import EXCHANGE
from engine.models.native_weights import NativeWeights
from engine.parallel.expert_exchange import ExpertExchange


class NativeLayerExperts:
    """One layer's experts as packed matrices; see `engine.parallel.expert_exchange.Experts`."""

    def __init__(self, owner: NativeExperts, layer: int, stores: list[Tensor]) -> None:
        self._owner, self._layer, self.stores = owner, layer, stores

    def parts(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        (count, choices), library = slots.shape, self._owner.library
        out = torch.empty(count, choices, x.shape[1])
        x, slots, weights = x.contiguous(), slots.contiguous(), weights.contiguous()
        pointers = (slots.data_ptr(), weights.data_ptr(), out.data_ptr())
        library.dix_expert_parts(self._owner.model, self._owner.scratch, self._layer, x.data_ptr(), count, choices, *pointers)
        return out

    def summed(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return add_in_order(self.parts(x, slots, weights))

    def shared(self, x: Tensor) -> Tensor:
        slots = torch.full((len(x), 1), self._owner.held)
        return self.parts(x, slots, torch.ones(len(x), 1))[:, 0]

    def add_up(self, parts: Tensor, shared: Tensor) -> Tensor:
        return add_in_order(torch.cat((parts, shared[:, None]), 1))


class NativeExperts:
    """Lends a packed model the exchange. `raise_error` after every step: an exception cannot pass through the compiled code."""

    def __init__(self, library: ctypes.CDLL, weights: NativeWeights, exchange: ExpertExchange, num_chosen: int) -> None:
        self.library, self.model = library, ctypes.pointer(weights.model)
        self.scratch = library.dix_open_experts()
        self.held = exchange.layers[0].placement.slots_per_rank
        self._exchange, self._chosen, self._hidden = exchange, num_chosen, int(weights.model.hidden)
        self._error: BaseException | None = None
        self._callback = EXCHANGE(self._run)
        weights.model.exchange = ctypes.cast(self._callback, ctypes.c_void_p)
        for layer, stores in enumerate(weights.expert_stores):
            exchange.attach(layer, NativeLayerExperts(self, layer, stores))

    def __del__(self) -> None:
        self.library.dix_close_experts(self.scratch)

    def raise_error(self) -> None:
        """Raise what a layer's exchange raised during the last step."""
        if self._error is not None:
            raise self._error

    def _run(self, layer: int, x: int, count: int, y: int) -> None:
        if self._error is not None:
            return
        try:
            rows, result = floats_at(x, count, self._hidden), floats_at(y, count, self._hidden)
            ids, weights = torch.empty(count, self._chosen, dtype=torch.int64), torch.empty(count, self._chosen)
            self.library.dix_route(self.model, self.scratch, layer, x, count, ids.data_ptr(), weights.data_ptr())
            result.copy_(self._exchange.run(layer, rows, ids, weights))
        except BaseException as error:
            self._error = error


def floats_at(address: int | None, rows: int, width: int) -> Tensor:
    """Memory of the compiled code as a tensor [rows, width]. address: None only for no rows."""
    if rows == 0:
        return torch.empty(0, width)
    array: Any = np.ctypeslib.as_array((ctypes.c_float * (rows * width)).from_address(address or 0))
    return torch.from_numpy(array).view(rows, width)


def add_in_order(parts: Tensor) -> Tensor:
    """[R, K, C] -> [R, C], one after the other: the order of the compiled step that has all experts."""
    total = parts[:, 0].clone()
    for k in range(1, parts.shape[1]):
        total += parts[:, k]
    return total
