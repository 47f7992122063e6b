"""`row_attention_roles` with two warpgroups that multiply without each other: each computes all scores, and half of the output's channels.

That costs a half more products, but no scores, weights or sums pass through shared memory, and while one warpgroup is at its softmax the
tensor cores work for the other. The weights stay in registers, as the first operand of the second product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from engine.ops.triton.row_attention_hopper import D2, HEADS, R2, SHARED, N, barrier, index_of, join_parts, write_result
from engine.ops.triton.row_attention_roles import decode

WIDTH = gl.constexpr(128)  # pairs of channels of a warpgroup
_QUERY = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _OUTPUT, 2))
_CHUNK = gl.constexpr(16)  # heads that are rotated at a time
_DECODER_REGISTERS = gl.constexpr(120)


@gluon.jit
def _rotate(q_ptr, row, cos, sin, queries, FIRST: gl.constexpr):
    """Some heads of the query, rotated, to shared memory."""
    head = FIRST + gl.arange(0, _CHUNK, gl.SliceLayout(1, _QUERY))
    half = gl.arange(0, D2, gl.SliceLayout(0, _QUERY))
    both = gl.load(q_ptr + (row * HEADS + gl.expand_dims(head, 1)) * D2 + gl.expand_dims(half, 0))
    even, odd = (both << 16).to(gl.float32, bitcast=True), (both & -65536).to(gl.float32, bitcast=True)
    queries.index(0).slice(FIRST, _CHUNK, dim=0).store((even * cos - odd * sin).to(gl.bfloat16))
    queries.index(1).slice(FIRST, _CHUNK, dim=0).store((even * sin + odd * cos).to(gl.bfloat16))


@gluon.jit
def _absorb(qe, qo, keys, full, empty, index_ptr, columns, tile, step, scale, m, den, oe, oo, HALF: gl.constexpr):
    """One tile, for half of the channels. The buffer is given back when nothing is read from it any more."""
    buffer = step & 1
    mbarrier.wait(full.index(buffer), (step >> 1) & 1)
    ke, ko = keys.index(2 * buffer), keys.index(2 * buffer + 1)
    scores = warpgroup_mma_init(gl.zeros([HEADS, N], gl.float32, _SCORES))
    scores = warpgroup_mma(qe, ke.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(qo, ko.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    present = index_of(index_ptr, columns, tile, gl.SliceLayout(0, _SCORES)) >= 0
    scores = gl.where(gl.expand_dims(present, 0), scores * scale, float("-inf"))
    top = gl.maximum(m, gl.max(scores, 1))
    shrink = gl.exp2(m - top)
    p = gl.exp2(scores - gl.expand_dims(top, 1))
    den = den * shrink + gl.sum(p, 1)
    weights = gl.convert_layout(p.to(gl.bfloat16), _WEIGHTS)
    shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, _OUTPUT)), 1)
    oe, oo = oe * shrink, oo * shrink
    oe = warpgroup_mma(weights, ke.slice(HALF * WIDTH, WIDTH, dim=1), warpgroup_mma_init(oe), is_async=True)
    oo = warpgroup_mma(weights, ko.slice(HALF * WIDTH, WIDTH, dim=1), warpgroup_mma_init(oo), is_async=True)
    oe, oo, weights = warpgroup_mma_wait(0, deps=[oe, oo, weights])
    barrier()
    mbarrier.arrive(empty.index(buffer), count=1)
    return top, den, oe, oo


@gluon.jit
def _multiply(
    q_ptr, rot_ptr, window_index_ptr, entry_index_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, W, K, begin, end, window_tiles,
    row, split, splits, per, scale, queries, keys, rotated, full, empty, ALONE: gl.constexpr, JOINED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Rotates half of the query, takes the tiles in the decoders' order, and writes half of the channels.

    JOINED: all parts of the row, one after the other, each from nothing.
    """
    turned = gl.arange(0, D2, gl.SliceLayout(0, _QUERY)) - (D2 - R2)
    cos = gl.expand_dims(gl.load(rot_ptr + row * 2 * R2 + 2 * turned, mask=turned >= 0, other=1.0), 0)
    sin = gl.expand_dims(gl.load(rot_ptr + row * 2 * R2 + 2 * turned + 1, mask=turned >= 0, other=0.0), 0)
    for chunk in gl.static_range(HEADS // 2 // _CHUNK):
        _rotate(q_ptr, row, cos, sin, queries, HALF * (HEADS // 2) + chunk * _CHUNK)
    fence_async_shared()
    barrier()
    mbarrier.arrive(rotated, count=1)
    mbarrier.wait(rotated, 0)
    qe, qo = queries.index(0), queries.index(1)
    m = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, _SCORES))
    den = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
    oe = gl.zeros([HEADS, WIDTH], gl.float32, _OUTPUT)
    oo = gl.zeros([HEADS, WIDTH], gl.float32, _OUTPUT)
    for tile in range(begin, end):
        if JOINED:  # noqa: SIM102  the condition below is compiled only then
            if (tile > begin) & ((tile - begin) % per == 0):
                write_result(
                    oe, oo, m, den, rot_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, row, (tile - begin) // per - 1, splits, False,
                    _OUTPUT, HALF * WIDTH, WIDTH, True,
                )  # fmt: skip
                m = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, _SCORES))
                den = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
                oe = gl.zeros([HEADS, WIDTH], gl.float32, _OUTPUT)
                oo = gl.zeros([HEADS, WIDTH], gl.float32, _OUTPUT)
        near = tile < window_tiles
        index_ptr, columns = gl.where(near, window_index_ptr, entry_index_ptr), gl.where(near, W, K)
        number = tile - gl.where(near, 0, window_tiles)
        m, den, oe, oo = _absorb(qe, qo, keys, full, empty, index_ptr, columns, number, tile - begin, scale, m, den, oe, oo, HALF)
    if JOINED:
        oe, oo, m, den = join_parts(oe, oo, m, den, part_ptr, stat_ptr, row, splits, _OUTPUT, HALF * WIDTH, WIDTH)
    write_result(
        oe, oo, m, den, rot_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, row, split, splits, ALONE or JOINED, _OUTPUT, HALF * WIDTH, WIDTH,
    )  # fmt: skip


