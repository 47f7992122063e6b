"""The kernels of packed weights, lane by lane on a CPU: the sources that the GPU runs, against the plain definitions."""

import shutil

import pytest
import torch

from csrc.loader import Library, build
from engine.ops.cuda.library import SOURCES
from engine.ops.cuda.packed_experts import run_experts, run_shared, shared_buffers
from engine.ops.cuda.packed_gemm import MANY, Epilogue, Shape, dense, expert_lists, expert_sum, padded, routed
from engine.ops.cuda.packed_linear import run_linear
from engine.ops.cuda.routed_experts import run_share
from engine.ops.packed_experts import PACKED_EXPERTS
from engine.ops.packed_linear import PACKED_LINEAR
from engine.ops.packed_weights import Format, PackedWeights, pack_fp4, pack_fp8, unpack
from engine.ops.weight_formats import encode_fp4_rows, encode_fp8_blocks
from tests.csrc.emulated import emulated_kernels
from tests.ops.random_experts import random_experts


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_sources_compile_for_hopper(tmp_path):
    assert build(Library("packed_gemm", SOURCES, "sm_90a"), tmp_path).stat().st_size > 0


PACK = {Format.FP4: (encode_fp4_rows, pack_fp4), Format.FP8: (encode_fp8_blocks, pack_fp8)}


PLAIN = {Format.FP4: Epilogue.FP32, Format.FP8: Epilogue.BF16}


def nan_like(format, *shape):
    return torch.full(shape, float("nan"), dtype=torch.float32 if format is Format.FP4 else torch.bfloat16)


@pytest.fixture(scope="module")
def run():
    return emulated_kernels()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def product(x, weights, group=0):
    return x.float() @ unpack(weights, group, torch.float32).t()


def close(got, want, limit):
    assert got.shape == want.shape
    assert (got.float() - want.float()).abs().max() <= limit * want.float().abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "shape"),
    [
        (16, 256, 1, Shape(1, 1)),
        (40, 96, 3, Shape(1, 8)),  # tiles and blocks with padding, slices without a block
        (64, 512, 9, Shape(2, 1)),  # a second item with one token
        (24, 288, 17, Shape(1, 4)),
        (32, 128, 30, Shape(4, 8)),
        (32, 128, 65, Shape(4, 1)),
    ],
)
def test_products_of_few_rows(run, format, rows, columns, tokens, shape):
    shape = shape if format is Format.FP8 else Shape(shape.tiles)
    encode, pack = PACK[format]
    weights = pack(*encode(torch.randn(rows, columns) * columns**-0.5))
    x = torch.randn(tokens, columns).bfloat16()
    out = nan_like(format, tokens, rows)
    dense(run, 0, padded(x, weights), weights, out, shape, PLAIN[format])
    close(out, product(x, weights), 1e-6 if format is Format.FP4 else 4e-3)


@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(16, 256, 1), (40, 96, 20), (560, 320, 33), (24, 128, 130)])
def test_products_of_many_rows(run, format, rows, columns, tokens, warpgroups):
    """One row, half tiles, more rows than one block of threads has, a second item."""
    encode, pack = PACK[format]
    weights = pack(*encode(torch.randn(rows, columns) * columns**-0.5))
    x = torch.randn(tokens, columns).bfloat16()
    out = nan_like(Format.FP8, tokens, rows)
    dense(run, 0, padded(x, weights), weights, out, Shape(MANY, warpgroups=warpgroups), Epilogue.BF16)
    close(out, product(x, weights), 4e-3)


@pytest.mark.parametrize(("rows", "columns", "tokens"), [(40, 96, 20), (560, 320, 33), (24, 2400, 63), (24, 256, 75)])
def test_products_by_warpgroups(run, rows, columns, tokens):
    """Every count of pairs, more stages than the ring holds, a second and a third item."""
    weights = pack_fp4(*encode_fp4_rows(torch.randn(rows, columns) * columns**-0.5))
    x = torch.randn(tokens, columns).bfloat16()
    out = nan_like(Format.FP8, tokens, rows)
    dense(run, 0, padded(x, weights), weights, out, Shape(MANY, warpgroups=True), Epilogue.BF16)
    close(out, product(x, weights), 4e-3)


