"""`row_attention_hopper` with roles: some warps only fetch and decode rows, eight only multiply them.

Decoded tiles of 64 keys pass from one role to the other through two buffers in shared memory; two barriers a buffer say that it is full or
may be filled again. So a tile is decoded while the one before it goes through scores, softmax and output, and not only beside the latter.
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

from engine.ops.triton.row_attention_hopper import (
    _QUERY,
    _SCORES,
    D2,
    HEADS,
    OUTPUT,
    R2,
    SHARED,
    N,
    _as_words,
    _store_entries,
    _store_window,
    barrier,
    entry_places,
    index_of,
    join_parts,
    load_entries,
    load_window,
    window_places,
    write_result,
)


@gluon.constexpr_function
def _registers(warps):
    """Of a thread that decodes; the threads that multiply get what is left of 65,536."""
    return 136 if warps == 4 else 80


@gluon.jit
def _hand_over(full):
    """What this role has stored is there for the tensor cores: every thread fences, then one says so."""
    fence_async_shared()
    barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def decode(
    window_ptr, window_index_ptr, entry_ptr, entry_index_ptr, W, K, begin, last_window, first_entry, last_entry, keys, full, empty,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Tiles begin..last_window of the window, then first_entry..last_entry, each into the buffer whose turn it is.

    Rows are asked for a tile ahead, their indices two: an address that has to be waited for would hold up everything behind it.
    """
    step = 0
    places, groups = window_places(window_index_ptr, gl.where(begin < last_window, W, 0), begin, WARPS)
    words, exponents = load_window(window_ptr, places, groups, WARPS)
    places, groups = window_places(window_index_ptr, gl.where(begin + 1 < last_window, W, 0), begin + 1, WARPS)
    for tile in range(begin, last_window):
        buffer = step & 1
        mbarrier.wait(empty.index(buffer), ((step >> 1) & 1) ^ 1)
        _store_window(words, exponents, _as_words(keys.index(2 * buffer)), _as_words(keys.index(2 * buffer + 1)), WARPS)
        _hand_over(full.index(buffer))
        words, exponents = load_window(window_ptr, places, groups, WARPS)
        places, groups = window_places(window_index_ptr, gl.where(tile + 2 < last_window, W, 0), tile + 2, WARPS)
        step += 1
    places, groups = entry_places(entry_index_ptr, gl.where(first_entry < last_entry, K, 0), first_entry, WARPS)
    pairs, scales = load_entries(entry_ptr, places, groups, WARPS)
    places, groups = entry_places(entry_index_ptr, gl.where(first_entry + 1 < last_entry, K, 0), first_entry + 1, WARPS)
    for tile in range(first_entry, last_entry):
        buffer = step & 1
        mbarrier.wait(empty.index(buffer), ((step >> 1) & 1) ^ 1)
        _store_entries(pairs, scales, _as_words(keys.index(2 * buffer)), _as_words(keys.index(2 * buffer + 1)), WARPS)
        _hand_over(full.index(buffer))
        pairs, scales = load_entries(entry_ptr, places, groups, WARPS)
        places, groups = entry_places(entry_index_ptr, gl.where(tile + 2 < last_entry, K, 0), tile + 2, WARPS)
        step += 1


