"""Attention over packed rows for SM90 with layouts of our choice: the same sums as `row_attention`, heads 64, width 512.

A tile of 64 keys is decoded to bf16 in shared memory while the tensor cores still multiply the tile before; its raw bytes were asked for
one tile earlier. Two warpgroups share the scores by keys and the output by channels, so that nothing is computed twice and the output
(64 x 512 fp32) fits into 128 registers a thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from engine.ops.triton.decode_formats import SHRINK, e2m1_asm, e2m1_bytes, e4m3_asm

# Four e4m3 bytes o1 e1 o0 e0 of a word -> the bf16 pair (e1 e0) or (o1 o0).
_E4M3_EVEN = gl.constexpr("{\n.reg .b32 s, m;\n" + e4m3_asm("$0", "$1", "$2", odd=False) + "}")
_E4M3_ODD = gl.constexpr("{\n.reg .b32 m;\n" + e4m3_asm("$0", "$1", "$2", odd=True) + "}")


def _nibbles(odd: bool) -> str:
    """Four bytes of E2M1 pairs -> two bf16 pairs of their low or high nibbles."""
    low, high = (e2m1_bytes("$2", upper=upper) + e2m1_asm(pair, "$3", odd=odd) for upper, pair in ((False, "$0"), (True, "$1")))
    return "{\n.reg .b32 p, s, m;\n" + low + high + "}"


_E2M1_EVEN, _E2M1_ODD = gl.constexpr(_nibbles(odd=False)), gl.constexpr(_nibbles(odd=True))

# Names that differ between releases of Triton.
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

HEADS, D2, R2, N = gl.constexpr(64), gl.constexpr(256), gl.constexpr(32), gl.constexpr(64)
WINDOW_BYTES, ENTRY_BYTES = gl.constexpr(528), gl.constexpr(288)

_QUERY = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@gluon.jit
def index_of(index_ptr, columns, tile, layout: gl.constexpr):
    at = tile * N + gl.arange(0, N, layout)
    return gl.load(index_ptr + at, mask=at < columns, other=-1)


# How a tile's raw rows lie among some warps, as 32-bit words (128 of a window row, 64 of an entry row, 16 bytes of them a thread), and
# how their scales do.
@gluon.constexpr_function
def window_words(warps):
    return gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def window_groups(warps):
    return gl.BlockedLayout([1, 1, 4], [1, 16, 2], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def entry_words(warps):
    return gl.BlockedLayout([1, 4], [2, 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def entry_groups(warps):
    return gl.BlockedLayout([1, 2, 2], [2, 16, 1], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def entry_pairs(warps):
    return gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def places(index_ptr, columns, tile, WORDS: gl.constexpr, GROUPS: gl.constexpr):
    """Indices int32 [N] of one tile of rows, as its words and as its scales lie among the threads; -1 for absent rows."""
    words = index_of(index_ptr, columns, tile, gl.SliceLayout(1, WORDS))
    return words, index_of(index_ptr, columns, tile, gl.SliceLayout(1, gl.SliceLayout(2, GROUPS)))


@gluon.jit
def load_rows(
    rows_ptr, at_words, at_groups, BYTES: gl.constexpr, NUM_WORDS: gl.constexpr, NUM_GROUPS: gl.constexpr, WORDS: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Raw words int32 [N, NUM_WORDS] and scales uint8 [N, NUM_GROUPS] of rows of BYTES bytes; 0 where absent."""
    word = gl.expand_dims(gl.arange(0, NUM_WORDS, gl.SliceLayout(0, WORDS)), 0)
    index = gl.expand_dims(at_words.to(gl.int64), 1)
    words = gl.load(rows_ptr.to(gl.pointer_type(gl.int32)) + index * (BYTES // 4) + word, mask=index >= 0, other=0)
    group = gl.expand_dims(gl.arange(0, NUM_GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, GROUPS))), 0)
    index = gl.expand_dims(at_groups.to(gl.int64), 1)
    return words, gl.load(rows_ptr + index * BYTES + 4 * NUM_WORDS + group, mask=index >= 0, other=0)


