"""Which drafted tokens are kept. Pure functions; the output's distribution is the target model's own, exactly.

Two rules. *Coupled* (greedy requests, and sampled ones with a seed): every row draws its token as it would without drafts, a draft is
kept if it equals it. *Rejection* (sampled requests without a seed): a draft x is kept with probability min(1, p(x) / q(x)); otherwise
the token comes from the normalised max(p - q, 0). It keeps 1 - TV(p, q) of the drafts, the most that any rule can.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.draws import fixed_point
from engine.random_keys import DRAW_BITS
from engine.request import Sequence


@dataclass(frozen=True, slots=True)
class HostTable:
    """Where a contiguous [B, places, V] fp32 tensor is."""

    address: int
    places: int
    vocab_size: int

    @staticmethod
    def of(table: Tensor) -> HostTable:
        assert table.is_contiguous(), f"strides {table.stride()}"
        return HostTable(table.data_ptr(), table.shape[1], table.shape[2])


@dataclass(frozen=True, slots=True)
class Proposals:
    """The distributions that the sampled drafts of one step were drawn from.

    index: sequence id -> its row. table: [B, places, V] fp32, see `probabilities` in `engine/distribution.py`; None when nothing was drawn.
    It holds until the next draft. where: its place in the host's memory, for who made it there; asking torch costs 30 us in a step.
    """

    index: dict[int, int]
    table: Tensor | None
    where: HostTable | None = None

    def address(self, seq_id: int, place: int = 0) -> int:
        """Of the distribution of a sequence's place, in the host's memory; those of later places follow."""
        where = HostTable.of(self._table_of([seq_id])) if self.where is None else self.where
        return where.address + 4 * where.vocab_size * (self.index[seq_id] * where.places + place)

    def rows(self, wanted: list[tuple[int, int]]) -> Tensor:
        """[R, V] fp32 for pairs of sequence id and place."""
        table = self._table_of([seq_id for seq_id, _ in wanted])
        return table[[self.index[seq_id] for seq_id, _ in wanted], [place for _, place in wanted]]

    def _table_of(self, seq_ids: list[int]) -> Tensor:
        assert self.table is not None, f"nothing is known of what the drafts of sequences {seq_ids} were drawn from"
        return self.table


NO_PROPOSALS = Proposals({}, None)


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """The rows of a verification, sequence by sequence: behind its last token, then behind each of its drafts.

    seqs: [R] the row's sequence. ahead: [R] drafts before the row. drafts: [R] the draft that the row judges, -1 behind the last one.
    begins: [B] first row of each sequence.
    """

    seqs: list[Sequence]
    ahead: list[list[int]]
    drafts: list[int]
    begins: list[int]

    @staticmethod
    def of(seqs: list[Sequence], drafts: list[list[int]]) -> DraftedRows:
        rows = DraftedRows([], [], [], [])
        for seq, ids in zip(seqs, drafts, strict=True):
            rows.begins.append(len(rows.seqs))
            rows.seqs.extend([seq] * (len(ids) + 1))
            rows.ahead.extend(ids[:j] for j in range(len(ids) + 1))
            rows.drafts.extend(ids)
            rows.drafts.append(-1)
        return rows


def accepted_prefix(drafts: Ids[int], chosen: Ids[int]) -> int:
    """How many leading drafts equal the tokens chosen in their places."""
    for count, (draft, token) in enumerate(zip(drafts, chosen, strict=False)):
        if draft != token:
            return count
    return min(len(drafts), len(chosen))


def reject(target: Tensor, proposal: Tensor, drafts: list[int], accept: list[int], residual: list[int]) -> list[int]:
    """The tokens of rows with a draft each: the draft where it is kept, else a token of the residual, which is never the draft.

    target, proposal: [R, V] fp32, p and q up to a factor per row; `drafts` were drawn from the fixed-point form of q.
    accept, residual: [R] numbers of 53 bits, independent of each other and of the draw of the drafts.

    All arithmetic is on integers: p = wp / tp and q = wq / tq with weights of 31 bits, so comparisons and sums are exact.
    """
    if not drafts:
        return []
    wp, wq = fixed_point(target), fixed_point(proposal)
    tp, tq = wp.sum(-1), wq.sum(-1)
    place = torch.tensor(drafts, device=target.device)[:, None]
    own_p, own_q, sum_p, sum_q = (t.tolist() for t in (wp.gather(1, place)[:, 0], wq.gather(1, place)[:, 0], tp, tq))
    tokens = list(drafts)
    # u < (wp / tp) / (wq / tq), multiplied out: 53 + 62 bits, hence Python's integers.
    refused = [i for i, u in enumerate(accept) if u * own_q[i] * sum_p[i] >= (own_p[i] * sum_q[i]) << DRAW_BITS]
    if refused:
        index = torch.tensor(refused, device=target.device)
        weights = (wp[index] * tq[index][:, None] - wq[index] * tp[index][:, None]).clamp_(min=0)
        for i, token in zip(refused, _draw_wide(weights, [residual[i] for i in refused]), strict=True):
            tokens[i] = token
    return tokens


def _draw_wide(weights: Tensor, numbers: list[int]) -> list[int]:
    """Inverse CDF for weights whose sums have up to 63 bits. weights: [R, V] int64; every row has a positive one."""
    cdf = weights.cumsum(-1)
    totals = cdf[:, -1].tolist()
    # Where q(x) > p(x) for the refused draft, p exceeds q elsewhere by as much: the totals of both are equal.
    assert min(totals) > 0, f"a refused draft without a residual: {totals}"
    targets = [(number * total) >> DRAW_BITS for number, total in zip(numbers, totals, strict=True)]
    found: list[int] = torch.searchsorted(cdf, torch.tensor(targets, device=weights.device)[:, None], right=True)[:, 0].tolist()
    return found
