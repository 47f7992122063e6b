"""Index search over packed keys: scores of a bounded group of rows, then top-k. Nothing of the size rows x context is kept.

Programs of a row share its entries by stride, so that the grid does not depend on how long the sequences are at present.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from engine.ops.candidate_blocks import best_of_blocks
from engine.ops.index_search import GROUP_BYTES, INDEX_SEARCH, IndexQuery, PagedIndexKeys, padded_heads
from engine.ops.triton.decode_formats import SHRINK, decode_e2m1, dot_bf16
from engine.ops.triton.fallback import warn_once
from engine.ops.triton.interpreter import INTERPRETED
from engine.ops.triton.select_topk import CHUNK, select_rows

# Programs that keep a device busy, however few the rows are.
_PROGRAMS = 16 if INTERPRETED else 2112


@triton.jit
def _score(
    q_ptr, weight_ptr, seq_ptr, count_ptr, allowed_ptr, block_ptr, table_ptr, out_ptr,
    block_bytes, offset, per_block, table_stride, num_allowed, out_stride,
    H: tl.constexpr, D2: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, RESTRICTED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scores of the entries of row `program 0`, or of its candidate blocks in their order; -inf where nothing is visible."""
    row = tl.program_id(0).to(tl.int64)
    seq, count = tl.load(seq_ptr + row).to(tl.int64), tl.load(count_ptr + row)
    head, half, lane = tl.arange(0, H), tl.arange(0, D2), tl.arange(0, N)
    pairs = tl.load(q_ptr + (row * H + head[None, :]) * D2 + half[:, None])
    qe = (pairs << 16).to(tl.float32, bitcast=True).to(tl.bfloat16)
    qo = (pairs & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)
    # Keys come out divided by a power of two: the factor is exact.
    weight = tl.load(weight_ptr + row * H + head).to(tl.float32) * SHRINK
    columns = num_allowed * SIZE if RESTRICTED else count
    for tile in range(tl.program_id(1), tl.cdiv(columns, N), tl.num_programs(1)):
        at = tile * N + lane
        if RESTRICTED:
            chosen = tl.load(allowed_ptr + row * num_allowed + at // SIZE, mask=at < columns, other=-1)
            entry = chosen * SIZE + at % SIZE
            seen = (chosen >= 0) & (entry < count)
        else:
            entry = at
            seen = at < count
        block = tl.load(table_ptr + seq * table_stride + entry // per_block, mask=seen, other=0).to(tl.int64)
        base = block * block_bytes + offset
        place = entry % per_block
        bytes_at = (base + place * D2)[:, None] + half[None, :]
        data = tl.load(block_ptr + bytes_at, mask=seen[:, None], other=0)
        group = tl.arange(0, D2 // 16)
        scales_at = (base + per_block * D2 + place * (D2 // 16))[:, None] + group[None, :]
        scales = tl.load(block_ptr + scales_at, mask=seen[:, None], other=0)
        ke, ko = decode_e2m1(data, scales, True, FAST)
        products = dot_bf16(ko, qo, dot_bf16(ke, qe, tl.zeros((N, H), tl.float32), FAST), FAST)
        scores = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
        tl.store(out_ptr + row * out_stride + at, tl.where(seen, scores, float("-inf")), mask=at < columns)


@triton.jit
def _entries_of(picked_ptr, allowed_ptr, out_ptr, num_picked, num_allowed, SIZE: tl.constexpr, K: tl.constexpr):
    """From columns of a restricted search to entries."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, K)
    picked = tl.load(picked_ptr + row * num_picked + lane, mask=lane < num_picked, other=-1)
    chosen = tl.load(allowed_ptr + row * num_allowed + picked // SIZE, mask=picked >= 0, other=-1)
    tl.store(out_ptr + row * num_picked + lane, tl.where(picked >= 0, chosen * SIZE + picked % SIZE, -1), mask=lane < num_picked)


@triton.jit
def _best_blocks(score_ptr, count_ptr, out_ptr, columns, num_blocks, SIZE: tl.constexpr, N: tl.constexpr):
    """Best of each SIZE scores of row `program 0` among the first `count`; infinite for the newest block."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr + row).to(tl.int32)
    block = tl.program_id(1) * N + tl.arange(0, N)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    seen = (at < count) & (at < columns)
    best = tl.max(tl.load(score_ptr + row * columns + at, mask=seen, other=float("-inf")), 1)
    best = tl.where(block == (count + SIZE - 1) // SIZE - 1, float("inf"), best)
    tl.store(out_ptr + row * num_blocks + block, best, mask=block < num_blocks)


@triton.jit
def _place(index_ptr, seq_ptr, table_ptr, out_ptr, columns, table_stride, per_block, stride, offset, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * N + tl.arange(0, N)
    entry = tl.load(index_ptr + row * columns + at, mask=at < columns, other=-1).to(tl.int32)
    seq = tl.load(seq_ptr + row).to(tl.int64)
    block = tl.load(table_ptr + seq * table_stride + entry // per_block, mask=entry >= 0, other=0).to(tl.int32)
    place = block * stride + offset + entry % per_block
    tl.store(out_ptr + row * columns + at, tl.where(entry >= 0, place, -1), mask=at < columns)


def place_entries(index: Tensor, seq: Tensor, table: Tensor, per_block: int, stride: int, offset: int) -> Tensor:
    """The Triton twin of `place_entries`."""
    rows, columns = index.shape
    out = torch.empty(rows, columns, dtype=torch.int32, device=index.device)
    if out.numel():
        _place[(rows, triton.cdiv(columns, 512))](
            index.contiguous(), seq, table, out, columns, table.stride(0), per_block, stride, offset, N=512, num_warps=4
        )
    return out


def scores_of(query: IndexQuery, keys: PagedIndexKeys, rows: slice, columns: int, allowed: Tensor | None, block_size: int) -> Tensor:
    """fp32 [rows, columns] scores of some rows; without `allowed` what lies behind a row's count is left as it was."""
    q = query.q[rows]
    count, heads, width = q.shape
    out = torch.empty(count, columns, device=q.device)
    tile = 128 if width >= 128 else 64
    programs = max(1, min(triton.cdiv(columns, tile), _PROGRAMS // count))
    chosen = query.seq if allowed is None else allowed[rows]
    _score[(count, programs)](
        q.view(torch.int32), query.weights[rows], query.seq[rows], query.count[rows], chosen, keys.blocks, keys.table, out,
        keys.blocks.shape[1], keys.offset, keys.per_block, keys.table.stride(0), 0 if allowed is None else chosen.shape[1], columns,
        H=heads, D2=width // 2, N=tile, SIZE=block_size, RESTRICTED=allowed is not None, FAST=not INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out


def best_blocks(scores: Tensor, count: Tensor, block_size: int) -> Tensor:
    """`best_of_blocks` of contiguous scores [T, N] of which those behind a row's count hold anything; reads each once."""
    rows, columns = scores.shape
    if block_size & (block_size - 1):
        visible = torch.arange(columns, device=scores.device) < count[:, None]
        return best_of_blocks(scores.masked_fill(~visible, float("-inf")), count, block_size)
    best = torch.empty(rows, triton.cdiv(columns, block_size), device=scores.device)
    if best.numel():
        some = max(1, 2048 // block_size)
        grid = rows, triton.cdiv(best.shape[1], some)
        _best_blocks[grid](scores, count, best, columns, best.shape[1], SIZE=block_size, N=some, num_warps=4)
    return best


Score = Callable[[IndexQuery, PagedIndexKeys, slice, int, Tensor | None, int], Tensor]
Select = Callable[[Tensor, int, Tensor | None], Tensor]


def launch(
    query: IndexQuery, keys: PagedIndexKeys, num_entries: int, topk: int, allowed: Tensor | None, block_size: int, num_kept: int = 0
) -> tuple[Tensor, Tensor | None]:
    """The Triton twin of `index_search`. fp32 queries run the reference, so do widths that the tensor cores do not fit."""
    return search(scores_of, select_rows, query, keys, num_entries, topk, allowed, block_size, num_kept)


def search(
    score: Score,
    select: Select,
    query: IndexQuery,
    keys: PagedIndexKeys,
    num_entries: int,
    topk: int,
    allowed: Tensor | None,
    block_size: int,
    num_kept: int,
) -> tuple[Tensor, Tensor | None]:
    """`launch` with other kernels. score: as `scores_of`. select: as `select_rows`."""
    rows, heads, width = query.q.shape
    if query.q.dtype is not torch.bfloat16 or rows == 0:
        return INDEX_SEARCH.fallback(query, keys, num_entries, topk, allowed, block_size, num_kept)
    if width & (width - 1) or width < 32 or 2 * max(topk, num_kept) > CHUNK:
        warn_once("index_search", f"{heads} heads of width {width} with {topk} of {num_entries} entries and {num_kept} blocks")
        return INDEX_SEARCH.fallback(query, keys, num_entries, topk, allowed, block_size, num_kept)
    allowed = None if allowed is None else allowed.contiguous()
    missing = padded_heads(heads) - heads
    if missing:  # heads of zeros with weight zero add exactly nothing
        query = IndexQuery(pad(query.q, (0, 0, 0, missing)), pad(query.weights, (0, missing)), query.seq, query.count)
    query = IndexQuery(query.q.contiguous(), query.weights.contiguous(), query.seq.contiguous(), query.count.contiguous())
    columns = num_entries if allowed is None else allowed.shape[1] * block_size
    step = max(1, GROUP_BYTES // (4 * columns))
    picks, blocks = [], []
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        scores = score(query, keys, part, columns, allowed, block_size)
        count = query.count[part]
        if num_kept:
            blocks.append(select(best_blocks(scores, count, block_size), num_kept, None))
        picked = select(scores, topk, count if allowed is None else None)
        picks.append(picked if allowed is None else _restricted(picked, allowed[part], block_size))
    found = torch.cat(picks) if len(picks) > 1 else picks[0]
    if found.shape[1] < min(topk, num_entries):
        found = pad(found, (0, min(topk, num_entries) - found.shape[1]), value=-1)
    return found, torch.cat(blocks) if num_kept else None


def _restricted(picked: Tensor, allowed: Tensor, block_size: int) -> Tensor:
    out = torch.empty_like(picked)
    columns = picked.shape[1]
    _entries_of[(len(picked),)](
        picked, allowed, out, columns, allowed.shape[1], SIZE=block_size, K=triton.next_power_of_2(columns), num_warps=4
    )
    return out
