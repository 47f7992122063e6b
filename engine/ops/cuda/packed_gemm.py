"""Launches of the packed products: lists of experts, routed experts, and dense matrices of few rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from engine.ops.cuda.library import GemmArguments, Kernels, check_launch, kernels
from engine.ops.packed_weights import Format, PackedWeights

TILE_TOKENS = 8
MOST_TILES = 8  # of an item of the kernel for few tokens
MANY = 16  # tiles of an item of the kernel for many tokens


class Epilogue(IntEnum):
    """Numbers shared with the kernel."""

    BF16 = 0
    FP32 = 1
    SWIGLU = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """How a launch divides its work; which combinations exist, csrc/kernels/packed_gemm.cu says.

    tiles: of eight tokens per item; `MANY` (16) means the kernels for many tokens (packed_tiles.cu). slices: warps that share 16 rows, of
    many tokens the order of so many. residents: thread blocks per multiprocessor, 0 for all that fit. warpgroups: of many
    tokens, by packed_groups.cu.
    """

    tiles: int
    slices: int = 1
    residents: int = 0
    warpgroups: bool = False

    @property
    def many(self) -> bool:
        """Whether a kernel for many tokens runs, whose outputs are bf16."""
        return self.warpgroups or self.tiles == MANY

    def num_blocks(self, num_processors: int) -> int:
        fitting = 3 if self.tiles == 1 else 2 if self.tiles <= 4 else 1
        return num_processors * (self.residents or fitting)


@dataclass(frozen=True, slots=True)
class ExpertLists:
    """See csrc/kernels/expert_lists.cu. slots [num_choices], items [max_items, 4], count [1]: int32 on the device."""

    slots: Tensor
    items: Tensor
    count: Tensor
    item_rows: int


def tiles_of(rows: int) -> int:
    """Tiles of eight tokens that hold `rows` tokens, up to eight of them."""
    return next((tiles for tiles in (1, 2, 4) if rows <= TILE_TOKENS * tiles), MOST_TILES)


def fixed_shape(run: Kernels, rows: int, packed: PackedWeights, slices: int) -> Shape:
    """Of a dense product whose sums have one order for every number of rows.

    slices: wanted. Many rows are added in that order by warpgroups only, so elsewhere, and of fewer blocks of columns, there is one.
    """
    warpgroups = run.groups is not None
    slices = slices if warpgroups and slices <= packed.blocks else 1
    if rows <= TILE_TOKENS * MOST_TILES:
        return Shape(tiles_of(rows), slices)
    return Shape(MANY, slices, warpgroups=warpgroups)


def in_order_of_products(x: Tensor, format: Format, groups: int = 1, slices: int = 1) -> Tensor:
    """x [R, groups * blocks of columns] with every 64 columns in the order in which products by warpgroups take them.

    The columns of a token that a lane's packed weights belong to lie together (see `packed_weights.cuh`); for a product of 16 columns the
    lanes' pairs have to alternate. slices: into which the blocks of a group are dealt, one slice after the other.
    """
    blocks = x.shape[1] // format.block_columns // groups
    dealt = [block for slice in range(slices) for block in range(slice, blocks, slices)]
    x = x.unflatten(1, (groups, blocks, -1))[:, :, dealt].flatten(1) if slices > 1 else x
    if format is Format.FP4:  # [lane t, step, half, pair] -> [step, half, lane t, pair]
        return x.unflatten(1, (-1, 4, 4, 2, 2)).permute(0, 1, 3, 4, 2, 5).flatten(1)
    # [chunk, lane t, step of the chunk, half, pair] -> [chunk, step, half, lane t, pair]
    return x.unflatten(1, (-1, 2, 4, 2, 2, 2)).permute(0, 1, 2, 4, 5, 3, 6).flatten(1)


def _ordered(x: Tensor, format: Format) -> Tensor:
    """`in_order_of_products`, by one kernel on a GPU."""
    if not x.is_cuda:
        return in_order_of_products(x, format)
    from engine.ops.triton.product_order import in_order

    return in_order(x, format)


def machine(device: torch.device) -> tuple[Kernels, int]:
    """Kernels and current stream of a device."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return kernels(index), torch.cuda.current_stream(device).cuda_stream


def expert_lists(run: Kernels, stream: int, ids: Tensor, num_experts: int, tiles: int) -> ExpertLists:
    """ids: [T, K] int64, contiguous; negative ids have no expert. Never waits for the device."""
    num_choices, rows = ids.numel(), TILE_TOKENS * tiles
    limit = min(num_choices, num_experts) + num_choices // rows
    numbers = torch.empty(num_choices + 4 * limit + 1, dtype=torch.int32, device=ids.device)
    lists = ExpertLists(numbers[4 * limit + 1 :], numbers[: 4 * limit].view(-1, 4), numbers[4 * limit : 4 * limit + 1], rows)
    pointers = (lists.slots.data_ptr(), lists.items.data_ptr(), lists.count.data_ptr())
    check_launch(run.lists(ids.data_ptr(), num_choices, num_experts, rows, *pointers, stream), "expert_lists")
    return lists