@gluon.jit
def attend(
    q_ptr, rot_ptr, window_ptr, window_index_ptr, entry_ptr, entry_index_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr,
    W, K, per, scale, ALONE: gl.constexpr, JOINED: gl.constexpr, DECODERS: gl.constexpr,
):  # fmt: skip
    """For four warps, beside four more that multiply and DECODERS that decode. All else is as in `row_attention_hopper.attend`."""
    row, split, splits = gl.program_id(0).to(gl.int64), gl.program_id(1), gl.num_programs(1)
    window_index_ptr += row * W
    entry_index_ptr += row * K
    window_tiles = gl.cdiv(W, N)
    tiles = window_tiles + gl.cdiv(K, N)
    begin, end = split * per, gl.minimum((split + 1) * per, tiles)
    if JOINED:
        end, splits = tiles, gl.cdiv(tiles, per)
    first_entry, last_entry = gl.maximum(begin, window_tiles) - window_tiles, end - window_tiles
    last_window = gl.minimum(end, window_tiles)
    queries = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, D2], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [4, N, D2], SHARED)
    rotated = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(rotated, count=2)
    for buffer in gl.static_range(2):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    q_ptr, rot_ptr, window_index_ptr, entry_index_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, W, K, begin, end,
                    window_tiles, row, split, splits, per, scale, queries, keys, rotated, full, empty, ALONE, JOINED, 0,
                ),
            ),
            (
                _multiply,
                (
                    q_ptr, rot_ptr, window_index_ptr, entry_index_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, W, K, begin, end,
                    window_tiles, row, split, splits, per, scale, queries, keys, rotated, full, empty, ALONE, JOINED, 1,
                ),
            ),
            (
                decode,
                (
                    window_ptr, window_index_ptr, entry_ptr, entry_index_ptr, W, K, begin, last_window, first_entry, last_entry, keys,
                    full, empty, DECODERS,
                ),
            ),
        ],
        [4, DECODERS],
        [192, _DECODER_REGISTERS],
    )  # fmt: skip
