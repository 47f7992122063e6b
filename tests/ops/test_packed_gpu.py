"""The CUDA kernels at the widths of the released model, against their references on the same GPU."""

import pytest
import torch

from engine.draws import FIXED_ONE
from engine.ops.cuda import packed_linear
from engine.ops.cuda.packed_gemm import MANY, Epilogue, Shape, dense, machine, padded
from engine.ops.packed_experts import PACKED_EXPERTS
from engine.ops.packed_linear import PACKED_LINEAR
from engine.ops.packed_weights import Format, PackedWeights, pack_fp4, pack_fp8, unpack
from engine.ops.sample_rows import SAMPLE_ROWS, Draws, Filters, Mode
from engine.ops.weight_formats import encode_fp4_rows, encode_fp8_blocks
from tests.ops.random_experts import random_experts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HIDDEN, INNER, EXPERTS, CHOICES, VOCAB = 5120, 2304, 16, 6, 129_280


@pytest.fixture(autouse=True)
def _selected():
    torch.manual_seed(0)
    ops = (PACKED_EXPERTS, PACKED_LINEAR, SAMPLE_ROWS)
    for op in ops:
        op.use("cuda")
    yield
    for op in ops:
        op.use("reference")


@pytest.fixture(scope="module")
def experts():
    return random_experts(EXPERTS, INNER, HIDDEN, "cuda")


def routed_rows(tokens):
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(tokens, EXPERTS - 1, device="cuda").topk(CHOICES).indices  # the last expert gets nothing
    return x, ids, torch.rand(tokens, CHOICES, device="cuda")


def error(got, want):
    assert got.isfinite().all()
    return float((got.float() - want.float()).abs().amax() / want.float().abs().amax())


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 20, 40, 300])
def test_experts(experts, tokens, quantize):
    rows = routed_rows(tokens)
    got = PACKED_EXPERTS(*rows, experts, 10.0, quantize)
    assert error(got, PACKED_EXPERTS.reference(*rows, experts, 10.0, quantize)) <= (4e-2 if quantize else 1e-2)
    assert torch.equal(got, PACKED_EXPERTS(*rows, experts, 10.0, quantize))
    assert PACKED_EXPERTS(*(part[:0] for part in rows), experts, 10.0, quantize).shape == (0, HIDDEN)


