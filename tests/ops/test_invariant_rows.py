"""In batch-invariant mode every op gives a row the same bits alone and among any others, at any place, in every implementation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import engine.model_runner
import engine.sampler  # noqa: F401  every op of the engine is registered
from engine.ops import registry
from engine.ops.cache_rows import entry_row_bytes, index_row_bytes, pack_entry_rows, pack_window_rows
from engine.ops.compress_entries import IndexKeys, IndexPlaces, PairSource
from engine.ops.hyper_boundary import Mixer, Written
from engine.ops.index_search import IndexQuery, PagedIndexKeys
from engine.ops.packed_experts import PackedExperts
from engine.ops.packed_linear import order_weights
from engine.ops.packed_weights import PackedWeights, pack_fp8, unpack
from engine.ops.peer_rows import SEND_ROWS, PeerLayout, PeerMemory
from engine.ops.rope import rotation
from engine.ops.row_attention import PackedKeys
from engine.ops.sample_rows import Draws
from engine.ops.sparse_attention import Selection
from engine.ops.weight_formats import encode_fp8_blocks
from tests.ops.random_experts import random_experts

POOL = 70
Rows = list[int]
# Of an op's implementation and rows of a pool: what it gives for them, [rows, ...] each.
Case = Callable[[Callable[..., Any], Rows], list[torch.Tensor]]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def per_row(*pool: torch.Tensor, more: tuple[Any, ...] = ()) -> Case:
    """Tensors of the pool's rows first, everything else behind."""

    def case(run: Callable[..., Any], rows: Rows) -> list[torch.Tensor]:
        result = run(*(part[rows] for part in pool), *more)
        return [result] if isinstance(result, torch.Tensor) else list(result)

    return case


def angles(count: int, pairs: int) -> torch.Tensor:
    return rotation(torch.arange(count) * 37 + 5, torch.rand(pairs))


def narrowed(index: torch.Tensor, rows: Rows) -> torch.Tensor:
    """As wide as the row with the most keys, as a step's lists are."""
    part = index[rows]
    return part[:, : max(1, int((part >= 0).sum(1).max()))].contiguous()


def lists(columns: int, num_rows: int) -> torch.Tensor:
    """[POOL, columns] int32: lists of any length, ascending, -1 behind."""
    index = torch.stack([torch.randperm(num_rows)[:columns].sort().values for _ in range(POOL)]).int()
    return index.masked_fill(torch.arange(columns) >= torch.randint(0, columns + 1, (POOL, 1)), -1)


def rank_sums() -> Case:
    returned, shared = randn(3, POOL, 40).bfloat16(), randn(POOL, 40).bfloat16()
    return lambda run, rows: [run(returned[:, rows], shared[rows])]


def boundary(dtype: torch.dtype, width: int, written: bool, mixed: bool) -> Case:
    h, y, comb, post, pre = randn(POOL, 4, width).to(dtype), randn(POOL, width).to(dtype), torch.rand(POOL, 4, 4), *torch.rand(2, POOL, 4)
    mixer = Mixer(randn(24, 4 * width) * 0.05, torch.rand(24), randn(24), 20, 1e-6) if mixed else None

    def case(run: Callable[..., Any], rows: Rows) -> list[torch.Tensor]:
        back = Written(y[rows], post[rows], comb[rows]) if written else None
        out = run(h[rows], back, mixer, pre[rows], torch.ones(width, dtype=dtype), 1e-6)
        return [part for part in (out.h, out.x, out.pre, out.post, out.comb) if part is not None]

    return case


def attention(dtype: torch.dtype, columns: int) -> Case:
    q, keys, ring = randn(POOL, 3, 64).to(dtype), randn(50, 64).to(dtype), randn(40, 64).to(dtype)
    window, picks, sink = lists(20, 40), lists(columns, 50), randn(3)

    def case(run: Callable[..., Any], rows: Rows) -> list[torch.Tensor]:
        sources = [(ring, Selection(window[rows])), (keys, Selection(narrowed(picks, rows)))]
        return [run(q[rows], sources[: 1 + bool((picks[rows] >= 0).any())], sink, 0.125)]

    return case


def row_attention(heads: int, columns: int) -> Case:
    q, rot, sink = randn(POOL, heads, 64).bfloat16(), angles(POOL, 8), randn(heads)
    ring, keys = pack_window_rows(randn(40, 64)), pack_entry_rows(randn(columns + 20, 64))
    window, picks = lists(40, 40), lists(columns, columns + 20)

    def case(run: Callable[..., Any], rows: Rows) -> list[torch.Tensor]:
        sources = [PackedKeys(ring, window[rows].contiguous()), PackedKeys(keys, narrowed(picks, rows))]
        return [run(q[rows], rot[rows], sources[: 1 + bool((picks[rows] >= 0).any())], sink, 0.125, 0)]

    return case


