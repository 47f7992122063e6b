"""Rows of an n-gram table, decoded on the way. The table may lie in pinned host memory: the threads then read it over the bus."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.engram_gather import ENGRAM_GATHER
from engine.ops.triton.fallback import warn_once

_GROUP = 32  # columns that share a scale


@triton.jit
def gather_rows(
    rows, table, scale, out, num_rows, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[r] = table[rows[r]] times its scales. table: [N, WIDTH] e4m3 bytes, scale: [N, WIDTH / GROUP] E8M0. WIDTH a power of two."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = r < num_rows
    row = tl.load(rows + r, mask=alive, other=0)
    cols = tl.arange(0, WIDTH)
    groups = tl.arange(0, WIDTH // GROUP)
    mask = alive[:, None] & (cols >= 0)[None, :]
    code = tl.load(table + row[:, None] * WIDTH + cols[None, :], mask=mask, other=0).to(tl.int32)
    field = tl.load(scale + row[:, None] * (WIDTH // GROUP) + groups[None, :], mask=alive[:, None] & (groups >= 0)[None, :], other=127)
    # Sign and magnitude where fp32 has them, then the difference of the exponents' biases. Byte 0 of E8M0 is 2^-127, a subnormal number.
    field = field.to(tl.int32)
    factor = tl.where(field == 0, 0x400000, field << 23).to(tl.float32, bitcast=True)
    value = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    value = tl.reshape(value, [ROWS, WIDTH // GROUP, GROUP]) * factor[:, :, None]
    value = tl.reshape(value, [ROWS, WIDTH])
    tl.store(out + r.to(tl.int64)[:, None] * WIDTH + cols[None, :], value.to(out.dtype.element_ty), mask=mask)


def launch(rows: Tensor, table: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The op `engram_gather`. Tables that a kernel cannot read (not quantised, or in pageable host memory) go to the reference, aloud."""
    width = table.shape[1]
    reason = _unfit(rows, table, scale, width)
    if scale is None or reason:
        warn_once("engram_gather", reason)
        values: Tensor = ENGRAM_GATHER.fallback(rows, table, scale, dtype)
        return values
    out = torch.empty(rows.shape[0], rows.shape[1] * width, dtype=dtype, device=rows.device)
    flat = rows.contiguous()
    if flat.numel():
        tile = max(1, min(8, 2048 // width))
        grid = (triton.cdiv(flat.numel(), tile),)
        gather_rows[grid](flat, table.view(torch.uint8), scale, out, flat.numel(), width, _GROUP, tile, num_warps=4)
    return out


def _unfit(rows: Tensor, table: Tensor, scale: Tensor | None, width: int) -> str:
    """Why the kernel cannot read this table, "" when it can."""
    if scale is None:
        return f"the table is {table.dtype}, the kernel reads e4m3 rows with scales"
    if width % _GROUP or width & (width - 1):
        return f"rows of {width} columns are no power of two"
    if rows.device.type == "cuda" and not all(part.is_cuda or part.is_pinned() for part in (table, scale)):
        return "the table is in pageable host memory, which the GPU cannot read"
    return ""
