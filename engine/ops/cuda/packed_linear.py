"""Dense products of few rows from packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.cuda.library import Kernels
from engine.ops.cuda.packed_gemm import MANY, MOST_TILES, TILE_TOKENS, Epilogue, Shape, dense, fixed_shape, machine, padded, tiles_of
from engine.ops.packed_linear import OrderedWeights
from engine.ops.packed_weights import Format, PackedWeights

# Up to so many rows packed weights are quicker than ordered ones.
_FEW_ROWS = 32


def launch(x: Tensor, weights: PackedWeights, ordered: OrderedWeights | None = None) -> Tensor:
    """The op `packed_linear` on the current CUDA device."""
    return run_linear(*machine(x.device), x, weights)


def launch_invariant(x: Tensor, weights: PackedWeights, ordered: OrderedWeights | None = None) -> Tensor:
    """`launch` with one order of every sum, whose bits both kinds of weights give."""
    if ordered is None or len(x) <= _FEW_ROWS:
        return run_linear(*machine(x.device), x, weights, fixed=True)
    from engine.ops.triton.ordered_linear import division, ordered_linear
    from engine.ops.triton.product_order import in_order

    some = in_order(padded(x, weights), weights.format, weights.groups, ordered.slices)
    return ordered_linear(some, ordered.values, ordered.slices, weights.format.block_columns, division(len(x), ordered.slices))


def order(weights: PackedWeights, values: Tensor) -> OrderedWeights | None:
    """The op's `order_weights`: for machines with products by warpgroups, whose bits are those of products by warps."""
    run, _ = machine(values.device)
    if run.groups is None or weights.format is not Format.FP8:
        return None
    from engine.ops.triton.product_order import in_order

    slices = fixed_shape(run, 1, weights, slices_of(weights, run.num_processors)).slices
    whole = torch.nn.functional.pad(values, (0, weights.padded_columns - weights.columns))
    return OrderedWeights(in_order(whole.flatten(0, 1), weights.format, 1, slices).view_as(whole), slices)


def run_linear(run: Kernels, stream: int, x: Tensor, weights: PackedWeights, fixed: bool = False) -> Tensor:
    """`launch` with the kernels given, which may be the emulated ones. fixed: sums have one order, see `fixed_shape`."""
    out = x.new_empty(x.shape[0], weights.groups * weights.rows)
    slices = slices_of(weights, run.num_processors)
    divided = fixed_shape(run, x.shape[0], weights, slices) if fixed else shape(x.shape[0], slices)
    dense(run, stream, padded(x, weights), weights, out, divided, Epilogue.BF16)
    return out


def shape(num_rows: int, slices: int) -> Shape:
    return Shape(MANY) if num_rows > TILE_TOKENS * MOST_TILES else Shape(tiles_of(num_rows), slices)


def slices_of(weights: PackedWeights, num_processors: int) -> int:
    """As many warps per tile of rows as the machine has room for: 16 warps a multiprocessor hide the latency of memory."""
    warps, room = weights.groups * weights.tiles, 16 * num_processors
    return next((slices for slices in (8, 4) if slices * warps <= 1.5 * room), 1)