@gluon.jit
def load_window(rows_ptr, at_words, at_groups, WARPS: gl.constexpr):
    return load_rows(rows_ptr, at_words, at_groups, WINDOW_BYTES, D2 // 2, D2 // 16, window_words(WARPS), window_groups(WARPS))


@gluon.jit
def load_entries(rows_ptr, at_words, at_groups, WARPS: gl.constexpr):
    return load_rows(rows_ptr, at_words, at_groups, ENTRY_BYTES, D2 // 4, D2 // 8, entry_words(WARPS), entry_groups(WARPS))


@gluon.jit
def window_places(index_ptr, columns, tile, WARPS: gl.constexpr):
    return places(index_ptr, columns, tile, window_words(WARPS), window_groups(WARPS))


@gluon.jit
def entry_places(index_ptr, columns, tile, WARPS: gl.constexpr):
    return places(index_ptr, columns, tile, entry_words(WARPS), entry_groups(WARPS))


@gluon.jit
def _load_window(rows_ptr, index_ptr, columns, tile):
    at_words, at_groups = window_places(index_ptr, columns, tile, 8)
    return load_window(rows_ptr, at_words, at_groups, 8)


@gluon.jit
def _load_entries(rows_ptr, index_ptr, columns, tile):
    at_words, at_groups = entry_places(index_ptr, columns, tile, 8)
    return load_entries(rows_ptr, at_words, at_groups, 8)


@gluon.jit
def _spread(factors, width: gl.constexpr, parent: gl.constexpr, target: gl.constexpr):
    """bf16 bits int32 [N, G] -> pairs of them int32 [N, width]: every group's number for all its words, in the registers where they are."""
    groups: gl.constexpr = factors.shape[1]
    both = factors | (factors << 16)
    wide, _ = gl.broadcast(gl.expand_dims(both, 2), gl.full([N, groups, width // groups], 0, gl.int32, parent))
    return gl.convert_layout(gl.reshape(wide, [N, width]), target)


@gluon.jit
def _store_window(words, exponents, even, odd, WARPS: gl.constexpr):
    field = gl.minimum(exponents.to(gl.int32) + 104, 255) << 7
    scale = _spread(field, D2 // 2, window_groups(WARPS), window_words(WARPS))
    even.store(gl.inline_asm_elementwise(_E4M3_EVEN, "=r,r,r", [words, scale], dtype=gl.int32, is_pure=True, pack=1))
    odd.store(gl.inline_asm_elementwise(_E4M3_ODD, "=r,r,r", [words, scale], dtype=gl.int32, is_pure=True, pack=1))


@gluon.jit
def _store_entries(words, scales, even, odd, WARPS: gl.constexpr):
    # E4M3 bits to an fp32 number: 2^120, times 2^126 for the E2M1 bits, over SHRINK. Its upper half is exact.
    factor = (scales.to(gl.int32) << 20).to(gl.float32, bitcast=True) * 2.0**115 * 2.0**115
    scale = _spread((factor.to(gl.int32, bitcast=True) >> 16) & 0xFFFF, D2 // 4, entry_groups(WARPS), entry_words(WARPS))
    low, high = gl.inline_asm_elementwise(_E2M1_EVEN, "=r,=r,r,r", [words, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    even.store(gl.convert_layout(gl.reshape(gl.join(low, high), [N, D2 // 2]), entry_pairs(WARPS)))
    low, high = gl.inline_asm_elementwise(_E2M1_ODD, "=r,=r,r,r", [words, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    odd.store(gl.convert_layout(gl.reshape(gl.join(low, high), [N, D2 // 2]), entry_pairs(WARPS)))


@gluon.jit
def _as_words(plane):
    """The same bytes of a plane [N, D/2] bf16 as int32 [N, D/4]: the swizzle counts bytes."""
    if _PUBLIC_REINTERPRET:
        words = plane.reinterpret(gl.int32, [N, D2 // 2], _SHARED_WORDS)
    else:
        words = plane._reinterpret(gl.int32, [N, D2 // 2], _SHARED_WORDS)
    return words


@gluon.jit
def _absorb(qe, qo, ke, ko, weights, index_ptr, columns, tile, scale, m, den, oe, oo):
    """One tile: scores, online softmax, and the start of its product with the values. oe, oo: products under way."""
    scores = warpgroup_mma_init(gl.zeros([HEADS, N], gl.float32, _SCORES))
    scores = warpgroup_mma(qe, ke.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(qo, ko.permute((1, 0)), scores, is_async=True)
    present = index_of(index_ptr, columns, tile, gl.SliceLayout(0, _SCORES)) >= 0
    scores, oe, oo = warpgroup_mma_wait(0, deps=[scores, oe, oo])
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
    return top, den, oe, oo


@gluon.jit
def join_parts(even, odd, m, den, part_ptr, stat_ptr, row, splits):
    """A row's last part, in registers, and those before it, which these threads have kept: from last to first, as `_combine` does."""
    barrier()
    flat: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    head = gl.arange(0, HEADS, flat)
    half = gl.expand_dims(gl.arange(0, D2, gl.SliceLayout(0, OUTPUT)), 0)
    last, den = gl.convert_layout(m, flat), gl.convert_layout(den, flat)
    first = row * splits * HEADS + head
    m = last
    for split in range(splits - 1):
        m = gl.maximum(m, gl.load(stat_ptr + (first + split * HEADS) * 2))
    share = gl.exp2(last - m)
    den = share * den
    even, odd = even * gl.expand_dims(share, 1) + 0.0, odd * gl.expand_dims(share, 1) + 0.0  # `_combine` begins at +0
    for behind in range(1, splits):
        place = first + (splits - 1 - behind) * HEADS
        share = gl.exp2(gl.load(stat_ptr + place * 2) - m)
        den = gl.fma(share, gl.load(stat_ptr + place * 2 + 1), den)
        at = part_ptr + gl.expand_dims(place, 1) * (2 * D2) + half
        even = gl.fma(gl.expand_dims(share, 1), gl.load(at), even)
        odd = gl.fma(gl.expand_dims(share, 1), gl.load(at + D2), odd)
    return even, odd, m, den


@gluon.jit
def write_result(
    even, odd, m, den, rot_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, row, split, splits, ALONE: gl.constexpr,
):  # fmt: skip
    """Sums of even and odd channels fp32 [HEADS, D/2]: turned back to the output where they are whole, else kept as this part's share."""
    flat: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    head = gl.arange(0, HEADS, flat)
    half = gl.expand_dims(gl.arange(0, D2, gl.SliceLayout(0, OUTPUT)), 0)
    m, den = gl.convert_layout(m, flat), gl.convert_layout(den, flat)
    if ALONE:
        factor = gl.expand_dims(SHRINK / (den + gl.exp2(gl.load(sink_ptr + head) * 1.4426950408889634 - m)), 1)
        even, odd = even * factor, odd * factor
        turned = half - (D2 - R2)
        cos = gl.load(rot_ptr + row * 2 * R2 + 2 * turned, mask=turned >= 0, other=1.0)
        sin = gl.load(rot_ptr + row * 2 * R2 + 2 * turned + 1, mask=turned >= 0, other=0.0)
        low = gl.fma(even, cos, odd * sin).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32)
        high = gl.fma(odd, cos, -(even * sin)).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32)
        gl.store(out_ptr + (row * HEADS + gl.expand_dims(head, 1)) * D2 + half, low | (high << 16))
    else:
        place = (row * splits + split) * HEADS + head
        at = part_ptr + gl.expand_dims(place, 1) * (2 * D2) + half
        gl.store(at, even)
        gl.store(at + D2, odd)
        gl.store(stat_ptr + place * 2, m)
        gl.store(stat_ptr + place * 2 + 1, den)


@gluon.jit
def attend(
    q_ptr, rot_ptr, window_ptr, window_index_ptr, entry_ptr, entry_index_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr,
    W, K, per, scale, ALONE: gl.constexpr,
):  # fmt: skip
    """q, out: int32 [T, 64, 256] pairs of bf16. ALONE: a row's keys are not split. See `row_attention._attend` for the rest."""
    row, split, splits = gl.program_id(0).to(gl.int64), gl.program_id(1), gl.num_programs(1)
    window_index_ptr += row * W
    entry_index_ptr += row * K
    window_tiles = gl.cdiv(W, N)
    tiles = window_tiles + gl.cdiv(K, N)
    begin, end = split * per, gl.minimum((split + 1) * per, tiles)
    first_entry, last_entry = gl.maximum(begin, window_tiles) - window_tiles, end - window_tiles
    last_window = gl.minimum(end, window_tiles)

    # Bytes that are needed first are asked for before anything else.
    words, exponents = _load_window(window_ptr, window_index_ptr, gl.where(begin < last_window, W, 0), begin)
    pairs, scales = _load_entries(entry_ptr, entry_index_ptr, gl.where(first_entry < last_entry, K, 0), first_entry)

    queries = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, D2], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [4, N, D2], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, N], SHARED)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _QUERY))
    half = gl.arange(0, D2, gl.SliceLayout(0, _QUERY))
    turned = half - (D2 - R2)
    cos = gl.expand_dims(gl.load(rot_ptr + row * 2 * R2 + 2 * turned, mask=turned >= 0, other=1.0), 0)
    sin = gl.expand_dims(gl.load(rot_ptr + row * 2 * R2 + 2 * turned + 1, mask=turned >= 0, other=0.0), 0)
    both = gl.load(q_ptr + (row * HEADS + gl.expand_dims(head, 1)) * D2 + gl.expand_dims(half, 0))
    even, odd = (both << 16).to(gl.float32, bitcast=True), (both & -65536).to(gl.float32, bitcast=True)
    queries.index(0).store((even * cos - odd * sin).to(gl.bfloat16))
    queries.index(1).store((even * sin + odd * cos).to(gl.bfloat16))
    qe, qo = queries.index(0), queries.index(1)

    m = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, _SCORES))
    den = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
    oe = warpgroup_mma_init(gl.zeros([HEADS, D2], gl.float32, OUTPUT))
    oo = warpgroup_mma_init(gl.zeros([HEADS, D2], gl.float32, OUTPUT))
    buffer = 0
    for tile in range(begin, last_window):
        ke, ko = keys.index(buffer), keys.index(buffer + 1)
        _store_window(words, exponents, _as_words(ke), _as_words(ko), 8)
        fence_async_shared()
        barrier()
        words, exponents = _load_window(window_ptr, window_index_ptr, gl.where(tile + 1 < last_window, W, 0), tile + 1)
        m, den, oe, oo = _absorb(qe, qo, ke, ko, weights, window_index_ptr, W, tile, scale, m, den, oe, oo)
        buffer ^= 2
    for tile in range(first_entry, last_entry):
        ke, ko = keys.index(buffer), keys.index(buffer + 1)
        _store_entries(pairs, scales, _as_words(ke), _as_words(ko), 8)
        fence_async_shared()
        barrier()
        pairs, scales = _load_entries(entry_ptr, entry_index_ptr, gl.where(tile + 1 < last_entry, K, 0), tile + 1)
        m, den, oe, oo = _absorb(qe, qo, ke, ko, weights, entry_index_ptr, K, tile, scale, m, den, oe, oo)
        buffer ^= 2
    even, odd = warpgroup_mma_wait(0, deps=[oe, oo])

    write_result(even, odd, m, den, rot_ptr, sink_ptr, out_ptr, part_ptr, stat_ptr, row, split, splits, ALONE)
