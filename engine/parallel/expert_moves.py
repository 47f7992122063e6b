"""Moves one layer's expert weights from slots to slots over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.parallel.placement import Placement, transfers
from engine.parallel.tensor_group import TensorGroup


def move_experts(group: TensorGroup, stores: list[Tensor], before: Placement, after: Placement) -> int:
    """Fill the slots of this rank whose expert changes. All ranks of the group call it together. Returns bytes that came from other ranks.

    stores: weights by local slot, [c or more, ...], contiguous by slot; they change in place. What arrives waits beside them until all
    that leaves has been read, so a moved layer needs room for the slots that change.
    """
    first = group.rank * before.slots_per_rank
    mine = range(first, first + before.slots_per_rank)
    moves = transfers(before, after)
    arriving = [move for move in moves if move.target in mine]
    if not moves:
        return 0
    waiting = [torch.empty_like(store[: len(arriving)]) for store in stores]
    sends, receives, received = [], [], 0
    for move in moves:
        if move.source in mine and move.target not in mine:
            sends += [(store[move.source - first], move.target // before.slots_per_rank) for store in stores]
    for place, move in enumerate(arriving):
        for store, room in zip(stores, waiting, strict=True):
            if move.source in mine:
                room[place].copy_(store[move.source - first])
            else:
                receives.append((room[place], move.source // before.slots_per_rank))
                received += room[place].nbytes
    group.swap(sends, receives)
    for place, move in enumerate(arriving):
        for store, room in zip(stores, waiting, strict=True):
            store[move.target - first].copy_(room[place])
    return received
