import pytest
import torch

from engine.ops.cache_rows import entry_row_bytes, index_row_bytes, unpack_entry_rows, unpack_index_rows
from engine.ops.compress_entries import COMPRESS_ENTRIES, INDEX_QUERIES, STORE_INDEX_KEYS, IndexPlaces, PairSource
from engine.ops.rope import plain_frequencies, rotation

EPS = 1e-20
LIMIT = COMPRESS_ENTRIES.tolerance.bf16


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def kernels(device):
    import engine.ops.triton.compress_entries as module

    return module


def angles(count, pairs, device):
    return rotation(torch.arange(count, device=device) * 91, plain_frequencies(2 * pairs, 10_000.0).to(device))


def nearly(got, want, share=0.1):
    """Equal but for some steps of a format: the reference rounds a norm twice, so values on an edge may fall to its other side."""
    assert got.isfinite().all()
    scale = want.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    assert ((got - want).abs() / scale).max() <= 0.34
    assert (got != want).float().mean() <= share


@pytest.mark.parametrize("loads", [0, 3])
def test_pairs_are_pooled_normalised_rotated_and_packed(device, kernels, loads):
    width, steps = 64, 9
    projected = torch.randn(steps, 2 * width, device=device)
    partial = torch.randn(7, 2 * width, device=device)
    load = torch.tensor([5, 0, 2], device=device) if loads else None
    first = torch.tensor([1, 0, 2, 4, 6], device=device) + (loads if not loads else 0)
    last = torch.tensor([0, 3, 5, 7, 8], device=device)
    norm = (1 + 0.1 * torch.randn(width, device=device)).bfloat16()
    rows = torch.tensor([4, 9, 1, 0, 7], device=device)
    kv = [torch.zeros(10, entry_row_bytes(width), dtype=torch.uint8, device=device) for _ in range(2)]
    args = (PairSource(partial, load, first, last), norm, EPS, angles(5, 8, device))
    latents = [run(projected, *args, out, rows) for run, out in zip((kernels.compress, COMPRESS_ENTRIES.reference), kv, strict=True)]
    assert ((latents[0].float() - latents[1].float()).abs() / latents[1].abs().amax(1, keepdim=True)).max() <= LIMIT
    nearly(*(unpack_entry_rows(out, torch.float32) for out in kv))
    untouched = [2, 3, 5, 6, 8]
    assert (kv[0][untouched] == 0).all()


def test_single_tokens_need_no_pairs(device, kernels):
    width = 128
    projected, norm = torch.randn(3, width, device=device).bfloat16(), torch.ones(width, device=device).bfloat16()
    projected[1] = 0
    rows = torch.tensor([2, 0, 1], device=device)
    kv = [torch.zeros(3, entry_row_bytes(width), dtype=torch.uint8, device=device) for _ in range(2)]
    for run, out in zip((kernels.compress, COMPRESS_ENTRIES.reference), kv, strict=True):
        run(projected, None, norm, EPS, angles(3, 16, device), out, rows)
    nearly(*(unpack_entry_rows(out, torch.float32) for out in kv))
    assert kernels.compress(projected[:0], None, norm, EPS, angles(0, 16, device), kv[0], rows[:0]).shape == (0, width)


def test_index_keys_land_in_their_region_of_a_block(device, kernels):
    width, per_block, offset = 32, 8, 100
    raw, norm = torch.randn(4, width, device=device).bfloat16(), torch.ones(width, device=device).bfloat16()
    block, place = torch.tensor([2, 0, 2, 1], device=device), torch.tensor([7, 0, 3, 5], device=device)
    found = []
    for run in (kernels.store_keys, STORE_INDEX_KEYS.reference):
        blocks = torch.zeros(3, 300, dtype=torch.uint8, device=device)
        run(raw, norm, EPS, angles(4, 8, device), IndexPlaces(blocks, offset, per_block, block, place))
        assert (blocks[:, :offset] == 0).all()
        assert (blocks[:, offset + per_block * index_row_bytes(width) :] == 0).all()
        middle = offset + per_block * width // 2
        data, scales = (
            blocks[:, offset:middle].unflatten(1, (per_block, -1)),
            blocks[:, middle : middle + per_block].unflatten(1, (per_block, -1)),
        )
        found.append(unpack_index_rows(torch.cat((data[block, place], scales[block, place]), -1), torch.float32))
    nearly(*found)


@pytest.mark.parametrize(("heads", "width"), [(16, 32), (5, 128)])
def test_index_queries_are_rotated_and_rounded(device, kernels, heads, width):
    q = torch.randn(3, heads, width, device=device).bfloat16()
    q[0, 0] = 0
    rot = angles(3, width // 4, device)
    nearly(kernels.queries(q.clone(), rot).float(), INDEX_QUERIES.reference(q.clone(), rot).float())


def test_fp32_runs_the_reference(device, kernels):
    q, rot = torch.randn(2, 4, 32, device=device), angles(2, 8, device)
    assert torch.equal(kernels.queries(q.clone(), rot), INDEX_QUERIES.reference(q.clone(), rot))
