"""Expert parallelism: tokens go to the ranks that hold their experts, the results come home and are added up there.

Every rank passes the same number of rows to a collective, `capacity`: the most that any rank has in this step, agreed on once per step on
the host. So no layer waits for the host, and a rank without rows takes part with padding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from engine.ops.exchange_rows import add_rank_sums, local_choices, pack_rows, row_words
from engine.parallel.forced_routing import ForcedRouting
from engine.parallel.peer_memory import Peers
from engine.parallel.peer_trip import PeerTrip
from engine.parallel.placement import Placement
from engine.parallel.tensor_group import TensorGroup


class Route(StrEnum):
    """How rows travel. GATHER: every rank gets all rows. ALL_TO_ALL: a rank gets the rows that need it, packed to the front. PEERS: ranks
    of one host write into each other's memory what the reader needs; steps with too many rows for it take GATHER.
    """

    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"
    PEERS = "peers"


class Experts(Protocol):
    """One layer's experts on this rank: routed ones in local slots [0, c), and the shared one. A slot below 0 stands for no expert."""

    @property
    def stores(self) -> list[Tensor]:
        """The routed experts' weights, each [c or more, ...] by local slot."""

    def parts(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """x [R, C], slots and weights [R, K]. Returns every choice's term [R, K, C], 0 for none."""

    def summed(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """The same terms added up: [R, C]."""

    def shared(self, x: Tensor) -> Tensor:
        """The shared expert: [R, C] -> [R, C]."""

    def add_up(self, parts: Tensor, shared: Tensor) -> Tensor:
        """[R, K, C] and the shared expert's [R, C] -> [R, C], in the order and rounding of a rank that has all experts."""


class Trip(Protocol):
    """One layer's rows on their way out and back."""

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All rows that came here, [ranks * capacity, C], with their local slots and weights [ranks * capacity, K]."""

    def bring_parts(self, parts: Tensor) -> Tensor:
        """[ranks * capacity, K, C] computed here -> [T, K, C] of this rank's rows, each from the rank that computed it."""

    def bring_sums(self, sums: Tensor, shared: Callable[[], Tensor] | None) -> Tensor | None:
        """[ranks * capacity, C] computed here -> [T, C], every rank's sums of this rank's rows and the shared expert's, added up. Without
        the latter only what other ranks need of it happens."""


@dataclass(slots=True)
class RoutedLayer:
    """Where a layer's experts are, on the device. counts: [c] int64, the layer's row of `ExpertExchange.counts`."""

    placement: Placement
    slots: Tensor
    copies: Tensor
    counts: Tensor
    experts: list[Experts] = field(default_factory=list)

    @staticmethod
    def of(placement: Placement, counts: Tensor) -> RoutedLayer:
        slots, copies = placement.maps()
        return RoutedLayer(placement, slots.to(counts.device), copies.to(counts.device), counts)

    def place(self, placement: Placement) -> None:
        """Use other slots from now on. The maps change in place: captured graphs read them."""
        slots, copies = placement.maps()
        self.placement = placement
        self.slots.copy_(slots)
        self.copies.copy_(copies)


class ExpertExchange:
    """One rank's part in the experts of all backbone layers. Between `begin` and `finish` every layer is passed once, in order."""

    def __init__(
        self,
        group: TensorGroup,
        placement: Placement,
        num_layers: int,
        boundary: int,
        *,
        exact: bool,
        route: Route,
        device: str,
        hidden: int,
        dtype: torch.dtype,
        num_chosen: int,
        beside: bool = True,
        peers: Peers | None = None,
    ) -> None:
        """boundary: first layer that sees the decoder's rows only. exact: bring home every choice's term, so that the sum has the order and
        the rounding of a rank that holds all experts; otherwise each rank's sum comes home. beside: in recorded steps the shared expert
        runs on a stream of its own from before the rows leave; it changes no bit. peers: for that route; given back by `close`.
        """
        assert (peers is not None) == (route is Route.PEERS), f"rows travel by {route}, with peers {peers}"
        self.group, self.exact, self.route = group, exact, route
        self.beside = beside
        self._peers = peers
        # [layers, c]: tokens by local slot since somebody set it to zero, while `counting`.
        self.counts = torch.zeros(num_layers, placement.slots_per_rank, dtype=torch.int64, device=device)
        self.counting = False
        self.forced: ForcedRouting | None = None
        self.layers = [RoutedLayer.of(placement, counts) for counts in self.counts]
        self._boundary, self._num_chosen = boundary, num_chosen
        self._nothing = torch.empty(0, hidden, dtype=dtype, device=device)
        self._rows = (0, 0)
        self._real: Tensor | None = None
        self._next = num_layers

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts of this rank's slots at the start, the same for all layers."""
        return self.layers[0].placement.held_by(self.group.rank)

    def attach(self, number: int, experts: Experts) -> None:
        """Let `experts` compute layer `number` from now on. What was attached before is still moved with it."""
        self.layers[number].experts.insert(0, experts)

    # ---- a step

    def begin(self, encoder_rows: int, decoder_rows: int, recorded: bool = False) -> bool:
        """Agree on the capacities of this step and whether it is a recorded one, when all say so. All ranks call it once per step."""
        assert self._next == len(self.layers), f"the last step stopped before layer {self._next}"
        encoder, decoder, eager = self.group.max([encoder_rows, decoder_rows, int(not recorded)])
        self._rows, self._real = (encoder, decoder), None
        self._next = 0
        return not eager

    @property
    def most_rows(self) -> int:
        """The most rows that a rank has in this step."""
        return self._rows[0]

    def restart(self, capacity: int | None = None, real: Tensor | None = None) -> None:
        """Pass the layers again without asking the group, at another capacity where one is given. For steps that are recorded.

        real: [capacity] bool, the rows that are no padding; padding goes to no expert, or it would keep experts busy and be counted.
        """
        assert self._next == len(self.layers), f"the last step stopped before layer {self._next}"
        if capacity is not None:
            self._rows, self._real = (capacity, capacity), real
        self._next = 0

    def pass_over(self) -> None:
        """Count the coming layers as passed: a replay passes them on the device, or a failed recording has given them up."""
        self._next = len(self.layers)

    def finish(self) -> None:
        """Take part in the layers that this rank's own rows did not reach."""
        none = self._nothing.new_empty(0, self._num_chosen, dtype=torch.int64)
        while self._next < len(self.layers):
            self.run(self._next, self._nothing, none, none.float())

    def run(self, number: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Routed and shared experts of this rank's rows. x: [T, C], ids and weights: [T, K] of the routed choices. Returns [T, C]."""
        assert number == self._next, f"layer {number} instead of {self._next}"
        self._next += 1
        capacity = self._rows[number >= self._boundary]
        if capacity == 0:
            return x
        layer = self.layers[number]
        if self.forced is not None:
            ids = self.forced(ids, number, self.group.rank)
        experts = layer.experts[0]
        trip = self._trip(layer, capacity)
        shared = self._begin_shared(experts, x)
        rows, slots, shares = trip.dispatch(x, ids, weights)
        if self.counting:
            known = slots.flatten()
            layer.counts.scatter_add_(0, known.clamp(min=0), (known >= 0).long())
        if self.exact:
            parts = trip.bring_parts(experts.parts(rows, slots, shares))
            return experts.add_up(parts, shared()) if len(x) else x
        total = trip.bring_sums(experts.summed(rows, slots, shares), shared if len(x) else None)
        return x if total is None else total

    def _trip(self, layer: RoutedLayer, capacity: int) -> Trip:
        """How the rows of this layer travel. All ranks choose the same: they have agreed on the capacity."""
        if self._peers is not None and capacity <= self._peers.memory.layout.rows:
            return PeerTrip(self._peers.memory, layer, capacity, self._real)
        return CollectiveTrip(self.group, layer, capacity, self.route is not Route.ALL_TO_ALL, self._real)

    def close(self) -> None:
        """Give back what the route holds, behind the last step and its recordings. All ranks call it together."""
        if self._peers is not None:
            self._peers.close()

    def _begin_shared(self, experts: Experts, x: Tensor) -> Callable[[], Tensor]:
        """What waits for the shared expert's rows: begun now, on a side stream of a recorded step, or computed only then."""
        if not (self.beside and x.is_cuda and len(x) and torch.cuda.is_current_stream_capturing()):
            return lambda: experts.shared(x)
        here, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            begun = experts.shared(x)  # this memory is given out again behind the next wait of this stream for the other one

        def joined() -> Tensor:
            here.wait_stream(side)
            return begun

        return joined


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class CollectiveTrip:
    """A `Trip` by two collectives; see `engine.ops.exchange_rows` for a row on its way."""

    def __init__(self, group: TensorGroup, layer: RoutedLayer, capacity: int, gathered: bool, real: Tensor | None) -> None:
        """gathered: all rows to all ranks. real: [T] bool, the rows that want experts; None for all of them."""
        self._group, self._layer, self._capacity, self._gathered, self._real = group, layer, capacity, gathered, real
        self._slots_per_rank = layer.placement.slots_per_rank
        self._place: Tensor | None = None  # [T, ranks]: where a row is in what its ranks get, None when everywhere it is where it was

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group, layer, (count, chosen) = self._group, self._layer, ids.shape
        width, words = row_words(x, chosen)
        sent = self._capacity if self._gathered else count
        packed = pack_rows(x, ids, weights, layer.slots, layer.copies, self._real, group.rank, sent)
        self._slots = packed[:count, width : width + chosen]
        arrived = x.new_empty(group.size, self._capacity, words, dtype=torch.int32)
        if self._gathered:
            group.all_gather(arrived, packed)
        else:
            group.all_to_all(arrived, self._sort(packed, width))
        flat = arrived.flatten(0, 1)
        local, shares = local_choices(flat, width, chosen, group.rank * self._slots_per_rank, self._slots_per_rank)
        return flat[:, :width].view(x.dtype), local, shares

    @property
    def _owners(self) -> Tensor:
        """[T, K]: the rank that computes a choice, below 0 for none."""
        return self._slots.div(self._slots_per_rank, rounding_mode="floor").long()

    def _sort(self, packed: Tensor, width: int) -> Tensor:
        """[ranks, capacity, W]: for every rank the rows that need it, in order."""
        group = self._group
        ranks = torch.arange(group.size, device=packed.device)
        needed = (self._owners[:, :, None] == ranks).any(1)  # [T, ranks]
        place = self._place = torch.where(needed, needed.long().cumsum(0) - 1, -1)
        # One row more per rank takes what does not travel, so that no size depends on the data.
        sent = packed.new_zeros(group.size * (self._capacity + 1), packed.shape[1])
        sent[:, width:] = -1
        target = ranks * (self._capacity + 1) + torch.where(needed, place, self._capacity)
        sent[target.flatten()] = packed.repeat_interleave(group.size, 0)
        return sent.view(group.size, self._capacity + 1, -1)[:, : self._capacity].contiguous()

    def bring_parts(self, parts: Tensor) -> Tensor:
        count, chosen = self._slots.shape
        returned = self._return(parts)
        row = torch.arange(count, device=parts.device)[:, None]
        owners = self._owners.clamp(min=0)  # padding has none; what it gets instead, nobody reads
        place = row if self._place is None else self._place.gather(1, owners)
        return returned[owners, place, torch.arange(chosen, device=parts.device)]

    def bring_sums(self, sums: Tensor, shared: Callable[[], Tensor] | None) -> Tensor | None:
        returned = self._return(sums)
        if self._place is not None:
            place = self._place.t()[:, :, None]  # [ranks, T, 1]
            returned = torch.where(place >= 0, returned.gather(1, place.clamp(min=0).expand(-1, -1, returned.shape[2])), 0)
        return None if shared is None else add_rank_sums(returned, shared())

    def _return(self, computed: Tensor) -> Tensor:
        """[ranks, capacity, ...]: what every rank computed of the rows that it got from here."""
        given = computed.contiguous().unflatten(0, (self._group.size, self._capacity))
        returned = torch.empty_like(given)
        self._group.all_to_all(returned, given)
        return returned