@gluon.jit
def _absorb(qe, qo, keys, full, empty, weights, index_ptr, columns, tile, step, scale, m, den, oe, oo):
    """One tile, as in `row_attention_hopper`. The buffer before it is given back when its product has ended."""
    buffer = step & 1
    present = index_of(index_ptr, columns, tile, gl.SliceLayout(0, _SCORES)) >= 0
    mbarrier.wait(full.index(buffer), (step >> 1) & 1)
    ke, ko = keys.index(2 * buffer), keys.index(2 * buffer + 1)
    scores = warpgroup_mma_init(gl.zeros([HEADS, N], gl.float32, _SCORES))
    scores = warpgroup_mma(qe, ke.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(qo, ko.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    scores = gl.where(gl.expand_dims(present, 0), scores * scale, float("-inf"))
    top = gl.maximum(m, gl.max(scores, 1))
    shrink = gl.exp2(m - top)
    p = gl.exp2(scores - gl.expand_dims(top, 1))
    den = den * shrink + gl.sum(p, 1)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))
    oe = oe * gl.expand_dims(shrink, 1)
    oo = oo * gl.expand_dims(shrink, 1)
    # Both warpgroups need the weights of all keys.
    weights.store(p.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    oe = warpgroup_mma(weights, ke, warpgroup_mma_init(oe), is_async=True)
    oo = warpgroup_mma(weights, ko, warpgroup_mma_init(oo), is_async=True)
    oe, oo = warpgroup_mma_wait(0, deps=[oe, oo])
    barrier()
    mbarrier.arrive(empty.index(buffer), count=1)
    return top, den, oe, oo


@gluon.jit
def _multiply(
    q_ptr, rot_ptr, window_index_ptr, entry_index_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, W, K, begin, end, window_tiles,
    row, split, splits, per, scale, queries, keys, weights, full, empty, ALONE: gl.constexpr, JOINED: gl.constexpr,
):  # fmt: skip
    """Rotates the query, takes the tiles in the decoders' order, and writes the output or this part's share of it.

    JOINED: all parts of the row, one after the other, each from nothing.
    """
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _QUERY))
    half = gl.arange(0, D2, gl.SliceLayout(0, _QUERY))
    turned = half - (D2 - R2)
    cos = gl.expand_dims(gl.load(rot_ptr + row * 2 * R2 + 2 * turned, mask=turned >= 0, other=1.0), 0)
    sin = gl.expand_dims(gl.load(rot_ptr + row * 2 * R2 + 2 * turned + 1, mask=turned >= 0, other=0.0), 0)
    both = gl.load(q_ptr + (row * HEADS + gl.expand_dims(head, 1)) * D2 + gl.expand_dims(half, 0))
    even, odd = (both << 16).to(gl.float32, bitcast=True), (both & -65536).to(gl.float32, bitcast=True)
    queries.index(0).store((even * cos - odd * sin).to(gl.bfloat16))
    queries.index(1).store((even * sin + odd * cos).to(gl.bfloat16))
    fence_async_shared()
    barrier()
    qe, qo = queries.index(0), queries.index(1)

    m = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, _SCORES))
    den = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
    oe = gl.zeros([HEADS, D2], gl.float32, OUTPUT)
    oo = gl.zeros([HEADS, D2], gl.float32, OUTPUT)
    # One loop for both sources: addresses of operands are kept for one copy of its body.
    for tile in range(begin, end):
        if JOINED:  # noqa: SIM102  the condition below is compiled only then
            if (tile > begin) & ((tile - begin) % per == 0):
                part = (tile - begin) // per - 1
                write_result(oe, oo, m, den, rot_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, row, part, splits, False)
                m = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, _SCORES))
                den = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
                oe = gl.zeros([HEADS, D2], gl.float32, OUTPUT)
                oo = gl.zeros([HEADS, D2], gl.float32, OUTPUT)
        near = tile < window_tiles
        index_ptr, columns = gl.where(near, window_index_ptr, entry_index_ptr), gl.where(near, W, K)
        number = tile - gl.where(near, 0, window_tiles)
        m, den, oe, oo = _absorb(qe, qo, keys, full, empty, weights, index_ptr, columns, number, tile - begin, scale, m, den, oe, oo)
    if JOINED:
        oe, oo, m, den = join_parts(oe, oo, m, den, part_ptr, stat_ptr, row, splits)
    write_result(oe, oo, m, den, rot_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, row, split, splits, ALONE or JOINED)


@gluon.jit
def attend(
    q_ptr, rot_ptr, window_ptr, window_index_ptr, entry_ptr, entry_index_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr,
    W, K, per, scale, ALONE: gl.constexpr, JOINED: gl.constexpr, DECODERS: gl.constexpr,
):  # fmt: skip
    """DECODERS: warps that decode, four or eight, beside eight that multiply. JOINED: a program has all parts of its row and joins them.

    All else is as in `row_attention_hopper.attend`.
    """
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
    weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, N], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    q_ptr, rot_ptr, window_index_ptr, entry_index_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, W, K, begin, end,
                    window_tiles, row, split, splits, per, scale, queries, keys, weights, full, empty, ALONE, JOINED,
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
        [DECODERS],
        [_registers(DECODERS)],
    )  # fmt: skip
