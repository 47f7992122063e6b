"""From a compressor's products to packed cache rows and index keys: pool, normalise, project, rotate, pack and write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.cache_rows import PACK_ENTRY_ROWS, PACK_INDEX_ROWS, entry_row_bytes
from engine.ops.dense_linear import DENSE_LINEAR
from engine.ops.pool_pairs import POOL_PAIRS
from engine.ops.q4_index import Q4_INDEX
from engine.ops.registry import Op, check
from engine.ops.rms_norm import RMS_NORM
from engine.ops.rope import ROPE
from engine.ops.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class PairSource:
    """Where the two tokens of each entry are. partial: fp32 [P, 2*D] rows of earlier steps; load: [L] int64 of them stand in front of the
    step's rows, None for none. first: [E] int64 rows of that whole, last: [E] int64 rows of the step.
    """

    partial: Tensor
    load: Tensor | None
    first: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class IndexPlaces:
    """Where index keys go: in each block from byte `offset` on, data of `per_block` entries and then their scales.

    block, place: [E] int64.
    """

    blocks: Tensor
    offset: int
    per_block: int
    block: Tensor
    place: Tensor


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """What an entry's index key is made with, and where it goes. weight: [Di, D], norm: [Di], both of the entries' dtype."""

    weight: Tensor
    norm: Tensor
    places: IndexPlaces


def compress_entries(
    projected: Tensor, pairs: PairSource | None, norm: Tensor, eps: float, rot: Tensor, kv_rows: Tensor, rows: Tensor, keys: IndexKeys
) -> None:
    """Complete entries and write them and their index keys to a cache.

    projected: [T, D] of norm's dtype, one entry per row, or with `pairs` fp32 [T, 2*D], values then gates. norm: [D] bf16 or fp32.
    rot: [E, R/2] complex64, of entries and keys alike. kv_rows: uint8 [N, D/2 + D/16], of which `rows` [E] int64 are written; a row named
    twice holds one of them. A key is the product of its weight with the entry before rotation and rounding, normalised and rotated.
    """
    width = len(norm)
    check(projected.shape[1] == width * (1 if pairs is None else 2), "compress_entries", projected=projected, norm=norm)
    check(kv_rows.shape[1] == entry_row_bytes(width) and len(rot) == len(rows), "compress_entries", kv_rows=kv_rows, rot=rot, rows=rows)
    check(keys.weight.shape == (len(keys.norm), width), "compress_entries", weight=keys.weight, key_norm=keys.norm, norm=norm)
    COMPRESS_ENTRIES(projected, pairs, norm, eps, rot, kv_rows, rows, keys)


def _compress(
    projected: Tensor, pairs: PairSource | None, norm: Tensor, eps: float, rot: Tensor, kv_rows: Tensor, rows: Tensor, keys: IndexKeys
) -> None:
    raw = projected
    if pairs is not None:
        earlier = projected if pairs.load is None else torch.cat((pairs.partial.index_select(0, pairs.load), projected))
        raw = POOL_PAIRS(earlier.index_select(0, pairs.first), projected.index_select(0, pairs.last)).to(norm.dtype)
    latent = RMS_NORM(raw, norm, eps)
    key = RMS_NORM(DENSE_LINEAR(latent, keys.weight, None, False), keys.norm, eps)
    kv_rows.index_copy_(0, rows, PACK_ENTRY_ROWS(ROPE(latent, rot)))
    _store(PACK_INDEX_ROWS(ROPE(key, rot)), keys.places)


def _store(packed: Tensor, places: IndexPlaces) -> None:
    """Index rows: data and scales lie apart in a block."""
    count, data = places.per_block, packed.shape[1] * 16 // 17
    middle = places.offset + count * data
    for begin, part in ((places.offset, packed[:, :data]), (middle, packed[:, data:])):
        region = places.blocks[:, begin : begin + count * part.shape[1]].unflatten(1, (count, -1))
        region[places.block, places.place] = part


def index_queries(q: Tensor, rot: Tensor) -> Tensor:
    """Rotate and round queries of the indexer. q: [T, H, D] bf16 or fp32, may be overwritten; rot: [T, R/2] complex64."""
    rounded: Tensor = INDEX_QUERIES(q, rot)
    return rounded


def _queries(q: Tensor, rot: Tensor) -> Tensor:
    rounded: Tensor = Q4_INDEX(ROPE(q, rot))
    return rounded


_KERNELS = "engine.ops.triton.compress_entries"
COMPRESS_ENTRIES = Op("compress_entries", reference=_compress, triton=f"{_KERNELS}:compress", tolerance=Tolerance(fp32=2e-6, bf16=1.6e-2))
INDEX_QUERIES = Op("index_queries", reference=_queries, triton=f"{_KERNELS}:queries", tolerance=Tolerance(fp32=2e-6, bf16=8e-3))
