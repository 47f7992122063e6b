"""Top-k by bisection on the bits of the scores, whole chunks of a row in registers. Longer rows are reduced level by level.

Every level keeps the k best of each chunk in ascending order of their index, so that position in a chunk decides ties as the index does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.select_topk import SELECT_TOPK
from engine.ops.triton.fallback import warn_once

# Scores of a chunk: 16 in each of 512 threads.
CHUNK = 8192


@triton.jit
def _ordered(scores):
    """int32 whose order is that of the fp32 scores; -0 comes just before +0, which is made equal first."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _select(
    score_ptr, index_ptr, count_ptr, out_score_ptr, out_index_ptr, columns, stride, k, out_columns,
    CHUNK: tl.constexpr, K: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_COUNT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Chunk `program 1` of row `program 0`. Writes k scores and indices per chunk, -inf and -1 behind the last pick."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    at = chunk * CHUNK + lane
    known = at < columns
    if HAS_COUNT:
        known = known & (at < tl.load(count_ptr + row))
    scores = tl.load(score_ptr + row * stride + at, mask=known, other=float("-inf"))
    key = _ordered(scores)
    least = -2139095041  # the key of -inf: nothing there is picked
    valid = tl.sum((key > least).to(tl.int32), 0)
    threshold = least
    if valid > k:
        threshold = -2147483648
        for bit in tl.static_range(31, -1, -1):
            # Adding 2^31 to the smallest number wraps to 0, as it should.
            candidate = (threshold ^ -2147483648) if bit == 31 else (threshold | (1 << bit))
            enough = tl.sum((key >= candidate).to(tl.int32), 0) >= k
            threshold = tl.where(enough, candidate, threshold)
    above = (key > threshold).to(tl.int32)
    level = ((key == threshold) & (key > least)).to(tl.int32)
    need = k - tl.sum(above, 0)
    # Both counts in one scan: neither exceeds CHUNK.
    before = tl.cumsum(above + (level << 16), 0) - (above + (level << 16))
    level_before = before >> 16
    picked = (above > 0) | ((level > 0) & (level_before < need))
    place = (before & 0xFFFF) + tl.minimum(level_before, need)
    index = at
    if HAS_INDEX:
        index = tl.load(index_ptr + row * stride + at, mask=known, other=-1)
    out = (row * tl.num_programs(1) + chunk) * out_columns
    tl.store(out_index_ptr + out + place, index, mask=picked)
    rest = tl.arange(0, K)
    behind = (rest >= tl.minimum(valid, k)) & (rest < out_columns)
    tl.store(out_index_ptr + out + rest, tl.full((K,), -1, tl.int32), mask=behind)
    if not LAST:
        tl.store(out_score_ptr + out + place, scores, mask=picked)
        tl.store(out_score_ptr + out + rest, tl.full((K,), float("-inf"), tl.float32), mask=behind)


def select_rows(scores: Tensor, k: int, count: Tensor | None = None) -> Tensor:
    """int32 [T, min(k, N)]: indices of the k best of the first `count` [T] scores of each row, ascending, -1 behind.

    scores: fp32 [T, N], rows contiguous; what lies behind `count` may hold anything.
    """
    rows, columns = scores.shape
    out_columns = min(k, columns)
    index: Tensor | None = None
    if rows == 0 or columns == 0:
        return torch.full((rows, out_columns), -1, dtype=torch.int32, device=scores.device)
    while True:
        size = min(CHUNK, triton.next_power_of_2(columns))
        chunks = triton.cdiv(columns, size)
        last = chunks == 1
        width = out_columns if last else k
        picked = torch.empty(rows, chunks * width, dtype=torch.int32, device=scores.device)
        values = picked if last else torch.empty(rows, chunks * width, device=scores.device)
        _select[(rows, chunks)](
            scores, scores if index is None else index, scores if count is None else count, values, picked, columns, scores.stride(0), k,
            width, CHUNK=size, K=triton.next_power_of_2(width), HAS_INDEX=index is not None, HAS_COUNT=count is not None, LAST=last,
            num_warps=max(4, size // 512),
        )  # fmt: skip
        if last:
            return picked
        scores, index, columns, count = values, picked, chunks * width, None


def launch(scores: Tensor, k: int) -> Tensor:
    """The Triton twin of `select_topk`: the same set, in ascending order."""
    if 2 * k > CHUNK:
        warn_once("select_topk", f"{k} picks are more than half of {CHUNK}")
        return SELECT_TOPK.fallback(scores, k)
    return select_rows(scores if scores.stride(1) == 1 else scores.contiguous(), k).long()
