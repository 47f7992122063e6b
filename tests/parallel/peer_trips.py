"""Trips of all ranks of a group, drawn beforehand, and what each of them must bring: from whole rows that go to everybody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.exchange_rows import ADD_RANK_SUMS, LOCAL_CHOICES, PACK_ROWS, row_words
from engine.ops.peer_rows import PeerLayout, Sent

SLOTS = 3  # of a rank


@dataclass(frozen=True)
class Shape:
    """What the trips of a group have in common. most_rows: that a rank's memory is made for."""

    ranks: int
    chosen: int
    columns: int
    dtype: torch.dtype
    exact: bool
    padded: bool
    most_rows: int

    @property
    def layout(self) -> PeerLayout:
        return PeerLayout.of(self.ranks, self.most_rows, self.columns, self.dtype.itemsize, self.chosen, self.exact)


class Trip:
    """One trip. counts: rows by rank, at most `capacity`."""

    def __init__(self, shape: Shape, seed: int, capacity: int, counts: list[int], device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(seed)
        num = SLOTS * shape.ranks
        self.shape, self.capacity = shape, capacity
        # Expert e is in two slots, unless it is the last.
        self.slots = torch.stack((torch.arange(num), torch.arange(1, num + 1).clamp(max=num - 1)), 1).to(device)
        self.copies = torch.tensor([2] * (num - 1) + [1], device=device)
        self.x = [torch.randn(count, shape.columns, generator=draw).to(shape.dtype).to(device) for count in counts]
        self.ids = [torch.rand(count, num, generator=draw).argsort(1)[:, : shape.chosen].to(device) for count in counts]
        self.weights = [torch.rand(count, shape.chosen, generator=draw).to(device) for count in counts]
        self.shared = [torch.randn(count, shape.columns, generator=draw).to(shape.dtype).to(device) for count in counts]
        self.real = [(torch.rand(count, generator=draw) < 0.7).to(device) if shape.padded else None for count in counts]

    def given(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int]:
        """What a rank gives to `send_rows`, but the memory."""
        return self.x[rank], self.ids[rank], self.weights[rank], self.slots, self.copies, self.real[rank], self.capacity, SLOTS

    def _packed(self, rank: int) -> Tensor:
        x, ids, weights, slots, copies, real, capacity, _ = self.given(rank)
        packed: Tensor = PACK_ROWS.reference(x, ids, weights, slots, copies, real, rank, capacity)
        return packed

    def arrived(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, slots and weights that come to a rank."""
        flat = torch.cat([self._packed(source) for source in range(self.shape.ranks)])
        width, _ = row_words(self.x[0], self.shape.chosen)
        slots, weights = LOCAL_CHOICES.reference(flat, width, self.shape.chosen, rank * SLOTS, SLOTS)
        return flat[:, :width].contiguous().view(self.shape.dtype), slots, weights

    def check_sent(self, rank: int, sent: Sent) -> None:
        rows, slots, weights = self.arrived(rank)
        wants = slots >= 0
        assert torch.equal(sent.slots, slots)
        assert torch.equal(sent.weights[wants], weights[wants])
        assert torch.equal(sent.rows[wants.any(1)], rows[wants.any(1)])

    def home(self, rank: int) -> Tensor:
        """What `bring_sums` gives to a rank, or `bring_parts` with NaN where no expert has computed."""
        mine = slice(rank * self.capacity, rank * self.capacity + len(self.x[rank]))
        parts = [terms(*self.arrived(owner), owner)[mine] for owner in range(self.shape.ranks)]
        if self.shape.exact:
            known = torch.stack([self.arrived(owner)[1][mine] >= 0 for owner in range(self.shape.ranks)]).any(0)
            return torch.where(known[..., None], sum(parts[1:], parts[0]), torch.nan)
        total: Tensor = ADD_RANK_SUMS.reference(torch.stack([add(part, self.shape.dtype) for part in parts]), self.shared[rank])
        return total


def check_home(got: Tensor | None, wanted: Tensor) -> None:
    if got is None:
        assert len(wanted) == 0
        return
    known = ~wanted.isnan()
    assert torch.equal(got[known], wanted[known])
    assert bool(got.isfinite().all())


def terms(rows: Tensor, slots: Tensor, weights: Tensor, rank: int) -> Tensor:
    """[R, K, C] fp32: what a rank's experts make of rows. Rows without a choice may hold anything."""
    scale = torch.where(slots >= 0, weights * (1 + slots + SLOTS * rank), 0)
    return torch.where((slots >= 0)[..., None], rows.float()[:, None] * scale[..., None], 0)


def add(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, K, C] -> [R, C], in one order everywhere."""
    total = torch.zeros_like(parts[:, 0])
    for part in parts.unbind(1):
        total += part
    return total.to(dtype)


def draw_trips(shape: Shape, capacities: list[int], counts: list[int], device: str = "cpu") -> Iterator[Trip]:
    """A trip for every capacity; `counts` are taken by turns and cut at it."""
    for number, capacity in enumerate(capacities):
        rows = [min(capacity, counts[(number * shape.ranks + rank) % len(counts)]) for rank in range(shape.ranks)]
        yield Trip(shape, number, capacity, rows, device)
