"""N-gram lookup tables whose rows are added to the streams in front of some layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.loader import WeightSource
from engine.models.config import TextConfig
from engine.models.engram_tables import column_offsets, hash_multipliers
from engine.models.numerics import Numerics
from engine.models.packed_layers import AnyLinear, load_linear
from engine.models.probe import Probe
from engine.ops.engram_gate import engram_gate
from engine.ops.engram_gather import engram_gather
from engine.ops.engram_hash import engram_hash


@dataclass(frozen=True, slots=True)
class Engram:
    """One layer's table and projection. table [N, D] e4m3 with scale [N, D/32] uint8, or float with scale None; it may be mapped."""

    table: Tensor
    scale: Tensor | None
    wkv: AnyLinear
    weight: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad_id: int
    eps: float
    dtype: torch.dtype

    @staticmethod
    def load(source: WeightSource, layer: int, text: TextConfig, numerics: Numerics, pad_id: int) -> Engram:
        """pad_id: compressed id of the raw pad token."""
        prefix = f"layers.{layer}.engram"
        table, scale = source.table(f"{prefix}.embed.weight")
        primes = text.engram_primes()[text.engram_layer_ids.index(layer)]
        shape = (text.engram_max_ngram_size - 1, text.engram_n_heads)
        query, key = (source.tensor(f"{prefix}.{part}_weight", torch.float32) for part in ("q", "k"))
        return Engram(
            table=table,
            scale=scale,
            wkv=load_linear(source, [f"{prefix}.wkv.weight"], numerics, numerics.quantize_inputs),
            dtype=numerics.dtype,
            weight=query * key,
            multipliers=torch.tensor(
                hash_multipliers(layer, text.engram_max_ngram_size, text.engram_compressed_vocab_size), device=query.device
            ),
            primes=torch.tensor(primes, device=query.device).view(shape),
            offsets=torch.tensor(column_offsets(primes), device=query.device).view(shape),
            pad_id=pad_id,
            eps=text.rms_norm_eps,
        )

    def __call__(self, h: Tensor, grams: Tensor, layer: int, probe: Probe | None = None) -> Tensor:
        """h: [T, n, C], grams: [T, G] compressed ids. Returns the changed streams."""
        rows = engram_hash(grams, self.multipliers, self.primes, self.offsets, self.pad_id)
        values = engram_gather(rows, self.table, self.scale, self.dtype)
        h = engram_gate(h, self.wkv(values), self.weight, self.eps)
        if probe is not None:
            probe.record("engram_ids", layer, rows)
            probe.record("engram_out", layer, h)
        return h
