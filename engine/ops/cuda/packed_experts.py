"""Experts from packed weights: lists, gate and up with SwiGLU, down, sum. Five or six launches, none of which the host waits for."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.cuda.library import Kernels
from engine.ops.cuda.packed_gemm import MANY, Epilogue, Shape, dense, expert_lists, expert_sum, machine, padded, routed
from engine.ops.packed_experts import PackedExperts
from engine.ops.q8 import q8

# From so many rows per expert on the tensor cores are the time, and items of 128 tokens pay.
_FEW_ROWS = 16


def launch(x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    """The op `packed_experts` on the current CUDA device."""
    run, stream = machine(x.device)
    return run_experts(run, stream, x, ids, weights, experts, limit, quantize)


def run_experts(
    run: Kernels, stream: int, x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool
) -> Tensor:
    """`launch` with the kernels given, which may be the emulated ones."""
    tokens, choices = ids.shape
    inner, width = experts.w2.columns, experts.w2.rows
    source = padded(q8(x) if quantize else x, experts.w13)
    up_shape, down_shape = shapes(tokens, choices, experts.w13.groups)
    lists = expert_lists(run, stream, ids.contiguous(), experts.w13.groups, up_shape.tiles)
    act = x.new_empty(tokens * choices, inner)
    routed(
        run, stream, source, experts.w13, lists, act, up_shape, Epilogue.SWIGLU, divisor=choices, weights=weights.contiguous(), limit=limit
    )
    # Many parts are kept as the bf16 numbers that the products of the reference give; of few the fp32 sums cost nothing.
    many = down_shape.tiles == MANY
    parts = x.new_empty(tokens * choices, width, dtype=torch.bfloat16 if many else torch.float32)
    routed(
        run,
        stream,
        padded(q8(act) if quantize else act, experts.w2),
        experts.w2,
        lists,
        parts,
        down_shape,
        Epilogue.BF16 if many else Epilogue.FP32,
    )
    shared = run_shared(run, stream, q8(x) if quantize else x, experts, limit, quantize)
    out = x.new_empty(tokens, width)
    expert_sum(run, stream, parts.view(tokens, choices, width), shared, out)
    return out


def run_shared(run: Kernels, stream: int, source: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    """The shared expert. source: [T, C] bf16; returns [T, C] bf16."""
    tokens = source.shape[0]
    act = source.new_empty(tokens, experts.shared_w2.columns)
    shape = Shape(tiles_of(tokens), 8) if tokens <= 64 else Shape(MANY)
    dense(run, stream, padded(source, experts.shared_w13), experts.shared_w13, act, shape, Epilogue.SWIGLU, limit=limit)
    shared = source.new_empty(tokens, experts.shared_w2.rows)
    act = padded(q8(act) if quantize else act, experts.shared_w2)
    dense(run, stream, act, experts.shared_w2, shared, shape, Epilogue.BF16)
    return shared


def tiles_of(rows: int) -> int:
    """Tiles of eight tokens that hold `rows` tokens, up to eight of them."""
    return next((tiles for tiles in (1, 2, 4) if rows <= 8 * tiles), 8)


def shapes(tokens: int, choices: int, num_experts: int) -> tuple[Shape, Shape]:
    """Division of gate-up and down. A function of the row count alone, so that a graph bucket always runs the same one."""
    mean = tokens * choices / num_experts
    if mean > _FEW_ROWS:
        return Shape(MANY), Shape(MANY)
    tiles = 1 if mean <= 2.5 else 2 if mean <= 8 else 4
    # A handful of experts has fewer tiles of rows than the machine has room for: two blocks everywhere finish before three here and there.
    residents = 2 if tokens * choices <= 12 else 0
    return Shape(tiles, 1, residents), Shape(tiles, 1, residents)
