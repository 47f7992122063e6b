"""Sizes of cache rows, and where a block keeps the rows of each source layer."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from engine.models.config import TextConfig
from engine.models.numerics import Numerics
from engine.ops.cache_rows import entry_row_bytes, index_row_bytes, window_row_bytes

# Kernels read packed rows in 16-byte pieces and copies move whole lines; the stride of packed blocks keeps both aligned.
_LINE_BYTES = 128


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Bytes of one row of each kind. index_data: the part of an index row in front of its scales. packed: formats of `cache_rows`."""

    window: int
    entry: int
    index: int
    index_data: int
    packed: bool

    @staticmethod
    def of(text: TextConfig, numerics: Numerics) -> RowSizes:
        width, index_width = text.head_dim, text.index_head_dim
        if numerics.packed_rows:
            sizes = (window_row_bytes(width), entry_row_bytes(width), index_row_bytes(index_width), index_width // 2)
            return RowSizes(*sizes, packed=True)
        size = numerics.dtype.itemsize
        return RowSizes(width * size, width * size, index_width * size, index_width * size, packed=False)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where a block keeps what: first the compressed entries of all source layers, then their index keys.

    kv_offset: source layer -> first entry row inside a block; kv_stride: entry rows from block to block. index_offset, index_stride: the
    same in index rows; in bytes when packed, where a layer's index data comes first and its scales behind. entries: source layer ->
    entries per block.
    """

    block_size: int
    block_bytes: int
    kv_stride: int
    index_stride: int
    kv_offset: dict[int, int]
    index_offset: dict[int, int]
    entries: dict[int, int]

    @staticmethod
    def of(text: TextConfig, block_size: int, sizes: RowSizes) -> BlockLayout:
        entries = {layer: block_size // text.ratio(layer) for layer in text.kv_source_layer_ids}
        kv_offset, rows = _running(entries, 0)
        if sizes.packed:
            index_unit, unit = 1, lcm(_LINE_BYTES, sizes.entry)
            index_offset, end = _running({layer: count * sizes.index for layer, count in entries.items()}, rows * sizes.entry)
        else:
            # Both views must tile the block exactly, so that a row number is block * stride + offset.
            index_unit, unit = sizes.index, lcm(sizes.entry, sizes.index)
            index_offset, end = _running(entries, -(-rows * sizes.entry // index_unit))
        block_bytes = max(unit, -(-end * index_unit // unit) * unit)
        return BlockLayout(block_size, block_bytes, block_bytes // sizes.entry, block_bytes // index_unit, kv_offset, index_offset, entries)


def _running(sizes: dict[int, int], first: int) -> tuple[dict[int, int], int]:
    offsets = {}
    for layer, size in sizes.items():
        offsets[layer] = first
        first += size
    return offsets, first
