"""Which rank holds which experts: physical slots, the maps between them and experts, and the copies that a new placement needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """experts: for every physical slot the expert in it. Rank r owns the slots [r * c, (r + 1) * c), c = `slots_per_rank`.

    Every expert has at least one slot; the slots beyond one per expert hold further copies ("replicas").
    """

    experts: tuple[int, ...]
    num_experts: int
    ranks: int

    def __post_init__(self) -> None:
        assert len(self.experts) % self.ranks == 0, f"{len(self.experts)} slots on {self.ranks} ranks"
        assert set(self.experts) == set(range(self.num_experts)), "every expert needs a slot"

    @staticmethod
    def initial(num_experts: int, num_extra: int, ranks: int) -> Placement:
        """Slot i holds expert i, the extra slots begin again with expert 0. `num_extra` is rounded up to fill all ranks alike."""
        slots = -(-(num_experts + num_extra) // ranks) * ranks
        return Placement(tuple(slot % num_experts for slot in range(slots)), num_experts, ranks)

    @property
    def slots_per_rank(self) -> int:
        return len(self.experts) // self.ranks

    @property
    def max_copies(self) -> int:
        """Most slots that one expert can ever have."""
        return len(self.experts) - self.num_experts + 1

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The experts in a rank's slots, in slot order."""
        count = self.slots_per_rank
        return self.experts[rank * count : (rank + 1) * count]

    def slots_of(self) -> list[list[int]]:
        """Expert -> its slots, ascending: the inverse of `experts`."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        return slots

    def maps(self) -> tuple[Tensor, Tensor]:
        """Expert -> slots [E, max_copies] int64, padded with -1, and the number of slots of each expert [E] int64."""
        slots = self.slots_of()
        table = torch.full((self.num_experts, self.max_copies), -1, dtype=torch.int64)
        for expert, own in enumerate(slots):
            table[expert, : len(own)] = torch.tensor(own)
        return table, torch.tensor([len(own) for own in slots])

    def settled(self, before: Placement) -> Placement:
        """The same experts on every rank, but those that a rank already had in the slots where it had them."""
        experts: list[int] = []
        for rank in range(self.ranks):
            wanted, slots = list(self.held_by(rank)), [-1] * self.slots_per_rank
            for slot, expert in enumerate(before.held_by(rank)):
                if expert in wanted:
                    wanted.remove(expert)
                    slots[slot] = expert
            experts += [expert if expert >= 0 else wanted.pop(0) for expert in slots]
        return Placement(tuple(experts), self.num_experts, self.ranks)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One expert's weights from a slot to a slot, both global."""

    source: int
    target: int


def transfers(before: Placement, after: Placement) -> list[Transfer]:
    """What fills the slots whose expert changes, the same list on every rank. A rank that has the expert copies it from itself;
    the others take it from the ranks that have it, shared out evenly among them."""
    count = before.slots_per_rank
    old = before.slots_of()
    moves: list[Transfer] = []
    missing: dict[int, list[int]] = {}
    for slot, (was, now) in enumerate(zip(before.experts, after.experts, strict=True)):
        if was == now:
            continue
        own = [source for source in old[now] if source // count == slot // count]
        if own:
            moves.append(Transfer(own[0], slot))
        else:
            missing.setdefault(now, []).append(slot)
    for expert, targets in missing.items():
        by_rank = {source // count: source for source in reversed(old[expert])}
        holders = [by_rank[rank] for rank in sorted(by_rank)]
        moves += [Transfer(source, target) for source, target in zip(_shares(holders, len(targets)), targets, strict=True)]
    return moves


def _shares(holders: list[int], receivers: int) -> list[int]:
    """The holder of each receiver: equal contiguous shares, then the remainder one each."""
    share = receivers // len(holders)
    return [holder for holder in holders for _ in range(share)] + holders[: receivers - share * len(holders)]