@pytest.mark.parametrize(
    ("epilogue", "columns", "slices"),
    [(epilogue, columns, 8) for epilogue in (Epilogue.BF16, Epilogue.SWIGLU) for columns in (1152, 1024, 1792)] + [(Epilogue.BF16, 640, 4)],
)
def test_many_rows_are_added_in_the_order_of_warps_that_share_a_tile(run, columns, slices, epilogue):
    """Slices of one length and of two. Columns that cancel leave what was rounded, so that an order that is not kept shows."""
    half, x = torch.randn(40, columns // 2), torch.randn(70, columns // 2).bfloat16().repeat(1, 2)
    weights = pack_fp8(*encode_fp8_blocks(torch.cat((half, -half), 1)))

    def product(rows, shape):
        out = nan_like(Format.FP8, rows, 20 if epilogue is Epilogue.SWIGLU else 40)
        dense(run, 0, padded(x[:rows], weights), weights, out, shape, epilogue, limit=10.0)
        return out

    few, undivided = product(64, Shape(8, slices)), product(64, Shape(8))
    for rows in (64, 70):
        assert torch.equal(product(rows, Shape(MANY, slices, warpgroups=True))[:64], few), f"{rows} rows"
    assert torch.equal(product(64, Shape(MANY, warpgroups=True)), undivided)
    assert not torch.equal(few, undivided)


@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
def test_experts_with_many_rows(run, quantize, warpgroups):
    some = random_experts(2, 64, 96)
    x = (torch.randn(40, 96) * 3).bfloat16()
    ids, weights = torch.randint(0, 2, (40, 1)), torch.rand(40, 1)
    got = run_experts(run, 0, x, ids, weights, some, 2.0, quantize, warpgroups=warpgroups)
    close(got, PACKED_EXPERTS.reference(x, ids, weights, some, 2.0, quantize), 4e-2 if quantize else 1e-2)


@pytest.mark.parametrize("format", Format)
def test_every_stored_value_becomes_the_same_bf16(run, format):
    """Columns of the unit matrix read the weights out: all codes, scales from the smallest to the largest, subnormal results included."""
    scales = [0, 1, 2, 60, 120, 127, 128]
    if format is Format.FP4:
        values = torch.arange(256, dtype=torch.uint8).view(torch.int8)[None, :64].expand(28, -1).contiguous()
        values = torch.stack([values[0].view(torch.uint8).roll(16 * k).add(k * 64).view(torch.int8) for k in range(28)])
        scale = torch.tensor(scales * 4, dtype=torch.uint8)[:, None].expand(-1, 4).contiguous()
        weights = pack_fp4(values, scale)
    else:
        finite = [code for code in range(256) if code & 0x7F != 0x7F]
        values = torch.tensor((finite * 32)[: 64 * 96], dtype=torch.uint8).view(64, 96).view(torch.float8_e4m3fn)
        weights = pack_fp8(values, torch.tensor(scales[:6], dtype=torch.uint8).view(2, 3))
    x = torch.eye(weights.columns).bfloat16()
    out = nan_like(format, weights.columns, weights.rows)
    dense(run, 0, padded(x, weights), weights, out, Shape(4, 1), PLAIN[format])
    assert torch.equal(out.bfloat16().t(), unpack(weights, 0, torch.bfloat16))


def test_block_diagonal_products(run):
    weights = PackedWeights.empty(Format.FP8, 3, 32, 160, "cpu")
    for group in range(3):
        weights.fill(group, *encode_fp8_blocks(torch.randn(32, 160)))
    x = torch.randn(5, 3 * 160 + 32).bfloat16()[:, : 3 * 160]  # strided rows
    close(run_linear(run, 0, x, weights), PACKED_LINEAR.reference(x, weights), 8e-3)
    assert run_linear(run, 0, x[:0], weights).shape == (0, 96)


def test_lists_hold_every_choice_once_in_pieces(run):
    ids = torch.randint(0, 20, (50, 3))
    ids[ids == 7] = 8  # an expert without tokens
    ids[3, 1] = -1
    lists = expert_lists(run, 0, ids, 20, 1)
    flat, seen, last = ids.flatten(), [], -1
    for expert, begin, count, _ in lists.items[: lists.count.item()].tolist():
        assert 0 < count <= 8
        assert expert >= last
        last = expert
        chosen = lists.slots[begin : begin + count].tolist()
        assert all(flat[slot] == expert for slot in chosen)
        seen += chosen
    assert sorted(seen) == [i for i in range(150) if flat[i] >= 0]


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2, 11])
def test_experts_follow_their_definition(run, tokens, quantize):
    some = random_experts(5, 64, 96)
    x = (torch.randn(tokens, 96) * 3).bfloat16()  # beyond the limit of 2 below, on both sides
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(tokens)]) if tokens else torch.zeros(0, 3, dtype=torch.int64)  # expert 4: none
    weights = torch.rand(tokens, 3)
    got = run_experts(run, 0, x, ids, weights, some, 2.0, quantize)
    # With round trips through fp8 a value on an edge may fall on the other side.
    close(got, PACKED_EXPERTS.reference(x, ids, weights, some, 2.0, quantize), 4e-2 if quantize else 1e-2) if tokens else None
    assert got.shape == (tokens, 96)


