"""Index search by native code: scores from the tensor cores, top-k from clusters of blocks. The Triton twin puts them together."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.ops.cuda.device import has_clusters
from engine.ops.cuda.library import Kernels, ScoreArguments, check_launch
from engine.ops.cuda.packed_gemm import machine
from engine.ops.cuda.select_topk import select_rows
from engine.ops.index_search import IndexQuery, PagedIndexKeys, padded_heads

_TILE = 16  # entries of a warp's product
_ENTRIES = 64  # of one step of a thread block
_WORTHWHILE = 24 * _ENTRIES  # entries of a thread block that outweigh its beginning
_SHAPES = frozenset({(32, 128), (16, 128), (16, 64), (16, 32), (32, 32)})  # heads and width, as listed in csrc/kernels/index_scores.cu


@dataclass(frozen=True, slots=True)
class ScoreTuning:
    """How scores are computed; only `groups` may change last bits. What exists, csrc/kernels/index_scores.cu says.

    stages: tiles of keys under way in a warp. residents: thread blocks whose registers fit a multiprocessor. waves: as many thread blocks
    as fit the device, so many times: more of them even out rows of different lengths, but each begins by reading the query. 0: by size.
    groups: products by warpgroups of SM90, of 32 heads of width 128; None where they exist.
    """

    stages: int = 4
    residents: int = 4
    waves: int = 0
    groups: bool | None = None

    def programs(self, rows: int, columns: int, num_processors: int) -> int:
        """Thread blocks that share a row."""
        at_once = num_processors * self.residents
        waves = self.waves or max(1, min(8, rows * columns // (at_once * _WORTHWHILE)))
        return max(1, min(-(-columns // _ENTRIES), at_once * waves // max(1, rows)))


# Of csrc/kernels/index_scores_joint.cu: rows of a thread block, of which one fits a multiprocessor; entries of its step; steps that last as
# long as reading its queries.
_JOINT_ROWS, _JOINT_ENTRIES, _BEGINNING = 16, 3 * _ENTRIES, 8
_SHARING = 3  # rows of a sequence, on average, that share decoded keys from here on


def joint_programs(rows: int, columns: int, num_processors: int) -> int:
    """Thread blocks that share a block of rows: how many end first, when every one begins with reading queries."""
    blocks, steps = -(-rows // _JOINT_ROWS), -(-columns // _JOINT_ENTRIES)

    def time(programs: int) -> int:
        return -(-blocks * programs // num_processors) * (-(-steps // programs) + _BEGINNING)

    return min((max(1, min(steps, num_processors * waves // blocks)) for waves in range(1, 9)), key=time)


def launch(
    query: IndexQuery, keys: PagedIndexKeys, num_entries: int, topk: int, allowed: Tensor | None, block_size: int, num_kept: int = 0
) -> tuple[Tensor, Tensor | None]:
    """The op `index_search` on the current CUDA device. Shapes without native code run the Triton twin."""
    from engine.ops.triton import index_search as portable

    score, select = portable.scores_of, portable.select_rows
    if query.q.dtype is torch.bfloat16 and fits(query, keys, block_size):
        score = partial(scores_of, *machine(query.q.device))
    if has_clusters(query.q.device):
        select = partial(select_rows, *machine(query.q.device))
    return portable.search(score, select, query, keys, num_entries, topk, allowed, block_size, num_kept)


def fits(query: IndexQuery, keys: PagedIndexKeys, block_size: int) -> bool:
    """Whether there is native code for a problem: its shape is listed, rows are aligned, divisors are powers of two from 4 on."""
    shape = (padded_heads(query.q.shape[1]), query.q.shape[2])
    aligned = keys.blocks.data_ptr() % 16 == 0 and keys.blocks.stride(0) % 16 == 0 and keys.offset % 16 == 0
    powers = all(number >= 4 and number & (number - 1) == 0 for number in (keys.per_block, block_size))
    return shape in _SHAPES and aligned and powers and keys.table.dtype is torch.int64 and query.weights.dtype is torch.bfloat16


def scores_of(
    run: Kernels,
    stream: int,
    query: IndexQuery,
    keys: PagedIndexKeys,
    rows: slice,
    columns: int,
    allowed: Tensor | None,
    block_size: int,
    tuning: ScoreTuning = ScoreTuning(),
    joint: bool = True,
) -> Tensor:
    """fp32 [rows, columns] scores of some rows; without `allowed` what lies behind a row's count is left as it was.

    joint: rows of one sequence share decoded keys, where there are products by warpgroups. The bits are those of rows alone.
    """
    q, weights, seq, count = query.q[rows], query.weights[rows], query.seq[rows], query.count[rows]
    num_rows, heads, width = q.shape
    out = torch.empty(num_rows, columns, device=q.device)
    chosen = None if allowed is None else allowed[rows]
    groups = tuning.groups if tuning.groups is not None else run.groups is not None and (heads, width) == (32, 128)
    # The rows of a launch and the sequences of the table are known to the host; which rows are whose is not.
    shared = allowed is None and groups and keys.per_block >= _TILE and len(query.q) >= _SHARING * len(keys.table)
    sharing = joint and shared
    programs = joint_programs if sharing else tuning.programs
    arguments = ScoreArguments(
        q=q.data_ptr(),
        weights=weights.data_ptr(),
        seq=seq.data_ptr(),
        count=count.data_ptr(),
        allowed=None if chosen is None else chosen.data_ptr(),
        blocks=keys.blocks.data_ptr(),
        table=keys.table.data_ptr(),
        out=out.data_ptr(),
        block_bytes=keys.blocks.stride(0),
        offset=keys.offset,
        table_stride=keys.table.stride(0),
        out_stride=columns,
        num_rows=num_rows,
        num_heads=heads,
        width=width,
        num_allowed=0 if chosen is None else chosen.shape[1],
        log_per_block=keys.per_block.bit_length() - 1,
        log_size=block_size.bit_length() - 1,
        programs=programs(num_rows, columns, run.num_processors),
        groups=groups,
        stages=tuning.stages,
        residents=tuning.residents,
    )
    scores = run.joint_scores if sharing else run.scores
    check_launch(scores(ctypes.byref(arguments), stream), "index_search")
    return out
