"""Experts from packed weights: lists, gate and up with SwiGLU, down, sum. Five or six launches, none of which the host waits for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from engine.ops.cuda.library import Kernels
from engine.ops.cuda.packed_gemm import (
    MANY,
    MOST_TILES,
    TILE_TOKENS,
    Epilogue,
    Shape,
    dense,
    expert_lists,
    expert_sum,
    fixed_shape,
    machine,
    padded,
    routed,
    tiles_of,
)
from engine.ops.packed_experts import PackedExperts
from engine.ops.packed_weights import PackedWeights
from engine.ops.q8 import q8

# Up to so many tokens every choice is an item of its own: hardly two of them share an expert.
_NO_LISTS = 2
# From so many rows per expert on the tensor cores are the time, and items of 128 tokens pay.
_FEW_ROWS = 16
# Warps that share a tile of the shared expert's rows.
_SHARED_SLICES = 8
# Whether many tokens go to the products of warpgroups.
WARPGROUPS = True


def launch_invariant(x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    """`launch` with one order of every sum and one rounding of its parts."""
    return launch(x, ids, weights, experts, limit, quantize, fixed=True)


def launch(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    limit: float,
    quantize: bool,
    fixed: bool = False,
    warpgroups: bool = WARPGROUPS,
) -> Tensor:
    """The op `packed_experts` on the current CUDA device. In a graph the shared expert runs beside the routed ones.

    warpgroups: many tokens by products of warpgroups, where the device has them.
    """
    run, stream = machine(x.device)
    if not torch.cuda.is_current_stream_capturing():
        return run_experts(run, stream, x, ids, weights, experts, limit, quantize, fixed, warpgroups)
    source = q8(x) if quantize else x
    buffers = shared_buffers(source, experts)  # of this stream's memory: the side stream's work ends before this stream goes on
    here, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        run_shared(run, side.cuda_stream, source, experts, limit, quantize, *buffers, fixed=fixed, warpgroups=warpgroups)
    parts = run_routed(run, stream, source, ids, weights, experts, limit, quantize, fixed=fixed, warpgroups=warpgroups)
    here.wait_stream(side)
    return _sum(run, stream, parts, buffers[1])


def run_experts(
    run: Kernels,
    stream: int,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    limit: float,
    quantize: bool,
    fixed: bool = False,
    warpgroups: bool = WARPGROUPS,
) -> Tensor:
    """`launch` on one stream, with the kernels given, which may be the emulated ones."""
    source = q8(x) if quantize else x
    buffers = shared_buffers(source, experts)
    run_shared(run, stream, source, experts, limit, quantize, *buffers, fixed=fixed, warpgroups=warpgroups)
    parts = run_routed(run, stream, source, ids, weights, experts, limit, quantize, fixed=fixed, warpgroups=warpgroups)
    return _sum(run, stream, parts, buffers[1])


def run_routed(
    run: Kernels,
    stream: int,
    source: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    limit: float,
    quantize: bool,
    ranks: int = 1,
    fixed: bool = False,
    warpgroups: bool = WARPGROUPS,
    partial: bool = False,
) -> Tensor:
    """The chosen experts' outputs [T, K, C]: fp32, or of many tokens the bf16 numbers that the products of the reference give.

    ranks: among which the choices are spread. partial: ids may be negative, and what stands there is undefined. fixed: bf16 of few
    tokens too, so that a token's do not depend on how many others there are; the sums of both kernels are the same.
    """
    (tokens, choices), w13, w2 = ids.shape, experts.w13, experts.w2
    ids, weights = ids.contiguous(), weights.contiguous()
    shape = by_warpgroups(division(tokens, choices, w13.groups * ranks), run, warpgroups)
    lists = ids if tokens <= _NO_LISTS and not partial else expert_lists(run, stream, ids, w13.groups, shape.tiles)
    act = source.new_empty(tokens * choices, w2.columns)
    routed(run, stream, padded(source, w13), w13, lists, act, shape, Epilogue.SWIGLU, divisor=choices, weights=weights, limit=limit)
    act = padded(q8(act) if quantize else act, w2)
    dtype, epilogue = (torch.bfloat16, Epilogue.BF16) if fixed or shape.many else (torch.float32, Epilogue.FP32)
    parts = source.new_empty(tokens * choices, w2.rows, dtype=dtype)
    routed(run, stream, act, w2, lists, parts, shape, epilogue)
    return parts.view(tokens, choices, w2.rows)


def shared_buffers(source: Tensor, experts: PackedExperts) -> tuple[Tensor, Tensor]:
    """Hidden activations [T, I] and output [T, C] of the shared expert."""
    tokens = source.shape[0]
    return source.new_empty(tokens, experts.shared_w2.columns), source.new_empty(tokens, experts.shared_w2.rows)


def run_shared(
    run: Kernels,
    stream: int,
    source: Tensor,
    experts: PackedExperts,
    limit: float,
    quantize: bool,
    act: Tensor,
    out: Tensor,
    fixed: bool = False,
    warpgroups: bool = WARPGROUPS,
) -> None:
    """The shared expert. source: [T, C] bf16; act, out: see `shared_buffers`. fixed: sums have one order, see `fixed_shape`."""

    def shape(packed: PackedWeights) -> Shape:
        if fixed:
            return fixed_shape(run, source.shape[0], packed, _SHARED_SLICES)
        few = source.shape[0] <= TILE_TOKENS * MOST_TILES
        return Shape(tiles_of(source.shape[0]), _SHARED_SLICES) if few else by_warpgroups(Shape(MANY), run, warpgroups)

    w13, w2 = experts.shared_w13, experts.shared_w2
    dense(run, stream, padded(source, w13), w13, act, shape(w13), Epilogue.SWIGLU, limit=limit)
    act = padded(q8(act) if quantize else act, w2)
    dense(run, stream, act, w2, out, shape(w2), Epilogue.BF16)


def _sum(run: Kernels, stream: int, parts: Tensor, shared: Tensor) -> Tensor:
    out = torch.empty_like(shared)
    expert_sum(run, stream, parts, shared, out)
    return out


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def by_warpgroups(shape: Shape, run: Kernels, wanted: bool) -> Shape:
    """The same division with products of warpgroups, where it has many tokens and the machine such products."""
    return replace(shape, warpgroups=True) if wanted and shape.tiles == MANY and run.groups is not None else shape


def division(tokens: int, choices: int, num_experts: int) -> Shape:
    """Of both products. A function of the row count alone, so that a graph bucket always runs the same one."""
    mean = tokens * choices / num_experts
    if mean > _FEW_ROWS:
        return Shape(MANY)
    tiles = 1 if mean <= 2.5 or tokens <= _NO_LISTS else 2 if mean <= 8 else 4
    # A handful of experts has fewer tiles of rows than the machine has room for: two blocks everywhere finish before three here and there.
    return Shape(tiles, residents=2 if tokens <= _NO_LISTS else 0)