def routed(
    run: Kernels,
    stream: int,
    x: Tensor,
    packed: PackedWeights,
    lists: ExpertLists | Tensor,
    out: Tensor,
    shape: Shape,
    epilogue: Epilogue,
    *,
    divisor: int = 1,
    weights: Tensor | None = None,
    limit: float = 0.0,
) -> None:
    """out[slot] = expert(x[slot // divisor]) for every slot of the lists. x: [R, padded columns] bf16. weights: one a slot, fp32.

    lists: or the expert of each slot, int64: then every slot is an item of its own, which for a token or two saves making lists.
    """
    x = _ordered(x, packed.format) if shape.warpgroups else x
    arguments = _arguments(packed, x, out, limit)
    if isinstance(lists, Tensor):
        arguments.groups, arguments.num_rows = lists.data_ptr(), lists.numel()
    else:
        arguments.items, arguments.num_items, arguments.slots = lists.items.data_ptr(), lists.count.data_ptr(), lists.slots.data_ptr()
        assert lists.item_rows == TILE_TOKENS * shape.tiles, f"items of {lists.item_rows} rows, {shape.tiles} tiles"
    arguments.weights = weights.data_ptr() if weights is not None else None
    arguments.x_divisor = divisor
    _launch(run, stream, arguments, packed.format, epilogue, shape, shape.num_blocks(run.num_processors))


def dense(
    run: Kernels, stream: int, x: Tensor, packed: PackedWeights, out: Tensor, shape: Shape, epilogue: Epilogue, *, limit: float = 0.0
) -> None:
    """out[t, g] = W_g x[t, g]. x: [T, groups * padded columns], out: [T, groups * rows (half of them for SWIGLU)], rows contiguous."""
    x = _ordered(x, packed.format) if shape.warpgroups else x
    arguments = _arguments(packed, x, out, limit)
    arguments.num_rows, arguments.num_groups, arguments.x_divisor = x.shape[0], packed.groups, 1
    arguments.x_group_stride, arguments.y_group_stride = packed.padded_columns, out.shape[1] // packed.groups
    items = -(-x.shape[0] // (TILE_TOKENS * shape.tiles)) * packed.groups
    units = items * -(-packed.tiles // (2 * _WARPS if shape.many else _WARPS // shape.slices))
    if units:
        _launch(run, stream, arguments, packed.format, epilogue, shape, min(units, shape.num_blocks(run.num_processors)))


def expert_sum(run: Kernels, stream: int, parts: Tensor, shared: Tensor | None, out: Tensor, ids: Tensor | None = None) -> None:
    """out[t] = sum of parts[t] over the choices + shared[t]. parts: [T, K, C] fp32 or bf16; shared, out: [T, C] bf16. ids: [T, K] int64,
    contiguous; choices below 0 are left out.
    """
    tokens, choices, width = parts.shape
    blocks = max(1, min(8 * run.num_processors, -(-tokens * width // 1024)))
    halves = int(parts.dtype == torch.bfloat16)
    optional = [tensor.data_ptr() if tensor is not None else None for tensor in (ids, shared)]
    status = run.sum(parts.data_ptr(), halves, *optional, out.data_ptr(), tokens, choices, width, blocks, stream)
    check_launch(status, "expert_sum")


_WARPS = 8


def padded(x: Tensor, packed: PackedWeights) -> Tensor:
    """x [T, groups * columns] with the columns of each group filled up with zeros to whole blocks. The released shapes need no copy."""
    missing = packed.padded_columns - packed.columns
    if not missing:
        return x
    return torch.nn.functional.pad(x.unflatten(1, (-1, packed.columns)), (0, missing)).flatten(1)


def _arguments(packed: PackedWeights, x: Tensor, out: Tensor, limit: float) -> GemmArguments:
    assert x.dtype == torch.bfloat16, f"x is {x.dtype}"
    assert x.shape[1] % packed.padded_columns == 0, f"{x.shape[1]} columns of x, blocks of {packed.format.block_columns}"
    assert x.stride(1) == out.stride(1) == 1, f"rows are not contiguous: x {x.stride()}, out {out.stride()}"
    return GemmArguments(
        codes=packed.codes.data_ptr(),
        scales=packed.scales.data_ptr(),
        x=x.data_ptr(),
        y=out.data_ptr(),
        x_stride=x.stride(0),
        y_stride=out.stride(0),
        tiles=packed.tiles,
        blocks=packed.blocks,
        rows=packed.rows,
        limit=limit,
    )


def _launch(run: Kernels, stream: int, arguments: GemmArguments, format: Format, epilogue: Epilogue, shape: Shape, num_blocks: int) -> None:
    if shape.warpgroups:
        assert run.groups is not None, f"{shape} on a machine without products of warpgroups"
        status = run.groups(ctypes.byref(arguments), format, epilogue, shape.slices, num_blocks, stream)
    elif shape.tiles == MANY:
        assert shape.slices == 1, f"{shape}: many tokens are divided among warpgroups only"
        status = run.tiles(ctypes.byref(arguments), format, epilogue, num_blocks, stream)
    else:
        status = run.gemm(ctypes.byref(arguments), format, epilogue, shape.tiles, shape.slices, num_blocks, stream)
    check_launch(status, f"packed_gemm {format.name} {epilogue.name} tiles={shape.tiles} slices={shape.slices}")
