"""Compressed KV entries and index keys of a source layer, written into the sequence's blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.loader import WeightSource
from engine.models.config import TextConfig
from engine.models.inputs import NewEntries
from engine.models.numerics import Linear, Numerics
from engine.ops.compress_entries import IndexKeys, PairSource, compress_entries
from engine.ops.pool_pairs import pool_pairs
from engine.ops.rms_norm import rms_norm
from engine.ops.rope import rotate_


@dataclass(frozen=True, slots=True)
class Compressor:
    """wkv: [D, C], or [2*D, C] fp32 with the gate's rows below for ratio 2. wk: [Di, D] index key projection."""

    wkv: Linear
    norm: Tensor
    wk: Linear
    k_norm: Tensor
    ratio: int
    layer: int
    eps: float
    numerics: Numerics

    @staticmethod
    def load(source: WeightSource, layer: int, text: TextConfig, numerics: Numerics) -> Compressor:
        prefix, ratio = f"layers.{layer}.attn", text.ratio(layer)
        wide = torch.float32 if ratio == 2 else numerics.dtype
        wkv = source.tensor(f"{prefix}.compressor.wkv.weight", wide)
        if ratio == 2:
            wkv = torch.cat((wkv, source.tensor(f"{prefix}.compressor.wgate.weight", wide)))
        return Compressor(
            wkv=Linear(wkv),
            norm=source.tensor(f"{prefix}.compressor.norm.weight", numerics.dtype),
            wk=Linear(source.tensor(f"{prefix}.indexer.wk.weight", numerics.dtype)),
            k_norm=source.tensor(f"{prefix}.indexer.k_norm.weight", numerics.dtype),
            ratio=ratio,
            layer=layer,
            eps=text.rms_norm_eps,
            numerics=numerics,
        )

    def __call__(self, x: Tensor, entries: NewEntries, cache: KVCache) -> None:
        """x: [T, C], the attention input of ALL rows of the step. Completes the step's entries and stores them."""
        self.store(self.project(x), entries, cache)

    def project(self, x: Tensor) -> Tensor:
        """What a row contributes to its entry: [T, D], or for ratio 2 value and gate [T, 2 * D] fp32."""
        return self.wkv(x.float()) if self.ratio == 2 else self.wkv(x)

    def store(self, projected: Tensor, entries: NewEntries, cache: KVCache) -> None:
        """projected: `project` of all rows of the step."""
        if self.numerics.packed_rows:
            self._store_packed(projected, entries, cache)
            return
        raw = self._pool(projected, entries, cache) if self.ratio == 2 else projected
        latent = rms_norm(raw, self.norm, self.eps)
        # The index key reads the latent before it is rotated in place.
        key = rotate_(rms_norm(self.wk(latent), self.k_norm, self.eps), entries.rot)
        entry = rotate_(latent, entries.rot)
        cache.store_entries(self.layer, entries.block, entries.place, entry, key)

    def _store_packed(self, projected: Tensor, entries: NewEntries, cache: KVCache) -> None:
        partial, source = cache.partials.get(self.layer), None
        if entries.pairs is not None:
            assert partial is not None
            source = PairSource(partial, entries.pairs.load, entries.pairs.first, entries.pairs.last)
        rows = cache.entry_rows(self.layer, entries.block, entries.place)
        keys = IndexKeys(self.wk.weight, self.k_norm, cache.index_places(self.layer, entries.block, entries.place))
        compress_entries(projected, source, self.norm, self.eps, entries.rot, cache.kv_rows, rows, keys)
        if entries.pairs is not None and partial is not None:
            # Only now: a long chunk overwrites the rows that its first entry reads.
            partial.index_copy_(0, entries.pairs.store_slots, projected.index_select(0, entries.pairs.store_rows))

    def _pool(self, both: Tensor, entries: NewEntries, cache: KVCache) -> Tensor:
        """Pool value and gate of both tokens of each entry, fp32 up to here; the first token may belong to an earlier step."""
        pairs = entries.pairs
        assert pairs is not None
        partial = cache.partials[self.layer]
        earlier = both if pairs.load is None else torch.cat((partial.index_select(0, pairs.load), both))
        pooled = pool_pairs(earlier.index_select(0, pairs.first), both.index_select(0, pairs.last))
        partial.index_copy_(0, pairs.store_slots, both.index_select(0, pairs.store_rows))
        return pooled.to(self.numerics.dtype)