def scores(dtype: torch.dtype) -> Case:
    q, weights, keys, count = randn(POOL, 2, 4, 32).to(dtype), randn(POOL, 2, 4).to(dtype), randn(POOL, 300, 32).to(dtype), lengths(300)

    def case(run: Callable[..., Any], rows: Rows) -> list[torch.Tensor]:
        most = int(count[rows].max())
        found = run(q[rows], weights[rows], keys[rows][:, :most], count[rows, None].expand(-1, 2))
        return [torch.nn.functional.pad(found, (0, 300 - most), value=float("-inf"))]

    return case


def lengths(most: int) -> torch.Tensor:
    return torch.randint(1, most + 1, (POOL,))


def search(heads: int, num_kept: int) -> Case:
    entries, size, per_block, width = 96, 4, 8, 32
    data = torch.randint(0, 256, (POOL * entries // per_block, per_block * index_row_bytes(width)), dtype=torch.uint8)
    data[:, per_block * width // 2 :] = torch.randint(50, 60, (len(data), per_block), dtype=torch.uint8)  # scales
    table = torch.randperm(len(data)).view(POOL, -1)
    q, weights, count = randn(POOL, heads, width).bfloat16(), randn(POOL, heads).bfloat16(), lengths(entries)
    q[::2], weights[::2] = q[0], weights[0]  # and ties, in blocks that are the same
    table[1::2] = table[1]

    def case(run: Callable[..., Any], rows: Rows) -> list[torch.Tensor]:
        query = IndexQuery(q[rows], weights[rows], torch.arange(len(rows)), count[rows])
        picked, blocks = run(query, PagedIndexKeys(data, 0, per_block, table[rows]), int(count[rows].max()), 12, None, size, num_kept)
        out = [torch.nn.functional.pad(picked, (0, 12 - picked.shape[1]), value=-1)]
        return out if blocks is None else [*out, torch.nn.functional.pad(blocks, (0, num_kept - blocks.shape[1]), value=-1)]

    return case


def compressed(run: Callable[..., Any], rows: Rows, *, both: torch.Tensor, rot: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Entry i from rows 2i and 2i + 1 of the step; its key to a block of its own."""
    cache, count = torch.zeros(len(rows), entry_row_bytes(64), dtype=torch.uint8), torch.arange(len(rows))
    blocks = torch.zeros(len(rows), index_row_bytes(32), dtype=torch.uint8)
    keys = IndexKeys(weight, torch.ones(32).bfloat16(), IndexPlaces(blocks, 0, 1, count, count * 0))
    pairs = PairSource(torch.zeros(0, 128), None, 2 * count, 2 * count + 1)
    run(both[rows].flatten(0, 1), pairs, torch.ones(64).bfloat16(), 1e-6, rot[rows], cache, count, keys)
    return [cache, blocks]


def packed_matrix() -> PackedWeights:
    return pack_fp8(*encode_fp8_blocks(randn(48, 160) * 0.1))


def experts() -> PackedExperts:
    return random_experts(3, 32, 64, torch.get_default_device())


def choices(num_experts: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([torch.randperm(num_experts)[:chosen] for _ in range(POOL)]), torch.rand(POOL, chosen)


def draws() -> Case:
    logits, modes, numbers = randn(POOL, 300), torch.arange(POOL) % 3, torch.randint(0, 2**53, (POOL,))

    def case(run: Callable[..., Any], rows: Rows) -> list[torch.Tensor]:
        return list(run(logits[rows], Draws(torch.full((len(rows),), 0.7), modes[rows].int(), numbers[rows]), 300))

    return case


def attention_inputs(dtype: torch.dtype) -> Case:
    both, rot = randn(POOL, 96 + 64).to(dtype), angles(POOL, 8)

    def case(run: Callable[..., Any], rows: Rows) -> list[torch.Tensor]:
        norms = torch.ones(96, dtype=dtype), torch.ones(64, dtype=dtype)
        return list(run(both[rows], *norms, rot[rows], 1e-6, None, None))

    return case


BF16, F32 = torch.bfloat16, torch.float32


def trip(home: bool) -> Case:
    """Of a rank that is its own peer; ranks without kernels have their memory on the host."""
    with torch.device("cpu"):
        x, (ids, weights), shared = randn(POOL, 24).bfloat16(), choices(5, 3), randn(POOL, 24).bfloat16()
        maps = torch.randperm(5)[:, None], torch.ones(5).long()

    def case(run: Callable[..., Any], rows: Rows) -> list[torch.Tensor]:
        with torch.device("cpu"):
            layout = PeerLayout.of(1, POOL, 24, 2, 3, False)
            own = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            memory = PeerMemory(0, (own.data_ptr(),), own, layout, 1.0)
            given = x[rows], ids[rows], weights[rows], *maps, None, len(rows), 5, memory
            sent = (SEND_ROWS.reference if home else run)(*given)
            return [run(sent.rows, sent, shared[rows], memory)] if home else [sent.rows, sent.slots, sent.weights, sent.wanted]

    return case


CASES: dict[str, Callable[[], list[Case]]] = {
    "attention_inputs": lambda: [attention_inputs(dtype) for dtype in (BF16, F32)],
    "block_linear": lambda: [per_row(randn(POOL, 96).to(dtype), more=(randn(3, 20, 32).to(dtype),)) for dtype in (BF16, F32)],
    "candidate_blocks": lambda: [per_row(randn(POOL, 90), lengths(90), more=(3, 8))],
    "clamped_swiglu": lambda: [per_row(randn(POOL, 2 * 24).to(dtype), torch.rand(POOL), more=(2.0,)) for dtype in (BF16, F32)],
    "collapse": lambda: [per_row(randn(POOL, 4, 100).to(dtype), torch.rand(POOL, 4)) for dtype in (BF16, F32)],
    "compress_entries": lambda: [partial(compressed, both=randn(POOL, 2, 128), rot=angles(POOL, 8), weight=randn(32, 64).bfloat16())],
    "dense_linear": lambda: [
        per_row(randn(POOL, width).to(dtype), more=(randn(rows, width).to(dtype), None, False))
        for dtype in (BF16, F32)
        for rows, width in ((24, 96), (1, 64), (130, 40), (200, 1024))
    ],
    "engram_gate": lambda: [
        per_row(randn(POOL, 4, 40).to(dtype), randn(POOL, 200).to(dtype), more=(randn(4, 40), 1e-6)) for dtype in (BF16, F32)
    ],
    "engram_gather": lambda: [per_row(torch.randint(0, 50, (POOL, 3, 2)), more=(randn(50, 32).bfloat16(), None, BF16))],
    "engram_hash": lambda: [
        per_row(torch.randint(0, 90, (POOL, 4)), more=(torch.arange(3, 7), *torch.tensor([[[97, 89]] * 3, [[0, 97]] * 3]), 2))
    ],
    "add_rank_sums": lambda: [rank_sums()],
    "expand": lambda: [per_row(randn(POOL, 40), randn(POOL, 4, 40), torch.rand(POOL, 4), torch.rand(POOL, 4, 4))],
    "expert_logits": lambda: [per_row(randn(POOL, 1100).bfloat16(), more=(randn(40, 1100).to(dtype),)) for dtype in (BF16, F32)],
    "expert_mlp": lambda: [
        per_row(randn(POOL, 64).to(dtype), *choices(5, 3), more=(randn(5, 48, 64).to(dtype), randn(5, 64, 24).to(dtype), 2.0, False))
        for dtype in (BF16, F32)
    ],
    "hyper_boundary": lambda: [
        boundary(dtype, width, *flags) for dtype, width in ((BF16, 320), (F32, 96)) for flags in ((True, True), (False, False))
    ],
    "hyper_mixes": lambda: [per_row(randn(POOL, 24), more=(torch.rand(24), randn(24), 20, 1e-6))],
    "index_queries": lambda: [per_row(randn(POOL, 4, 64).to(dtype), angles(POOL, 8)) for dtype in (BF16, F32)],
    "index_scores": lambda: [scores(dtype) for dtype in (BF16, F32)],
    "index_search": lambda: [search(4, 0), search(16, 6), search(20, 0)],
    "local_choices": lambda: [per_row(torch.randint(-1, 12, (POOL, 12), dtype=torch.int32), more=(4, 3, 6, 6))],
    "pack_rows": lambda: [
        per_row(randn(POOL, 40).to(dtype), *choices(5, 3), more=(torch.randperm(5)[:, None], torch.ones(5).long(), None, 1, POOL))
        for dtype in (BF16, F32)
    ],
    "packed_experts": lambda: [per_row(randn(POOL, 64).bfloat16(), *choices(3, 2), more=(experts(), 2.0, False))],
    "packed_linear": lambda: [
        per_row(randn(POOL, 160).bfloat16(), more=(weights, ordered))
        for weights in [packed_matrix()]
        for ordered in (None, order_weights(weights, unpack(weights, 0, BF16)[None]))
    ],
    "pack_entry_rows": lambda: [per_row(randn(POOL, 64))],
    "pack_index_rows": lambda: [per_row(randn(POOL, 64))],
    "pack_window_rows": lambda: [per_row(randn(POOL, 64))],
    "place_entries": lambda: [
        per_row(torch.randint(-1, 64, (POOL, 9)), torch.randint(0, 5, (POOL,)), more=(torch.randint(1, 99, (5, 8)), 8, 20, 3))
    ],
    "pool_pairs": lambda: [per_row(randn(POOL, 2 * 20), randn(POOL, 2 * 20))],
    "q4_index": lambda: [per_row(randn(POOL, 64))],
    "q4_kv": lambda: [per_row(randn(POOL, 64))],
    "q8": lambda: [per_row(randn(POOL, 64).to(dtype)) for dtype in (BF16, F32)],
    "send_rows": lambda: [trip(False)],
    "bring_home": lambda: [trip(True)],
    "rms_norm": lambda: [
        per_row(randn(POOL, width).to(dtype), more=(torch.ones(width, dtype=dtype), 1e-6)) for dtype in (BF16, F32) for width in (40, 1280)
    ],
    "rope": lambda: [per_row(randn(POOL, *heads, 40).to(dtype), angles(POOL, 6)) for dtype in (BF16, F32) for heads in ((), (3,))],
    "route_experts": lambda: [per_row(randn(POOL, count) * 5, more=(randn(count), 3, 1.5)) for count in (7, 64)],
    "routed_experts": lambda: [
        per_row(randn(POOL, 64).bfloat16(), *choices(3, 2), more=(experts(), 2.0, False, summed, 1)) for summed in (True, False)
    ],
    "row_attention": lambda: [row_attention(3, 340)],
    "sample_rows": lambda: [draws()],
    "select_topk": lambda: [per_row(randn(POOL, 90).round(decimals=1), more=(12,))],
    "shared_expert": lambda: [per_row(randn(POOL, 64).bfloat16(), more=(experts(), 2.0, False))],
    "sparse_attention": lambda: [attention(dtype, columns) for dtype in (BF16, F32) for columns in (30, 50)],
}


@pytest.fixture(autouse=True)
def _invariant() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the mode has it: libraries divide sums over threads
    registry.select("auto", "cpu", invariant=True)
    yield
    registry.select("auto", "cpu")
    torch.set_num_threads(threads)


def test_every_op_has_a_case():
    assert set(CASES) == set(registry._OPS)


def check(case: Case, run: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    rng = random.Random(1)
    for size in sizes:
        rows = rng.sample(range(POOL), size)
        together = case(run, rows)
        for place in {0, size - 1, rng.randrange(size)}:
            alone = case(run, [rows[place]])
            for one, many in zip(alone, together, strict=True):
                same = torch.equal(one[0], many[place]) or torch.equal(one[0].nan_to_num(9.0), many[place].nan_to_num(9.0))
                assert same, f"row {place} of {size} differs by {(one[0].double() - many[place].double()).abs().max():.1e}"


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_row_of_the_reference_has_the_same_bits_in_every_batch(name):
    for case in CASES[name]():
        check(case, registry._OPS[name], (2, 3, 7, 17, 33, 64, POOL))


TRITON = ["add_rank_sums", "attention_inputs", "compress_entries", "engram_gate", "expert_logits", "hyper_boundary", "index_queries",
          "index_search", "local_choices", "pack_rows", "route_experts", "row_attention"]  # fmt: skip
CUDA = ["packed_experts", "packed_linear", "routed_experts", "sample_rows", "shared_expert"]


@pytest.mark.parametrize("name", TRITON)
def test_a_row_of_the_triton_kernel_has_the_same_bits_in_every_batch(device, name):
    registry._OPS[name].use("triton", invariant=True)
    with torch.device(device):
        for case in CASES[name]():
            check(case, registry._OPS[name], (2, 9) if device == "cpu" else (2, 3, 18, 33, POOL))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA)
def test_a_row_of_the_cuda_kernel_has_the_same_bits_in_every_batch(device, name):
    """Without a GPU: tests/csrc/test_packed_gemm.py, by the emulator."""
    registry._OPS[name].use("cuda", invariant=True)
    with torch.device(device):
        for case in CASES[name]():
            check(case, registry._OPS[name], (2, 3, 18, 33, POOL))


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_row_of_the_reference_has_the_same_bits_in_every_batch_of_a_gpu(device, name):
    with torch.device(device):
        for case in CASES[name]():
            check(case, registry._OPS[name], (2, 3, 18, 33, POOL))


def test_products_take_more_rows_at_a_time_where_that_changes_nothing():
    from engine.ops.fixed_rows import fixed_linear

    x, weight = randn(600, 64), randn(24, 64)
    whole = fixed_linear(x, weight)
    assert torch.equal(whole, torch.cat([fixed_linear(part, weight) for part in x.split(16)]))
    out = torch.full((600, 24), float("nan"))
    assert fixed_linear(x, weight, out) is out
    assert torch.equal(out, whole)
    assert fixed_linear(x[:0], weight).shape == (0, 24)
    torch.testing.assert_close(whole, x @ weight.t())