@pytest.mark.parametrize("tokens", [1, 33])
def test_recorded_experts_give_the_same_rows(experts, tokens):
    x, ids, weights = routed_rows(tokens)
    want = PACKED_EXPERTS(x, ids, weights, experts, 10.0, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = PACKED_EXPERTS(x, ids, weights, experts, 10.0, False)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(got, want)
    ids.copy_(ids.flip(0))
    graph.replay()
    assert torch.equal(got, PACKED_EXPERTS(x, ids, weights, experts, 10.0, False))


@pytest.mark.parametrize("shape", [(1, 1792, 5120), (8, 1024, 4096), (1, 4096, 1280), (1, 40, 96)])
@pytest.mark.parametrize("tokens", [1, 8, 17, 64, 200])
def test_dense_products(shape, tokens):
    groups, rows, columns = shape
    weights = PackedWeights.empty(Format.FP8, groups, rows, columns, "cuda")
    for group in range(groups):
        weights.fill(group, *encode_fp8_blocks(torch.randn(rows, columns, device="cuda") * columns**-0.5))
    x = torch.randn(tokens, groups * columns, device="cuda").bfloat16()
    got = PACKED_LINEAR(x, weights)
    assert error(got, PACKED_LINEAR.reference(x, weights)) <= PACKED_LINEAR.tolerance.bf16
    assert torch.equal(got, PACKED_LINEAR(x, weights))


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_drawn_tokens(temperature, filtered):
    logits = torch.randn(96, VOCAB, device="cuda") * 4
    modes = torch.tensor([Mode.GREEDY, Mode.RACE, Mode.INVERSE] * 32, dtype=torch.int32, device="cuda")
    numbers = torch.randint(0, 2**53, (96,), device="cuda")
    filters = Filters(
        torch.tensor([int(0.9 * FIXED_ONE), 2 * FIXED_ONE] * 48, device="cuda"),
        torch.tensor([50, 2**31 - 1, 2**31 - 1] * 32, dtype=torch.int32, device="cuda"),
        torch.full((96,), 1e-4, device="cuda"),
    )
    draws = Draws(torch.full((96,), temperature, device="cuda"), modes, numbers, filters if filtered else None)
    ids, best = SAMPLE_ROWS(logits, draws, VOCAB - 80)
    want, top = SAMPLE_ROWS.reference(logits, draws, VOCAB - 80)
    assert torch.equal(best, top)
    # The sum of exponentials is rounded in another order than the library's: one row may lie on an edge.
    assert int((ids != want).sum()) <= 1


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("columns", [1280, 2304, 5120, 8192])
def test_products_by_warpgroups_have_the_bits_of_products_by_warps(format, columns):
    """Batch-invariant mode takes either. Values over many powers of two, and columns that cancel, which leaves what was rounded."""
    run, stream = machine(torch.device("cuda"))
    encode, pack = (encode_fp4_rows, pack_fp4) if format is Format.FP4 else (encode_fp8_blocks, pack_fp8)
    half = torch.randn(1024, columns // 2, device="cuda") * torch.logspace(-3, 0, columns // 2, 2, device="cuda")
    weights = pack(*encode(torch.cat((half, -half), 1)))
    plain = torch.randn(200, columns // 2, device="cuda")
    for x in (plain.repeat(1, 2), torch.randn(200, columns, device="cuda"), torch.randn(200, columns, device="cuda").exp2() * 1e3):
        x = padded(x.bfloat16(), weights)

        def product(shape, x=x):
            out = torch.full((len(x), 1024), float("nan"), device="cuda", dtype=torch.bfloat16)
            dense(run, stream, x, weights, out, shape, Epilogue.BF16)
            return out

        few = product(Shape(4))
        for tiles in (1, 2) if format is Format.FP4 else (1, 8):
            assert torch.equal(product(Shape(tiles)), few)
        assert torch.equal(product(Shape(MANY)), few)
        groups = product(Shape(MANY, warpgroups=True))
        assert torch.equal(groups, few), f"{(groups != few).float().mean():.2%} of the sums differ, {error(groups, few):.1e}"
        for slices in (4, 8) if format is Format.FP8 else ():
            wanted = product(Shape(4, slices))
            assert torch.equal(product(Shape(MANY, slices, warpgroups=True)), wanted)


@pytest.mark.parametrize(
    ("groups", "rows", "columns"), [(1, 1792, 5120), (1, 8192, 1280), (8, 1024, 4096), (1, 5120, 8192), (1, 640, 2304), (2, 96, 160)]
)
def test_ordered_weights_give_the_bits_of_packed_ones(groups, rows, columns):
    """Of few rows too. Columns that cancel leave what was rounded."""
    weights = PackedWeights.empty(Format.FP8, groups, rows, columns, "cuda")
    for group in range(groups):
        half = torch.randn(rows, columns // 2, device="cuda")
        weights.fill(group, *encode_fp8_blocks(torch.cat((half, -half), 1)))
    ordered = packed_linear.order(weights, torch.stack([unpack(weights, group, torch.bfloat16) for group in range(groups)]))
    assert ordered is not None
    half = torch.randn(700, groups, columns // 2, device="cuda")
    for x in (torch.cat((half, half), 2), torch.randn(700, groups, columns, device="cuda")):
        x = x.flatten(1).bfloat16()
        few = torch.cat([packed_linear.launch_invariant(part, weights) for part in x[:64].split(32)])
        for count in (33, 64, 65, 200, 700):
            got = packed_linear.launch_invariant(x[:count], weights, ordered)
            assert torch.equal(got[:64], few[:count]), f"{count} rows: {(got[:64] != few[:count]).float().mean():.2%} of the sums differ"
            assert torch.equal(got, packed_linear.launch_invariant(x[:count], weights))
