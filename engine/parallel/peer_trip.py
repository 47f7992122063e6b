"""A layer's rows on their way through the memory of peers; see `engine.ops.peer_rows`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from engine.ops.peer_rows import PeerMemory, Sent, bring_parts, bring_sums, send_rows

if TYPE_CHECKING:
    from engine.parallel.expert_exchange import RoutedLayer


class PeerTrip:
    """As `engine.parallel.expert_exchange.Trip`, in one launch each way."""

    def __init__(self, memory: PeerMemory, layer: RoutedLayer, capacity: int, real: Tensor | None) -> None:
        self._memory, self._layer, self._capacity, self._real = memory, layer, capacity, real
        self._sent: Sent | None = None

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self._layer
        slots_per_rank = layer.placement.slots_per_rank
        sent = send_rows(x, ids, weights, layer.slots, layer.copies, self._real, self._capacity, slots_per_rank, self._memory)
        self._sent = sent
        return sent.rows, sent.slots, sent.weights

    def bring_parts(self, parts: Tensor) -> Tensor:
        assert self._sent is not None, "nothing was dispatched"
        return bring_parts(parts, self._sent, self._memory)

    def bring_sums(self, sums: Tensor, shared: Callable[[], Tensor] | None) -> Tensor | None:
        assert self._sent is not None, "nothing was dispatched"
        return bring_sums(sums, self._sent, None if shared is None else shared(), self._memory)
