"""Rows of a batch that several ranks computed, brought together on every rank that needs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.parallel.context_split import PAD, ContextSplit, Ints
from engine.parallel.tensor_group import TensorGroup


@dataclass(frozen=True, slots=True)
class RowGather:
    """One all-gather of equal shares, then the wanted rows in their order.

    give: local rows that this rank contributes, None for all of them in order. width: rows per rank in the exchange, padding included.
    take: [W] rows of the exchanged [size * width].
    """

    group: TensorGroup
    give: Tensor | None
    width: int
    take: Tensor

    @staticmethod
    def of(group: TensorGroup, split: ContextSplit, wanted: Ints, mine: Ints, device: torch.device) -> RowGather:
        """wanted: batch rows that any rank needs, ascending and the same on all ranks. mine: those that this one needs."""
        owner, padded = np.divmod(split.reverse[wanted], max(1, split.local_len))
        # Local rows are numbered without the padding of the layout. They ascend like the batch's own, so contributions keep the order.
        real = split.mirror != PAD
        local = (np.cumsum(real, axis=1) - 1)[owner, padded]
        counts = np.bincount(owner, minlength=split.cp)
        width = int(counts.max(initial=0))
        place = np.zeros(len(split.reverse), dtype=np.int64)
        for rank in range(split.cp):
            place[wanted[owner == rank]] = rank * width + np.arange(counts[rank])
        give = local[owner == group.rank]
        everything = len(give) > 0 and len(give) == int(real[group.rank].sum())
        take = torch.from_numpy(place[mine]).to(device)
        return RowGather(group, None if everything else torch.from_numpy(give).to(device), width, take)

    def __call__(self, local: Tensor) -> Tensor:
        """local: [rows of this rank, ...]. Returns [W, ...]."""
        if self.width == 0:
            return local.new_empty(0, *local.shape[1:])
        mine = local if self.give is None else local.index_select(0, self.give)
        if len(mine) < self.width:
            mine = torch.cat((mine, mine.new_zeros(self.width - len(mine), *mine.shape[1:])))
        out = mine.new_empty(self.group.size, self.width, *mine.shape[1:])
        self.group.all_gather(out, mine.contiguous())
        return out.flatten(0, 1).index_select(0, self.take)
