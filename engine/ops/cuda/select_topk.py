"""Top-k by rounds over the digits of the scores, of which a cluster of thread blocks shares a row."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.cuda.device import has_clusters
from engine.ops.cuda.library import Kernels, SelectArguments, check_launch
from engine.ops.cuda.packed_gemm import machine

_MOST_ROOM = 16 * 1024  # scores in the shared memory of a block: three blocks fit a multiprocessor
_LEAST_PIECE = 2048  # scores that are worth a block
_LISTED_PIECE = 12 * 1024  # scores of a block from which on it pays to bring the best to one block


@dataclass(frozen=True, slots=True)
class Division:
    """How a launch divides a row; no division changes a result. threads: of a block, 256 or 512. blocks: of a row, 1, 2, 4 or 8."""

    threads: int
    blocks: int
    lists: bool = True  # the best come to one block when they are few

    @staticmethod
    def of(rows: int, columns: int, num_processors: int) -> Division:
        """As many blocks as keep the device busy with two each, unless they had nothing to do, or shared memory did not hold the row."""
        blocks = 8
        while (
            blocks > 1 and (rows * blocks > 2 * num_processors or columns < blocks * _LEAST_PIECE) and blocks // 2 * _MOST_ROOM >= columns
        ):
            blocks //= 2
        piece = columns // blocks
        return Division(512 if blocks > 1 else 256, blocks, piece >= _LISTED_PIECE)


def launch(scores: Tensor, k: int) -> Tensor:
    """The op `select_topk` on the current CUDA device: the same set, in ascending order. The Triton twin where there are no clusters, and
    for rows that one does not hold, of which it reads less."""
    if not has_clusters(scores.device) or scores.shape[1] > 8 * _MOST_ROOM:
        from engine.ops.triton import select_topk as portable

        return portable.launch(scores, k)
    return select_rows(*machine(scores.device), scores if scores.stride(1) == 1 else scores.contiguous(), k, dtype=torch.int64)


def select_rows(
    run: Kernels,
    stream: int,
    scores: Tensor,
    k: int,
    count: Tensor | None = None,
    dtype: torch.dtype = torch.int32,
    division: Division | None = None,
) -> Tensor:
    """int32 or int64 [T, min(k, N)]: indices of the k best of the first `count` [T] int64 scores of each row, ascending, -1 behind.

    scores: fp32 [T, N], rows contiguous; what lies behind `count` may hold anything.
    """
    rows, columns = scores.shape
    out = torch.empty(rows, min(k, columns), dtype=dtype, device=scores.device)
    if out.numel() == 0:
        return out
    division = division or Division.of(rows, columns, run.num_processors)
    arguments = SelectArguments(
        scores=scores.data_ptr(),
        count=None if count is None else count.data_ptr(),
        out=out.data_ptr() if dtype is torch.int32 else None,
        out64=out.data_ptr() if dtype is torch.int64 else None,
        stride=scores.stride(0),
        num_rows=rows,
        columns=columns,
        k=k,
        width=out.shape[1],
        lists=int(division.lists),
        room=min(_MOST_ROOM, -(-columns // (4 * division.blocks)) * 4),
    )
    check_launch(run.select(ctypes.byref(arguments), division.threads, division.blocks, stream), "select_topk")
    return out
