"""Which compressed entries each query row attends to, from packed index keys in the blocks of its sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.cache_rows import unpack_index_rows
from engine.ops.candidate_blocks import best_of_blocks
from engine.ops.index_scores import index_scores
from engine.ops.registry import Op, check
from engine.ops.select_topk import select_topk
from engine.ops.tolerance import Tolerance

# Gathered keys and scores of one group of rows stay below this, whatever the batch and the context.
GROUP_BYTES = 64 * 2**20
# Columns of the smallest product of the tensor cores.
_LEAST_HEADS = 16


@dataclass(frozen=True, slots=True)
class PagedIndexKeys:
    """Packed index keys of one source layer.

    blocks: uint8 [N, block bytes]. offset: first byte of the layer in a block, where Di/2 bytes per entry come first and Di/32 scales per
    entry behind. per_block: entries. table: [B, P] integers, blocks of each sequence; entries without a block read block 0.
    """

    blocks: Tensor
    offset: int
    per_block: int
    table: Tensor

    def rows(self, seq: Tensor, entries: Tensor, width: int) -> Tensor:
        """Packed index rows [T, E, row bytes] of entries [T, E] int64 of the sequences [T]; negative entries read entry 0."""
        entries = entries.clamp(min=0)
        block = self.table.long()[seq[:, None], entries.div(self.per_block, rounding_mode="floor")]
        place, data, scales = entries % self.per_block, width // 2, width // 32
        middle = self.offset + self.per_block * data
        regions = [self.blocks[:, begin : begin + self.per_block * size].unflatten(1, (self.per_block, size)) for begin, size in
                   ((self.offset, data), (middle, scales))]  # fmt: skip
        return torch.cat([region[block, place] for region in regions], -1)


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """Query rows. q: [T, H, D] rotated and rounded, weights: [T, H], both bf16 or fp32. seq, count: [T] int64."""

    q: Tensor
    weights: Tensor
    seq: Tensor
    count: Tensor


def index_search(
    query: IndexQuery, keys: PagedIndexKeys, num_entries: int, topk: int, allowed: Tensor | None, block_size: int, num_kept: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Entries with the highest scores of each row, and the candidate blocks that later searches are restricted to.

    num_entries: most entries that any row sees. allowed: int32 [T, C] candidate blocks in ascending order with -1 behind them, or None for
    all. num_kept: blocks of `block_size` entries to keep, 0 for none. Ties go to the lower entry and block.
    Returns int32 [T, min(topk, num_entries)] and [T, min(num_kept, blocks)] or None, ascending with -1 behind.
    """
    check(query.q.ndim == 3 and query.weights.shape == query.q.shape[:2], "index_search", q=query.q, weights=query.weights)
    return INDEX_SEARCH(query, keys, num_entries, topk, allowed, block_size, num_kept)


def _reference(
    query: IndexQuery, keys: PagedIndexKeys, num_entries: int, topk: int, allowed: Tensor | None, block_size: int, num_kept: int
) -> tuple[Tensor, Tensor | None]:
    width, rows = query.q.shape[2], len(query.q)
    lanes = torch.arange(block_size, device=query.q.device)
    columns = num_entries if allowed is None else allowed.shape[1] * block_size
    step = max(1, GROUP_BYTES // (columns * width * 8))
    picks, blocks = [], []
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        if allowed is None:
            entries = torch.arange(num_entries, device=query.q.device).expand(part.stop - begin, -1)
        else:
            entries = (allowed[part].long()[:, :, None] * block_size + lanes).flatten(1)
        unpacked = unpack_index_rows(keys.rows(query.seq[part], entries.clamp(max=num_entries - 1), width), query.q.dtype)
        everything = torch.full((len(entries), 1), entries.shape[1], device=entries.device)
        scores = index_scores(query.q[part, None], query.weights[part, None], unpacked, everything)[:, 0]
        count = query.count[part]
        scores = scores.masked_fill_((entries < 0) | (entries >= count[:, None]), float("-inf"))
        if num_kept:
            blocks.append(ascending(select_topk(best_of_blocks(scores, count, block_size), num_kept)))
        best = select_topk(scores, topk)
        picks.append(ascending(entries.gather(1, best.clamp(min=0)).masked_fill(best < 0, -1)))
    if not rows:
        return query.seq.new_zeros(0, min(topk, num_entries), dtype=torch.int32), None
    found = torch.cat(picks)
    # A restricted search may have fewer columns than picks.
    found = torch.nn.functional.pad(found, (0, min(topk, num_entries) - found.shape[1]), value=-1)
    return found, torch.cat(blocks) if num_kept else None


def padded_heads(heads: int) -> int:
    """How many heads a product of the tensor cores computes: heads of zeros fill the rest."""
    return max(_LEAST_HEADS, 1 << (heads - 1).bit_length())


def ascending(index: Tensor) -> Tensor:
    """Rows of indices in ascending order, -1 behind. [T, K] -> int32 [T, K]."""
    big = torch.iinfo(torch.int32).max
    ordered = index.masked_fill(index < 0, big).sort(1).values
    return ordered.masked_fill_(ordered == big, -1).int()


def place_entries(index: Tensor, seq: Tensor, table: Tensor, per_block: int, stride: int, offset: int) -> Tensor:
    """From entry numbers to rows of a cache. index: [T, K] integers, -1 for absent. seq: [T] int64, table: [B, P] integers.

    per_block: entries of a block; stride, offset: rows from block to block, and in front of the first one. Returns int32 [T, K].
    """
    return PLACE_ENTRIES(index, seq, table, per_block, stride, offset)


def _place(index: Tensor, seq: Tensor, table: Tensor, per_block: int, stride: int, offset: int) -> Tensor:
    entry = index.clamp(min=0).long()
    block = entry.div(per_block, rounding_mode="floor")
    place = table.long()[seq[:, None], block] * stride + (entry - block * per_block + offset)
    return place.masked_fill_(index < 0, -1).int()


PLACE_ENTRIES = Op("place_entries", reference=_place, triton="engine.ops.triton.index_search:place_entries", tolerance=Tolerance())
INDEX_SEARCH = Op(
    "index_search",
    reference=_reference,
    triton="engine.ops.triton.index_search:launch",
    cuda="engine.ops.cuda.index_search:launch",
    tolerance=Tolerance(fp32=2e-6, bf16=8e-3),
)