def test_a_token_does_not_depend_on_its_batch(run):
    some = random_experts(3, 32, 64)
    x, weights = torch.randn(9, 64).bfloat16(), torch.rand(9, 2)
    ids = torch.tensor([[0, 1]] * 9)
    x[4] = float("nan")
    shape = Shape(2, 1)

    def act(rows):
        lists = expert_lists(run, 0, ids[rows].contiguous(), 3, shape.tiles)
        out = torch.empty(2 * len(rows), 32, dtype=torch.bfloat16)
        chosen = weights[rows].contiguous()
        routed(run, 0, padded(x[rows], some.w13), some.w13, lists, out, shape, Epilogue.SWIGLU, divisor=2, weights=chosen, limit=10.0)
        return out.view(len(rows), 2, 32)

    together = act(list(range(9)))
    assert together[4].isnan().all()
    for token in (0, 3, 5, 8):
        assert torch.equal(together[token], act([token])[0])


@pytest.mark.parametrize("quantize", [False, True])
def test_in_invariant_mode_a_token_does_not_depend_on_how_many_there_are(run, quantize):
    """Few tokens, and as many as the kernel for many takes: of three experts each, and of the shared one."""
    some = random_experts(2, 64, 96)
    x, weights = (torch.randn(70, 96) * 3).bfloat16(), torch.rand(70, 1)
    ids = torch.randint(0, 2, (70, 1))
    everything = run_experts(run, 0, x, ids, weights, some, 2.0, quantize, fixed=True)
    close(everything, PACKED_EXPERTS.reference(x, ids, weights, some, 2.0, quantize), 4e-2 if quantize else 1e-2)
    share = run_share(run, 0, x, ids, weights, some, 2.0, quantize, False, 2, fixed=True)
    for rows in ([3], [69, 3], list(range(20, 29)), list(range(30, 64)), list(range(5, 69))):
        part = (x[rows], ids[rows], weights[rows], some, 2.0, quantize)
        assert torch.equal(run_experts(run, 0, *part, fixed=True), everything[rows]), f"{len(rows)} tokens"
        assert torch.equal(run_share(run, 0, *part, False, 2, fixed=True), share[rows]), f"{len(rows)} tokens of a share"


@pytest.mark.parametrize("columns", [288, 1152])
def test_in_invariant_mode_products_of_few_and_many_rows_are_the_same_numbers(run, columns):
    """Of columns that are not divided, and of such that are among four warps or eight."""
    weights = PackedWeights.empty(Format.FP8, 2, 32, columns, "cpu")
    for group in range(2):
        weights.fill(group, *encode_fp8_blocks(torch.randn(32, columns)))
    x = torch.randn(140, 2 * columns).bfloat16()
    everything = run_linear(run, 0, x, weights, fixed=True)
    close(everything, PACKED_LINEAR.reference(x, weights), 8e-3)
    for rows in ([7], [139, 7], list(range(9)), list(range(100, 133)), list(range(64)), list(range(60, 125))):
        assert torch.equal(run_linear(run, 0, x[rows], weights, fixed=True), everything[rows]), f"{len(rows)} rows"


def test_partial_sums_are_added_in_the_order_of_choices(run):
    parts, shared = torch.randn(3, 4, 20) * 100, torch.randn(3, 20).bfloat16()
    out = torch.full((3, 20), float("nan"), dtype=torch.bfloat16)
    expert_sum(run, 0, parts, shared, out)
    want = parts[:, 0] + parts[:, 1]
    for part in (parts[:, 2], parts[:, 3], shared.float()):
        want = want + part
    assert torch.equal(out, want.bfloat16())
    expert_sum(run, 0, parts[:, :1].contiguous(), None, out)
    assert torch.equal(out, parts[:, 0].bfloat16())
    expert_sum(run, 0, parts[:, :2].bfloat16().contiguous(), None, out)
    assert torch.equal(out, (parts[:, 0].bfloat16().float() + parts[:, 1].bfloat16().float()).bfloat16())


def test_shared_expert_clamps_the_gate_from_above_only(run):
    some = random_experts(1, 32, 64)
    x = (torch.randn(3, 64) * 20).bfloat16()
    act, got = shared_buffers(x, some)
    run_shared(run, 0, x, some, 0.5, False, act, got)
    both = unpack(some.shared_w13, 0, torch.bfloat16).unflatten(0, (-1, 2, 8))
    gate, up = ((x.float() @ both[:, i].flatten(0, 1).float().t()).bfloat16().float() for i in range(2))
    act = (torch.nn.functional.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)).bfloat16()
    close(got, product(act, some.shared_w2), 1e-2)
