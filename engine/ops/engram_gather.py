"""Rows of an n-gram table, decoded on the way out. The table itself may be far larger than memory."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance
from engine.ops.weight_formats import decode_table_rows


def engram_gather(rows: Tensor, table: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Concatenate the selected rows of each position.

    rows: [T, K] int64. table: on any device, [N, D] e4m3 with scale [N, D/32] uint8, or float with scale None. Returns [T, K*D] of `dtype`.
    """
    check(rows.ndim == 2 and table.ndim == 2, "engram_gather", rows=rows, table=table)
    return ENGRAM_GATHER(rows, table, scale, dtype)


def _reference(rows: Tensor, table: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    # A table on the host is read there: only the few selected rows travel.
    flat = rows.flatten().to(table.device)
    if scale is None:
        return table.index_select(0, flat).to(rows.device, dtype).view(rows.shape[0], -1)
    # Indexing of float8 tensors is not supported everywhere; bytes always are.
    picked = table.view(torch.uint8).index_select(0, flat).view(torch.float8_e4m3fn)
    return decode_table_rows(picked.to(rows.device), scale.index_select(0, flat).to(rows.device), dtype).view(rows.shape[0], -1)


ENGRAM_GATHER = Op("engram_gather", reference=_reference, triton="engine.ops.triton.engram_gather:launch", tolerance=Tolerance())
