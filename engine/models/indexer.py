"""Which compressed entries each query row attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.loader import WeightSource
from engine.models.config import TextConfig
from engine.models.inputs import Rows, StepInputs
from engine.models.numerics import Linear, Numerics
from engine.models.packed_layers import AnyLinear, load_linear
from engine.models.probe import Probe
from engine.ops.candidate_blocks import candidate_blocks
from engine.ops.compress_entries import index_queries
from engine.ops.index_scores import index_scores
from engine.ops.index_search import IndexQuery, PagedIndexKeys, ascending, index_search, place_entries
from engine.ops.rope import rotate_
from engine.ops.select_topk import select_topk
from engine.ops.sparse_attention import Selection

# Gathered keys plus per-head products of one group of rows stay below this.
_GROUP_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Picks:
    """Outcome of an index source for all rows. selection: rows of the cache's kv view. candidates: blocks, None for all; [T, blocks] bool,
    or int32 [T, C] ascending with -1 behind when rows are packed.
    """

    selection: Selection
    candidates: Tensor | None


@dataclass(frozen=True, slots=True)
class Indexer:
    """wq_b: [Hi*Di, q_lora_rank], weights_proj: [Hi, C]. Scores read the index keys of the KV owner of this layer."""

    wq_b: AnyLinear
    weights_proj: Linear
    layer: int
    text: TextConfig
    numerics: Numerics

    @staticmethod
    def load(source: WeightSource, layer: int, text: TextConfig, numerics: Numerics) -> Indexer:
        prefix = f"layers.{layer}.attn.indexer"
        return Indexer(
            wq_b=load_linear(source, [f"{prefix}.wq_b.weight"], numerics, numerics.quantize_inputs),
            weights_proj=Linear(source.tensor(f"{prefix}.weights_proj.weight", numerics.dtype)),
            layer=layer,
            text=text,
            numerics=numerics,
        )

    def __call__(
        self, x: Tensor, qr: Tensor, rows: Rows, inputs: StepInputs, cache: KVCache, earlier: Picks | None, probe: Probe | None = None
    ) -> Picks | None:
        """x: [T, C] attention input, qr: [T, q_lora_rank]. earlier: picks of the previous index source. None when no entry exists yet."""
        ratio = self.text.ratio(self.layer)
        num_entries = inputs.max_visible[ratio]
        if num_entries == 0:
            return None
        count = rows.visible[ratio]
        publishes = self.layer == self.text.candidate_source_layer_id
        limit = self.text.candidate_topk_blocks * self.text.candidate_block_size
        filtered = publishes and (num_entries > limit or probe is not None)
        allowed = earlier.candidates if earlier is not None and self.text.uses_candidates(self.layer) else None
        if num_entries <= self.text.index_topk and not filtered:
            entries = torch.arange(num_entries, device=x.device).expand(len(rows), -1)
            index, kept = entries.masked_fill(entries >= count[:, None], -1), None
        elif self.numerics.packed_rows:
            index, kept = self._search_packed(x, qr, rows, inputs, cache, allowed, filtered)
        else:
            index, kept = self._search(x, qr, rows, inputs, cache, allowed, filtered)
        if probe is not None:
            probe.record("index", self.layer, index)
            if kept is not None:
                probe.record("candidate_blocks", self.layer, self._as_mask(kept, num_entries))
        selection = self._locate(index, rows, inputs, cache, ratio)
        # Later sources of the same candidate source are restricted likewise, whatever lies between.
        return Picks(selection, kept if publishes else (earlier.candidates if earlier is not None else None))

    def _query(self, x: Tensor, qr: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Rotated and rounded queries [T, Hi, Di], and the weights of their heads [T, Hi]."""
        text = self.text
        q = self.wq_b(qr).unflatten(-1, (text.index_n_heads, text.index_head_dim))
        weights = self.weights_proj(x) * (text.index_head_dim**-0.5 * text.index_n_heads**-0.5)
        rot = rows.rotations.scaled
        return index_queries(q, rot) if self.numerics.quantize_kv else rotate_(q, rot), weights

    def _search_packed(
        self, x: Tensor, qr: Tensor, rows: Rows, inputs: StepInputs, cache: KVCache, allowed: Tensor | None, filtered: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same over packed index keys, without a look at the host. Candidate blocks are ascending lists [T, C] with -1 behind."""
        text, ratio, layout = self.text, self.text.ratio(self.layer), cache.layout
        owner = text.kv_owner(self.layer)
        keys = PagedIndexKeys(cache.blocks, layout.index_offset[owner], layout.entries[owner], inputs.block_table)
        query = IndexQuery(*self._query(x, qr, rows), rows.seq, rows.visible[ratio])
        num_kept = text.candidate_topk_blocks if filtered else 0
        return index_search(query, keys, inputs.max_visible[ratio], text.index_topk, allowed, text.candidate_block_size, num_kept)

    def _as_mask(self, kept: Tensor, num_entries: int) -> Tensor:
        """Candidate blocks as [T, blocks] bool."""
        if kept.dtype is torch.bool:
            return kept
        mask = kept.new_zeros(len(kept), -(-num_entries // self.text.candidate_block_size) + 1, dtype=torch.bool)
        return mask.scatter_(1, kept.long() + 1, True)[:, 1:]

    def _search(
        self, x: Tensor, qr: Tensor, rows: Rows, inputs: StepInputs, cache: KVCache, allowed: Tensor | None, filtered: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Score, filter and select, group by group. Returns entry numbers [T, K] (-1 absent) and candidate blocks [T, blocks] bool."""
        text, count = self.text, rows.visible[self.text.ratio(self.layer)]
        q, weights = self._query(x, qr, rows)
        num_entries = inputs.max_visible[text.ratio(self.layer)]
        size = text.candidate_block_size
        picked = torch.full((len(rows), min(text.index_topk, num_entries)), -1, dtype=torch.int64, device=x.device)
        kept = torch.zeros(len(rows), -(-num_entries // size), dtype=torch.bool, device=x.device) if filtered else None
        for first, last, pieces in self._groups(rows, num_entries):
            most = int(count[pieces[0][0] : pieces[-1][1]].max())
            if most == 0:
                continue
            keys = self._keys(first, last, most, inputs, cache)
            for begin, end in pieces:
                shape, visible = (last - first, (end - begin) // (last - first)), count[begin:end]
                part = keys[:, : int(visible.max())]
                if part.shape[1] == 0:
                    continue
                query, weight = q[begin:end].unflatten(0, shape), weights[begin:end].unflatten(0, shape)
                scores = index_scores(query, weight, part, visible.view(shape)).flatten(0, 1)
                if kept is not None:
                    blocks = candidate_blocks(scores, visible, text.candidate_topk_blocks, size)
                    kept[begin:end, : blocks.shape[1]] = blocks
                if allowed is not None:
                    mask = allowed[begin:end].repeat_interleave(size, 1)[:, : scores.shape[1]]
                    scores = scores.masked_fill_(~mask, float("-inf"))
                # In a fixed order, so that sums over picked entries do not depend on how they were found.
                best = ascending(select_topk(scores, text.index_topk))
                picked[begin:end, : best.shape[1]] = best
        return picked, kept

    def _groups(self, rows: Rows, num_entries: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """(first sequence, last, pieces of rows): sequences with equally many rows side by side, or one in pieces of bounded memory."""
        lens = [end - begin for begin, end in rows.bounds]
        if not any(lens):
            return []
        per_row = 4 * num_entries * (self.text.index_n_heads + 2)
        per_seq = 4 * num_entries * self.text.index_head_dim + lens[0] * per_row
        if len(set(lens)) == 1 and per_seq <= _GROUP_BYTES:
            step = _GROUP_BYTES // per_seq
            lasts = [(first, min(first + step, len(lens))) for first in range(0, len(lens), step)]
            return [(first, last, [(rows.bounds[first][0], rows.bounds[last - 1][1])]) for first, last in lasts]
        step = max(1, _GROUP_BYTES // per_row)
        return [
            (seq, seq + 1, [(part, min(part + step, end)) for part in range(begin, end, step)])
            for seq, (begin, end) in enumerate(rows.bounds)
            if end > begin
        ]

    def _keys(self, first: int, last: int, num_entries: int, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Index keys [B, N, Di] of entries 0..N-1 of some sequences; entries without a block read the dummy block."""
        owner = self.text.kv_owner(self.layer)
        return cache.index_keys(owner, inputs.block_table[first:last, : -(-num_entries // cache.layout.entries[owner])], num_entries)

    def _locate(self, index: Tensor, rows: Rows, inputs: StepInputs, cache: KVCache, ratio: int) -> Selection:
        """From entry numbers to rows of the cache's kv view."""
        offset = cache.layout.kv_offset[self.text.kv_owner(self.layer)]
        return Selection(place_entries(index, rows.seq, inputs.block_table, cache.block_size // ratio, cache.layout.kv_stride, offset))
