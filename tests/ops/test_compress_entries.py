import pytest
import torch

from engine.ops.cache_rows import entry_row_bytes, index_row_bytes, unpack_entry_rows, unpack_index_rows
from engine.ops.compress_entries import COMPRESS_ENTRIES, INDEX_QUERIES, IndexKeys, IndexPlaces, PairSource
from engine.ops.rope import plain_frequencies, rotation

EPS = 1e-20


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


PER_BLOCK, OFFSET = 8, 100


class Caches:
    """What one implementation wrote for entries of one width: entry rows, and index keys in a region of some blocks."""

    def __init__(self, num_rows, width, key_width, device):
        self.rows = torch.zeros(num_rows, entry_row_bytes(width), dtype=torch.uint8, device=device)
        self.blocks = torch.zeros(3, OFFSET + PER_BLOCK * index_row_bytes(key_width) + 28, dtype=torch.uint8, device=device)
        self.key_width = key_width

    def entries(self):
        return unpack_entry_rows(self.rows, torch.float32)

    def keys(self, block, place):
        data = PER_BLOCK * self.key_width // 2
        end = OFFSET + PER_BLOCK * index_row_bytes(self.key_width)
        assert (self.blocks[:, :OFFSET] == 0).all()
        assert (self.blocks[:, end:] == 0).all()
        parts = [
            region.unflatten(1, (PER_BLOCK, -1))[block, place]
            for region in self.blocks[:, OFFSET:end].split([data, end - OFFSET - data], 1)
        ]
        return unpack_index_rows(torch.cat(parts, -1), torch.float32)


def both(kernels, projected, pairs, norm, rows, rot, num_rows, key_width=32):
    """The kernel's caches and the reference's, and the keys in them."""
    width, count, device = len(norm), len(rows), rows.device
    weight = (torch.randn(key_width, width, device=device) * width**-0.5).bfloat16()
    key_norm = (1 + 0.1 * torch.randn(key_width, device=device)).bfloat16()
    spots = torch.randperm(3 * PER_BLOCK, device=device)[:count]
    block, place = spots // PER_BLOCK, spots % PER_BLOCK
    caches = []
    for run in (kernels.compress, COMPRESS_ENTRIES.reference):
        cache = Caches(num_rows, width, key_width, device)
        run(
            projected,
            pairs,
            norm,
            EPS,
            rot,
            cache.rows,
            rows,
            IndexKeys(weight, key_norm, IndexPlaces(cache.blocks, OFFSET, PER_BLOCK, block, place)),
        )
        caches.append(cache)
    return caches, [cache.keys(block, place) for cache in caches]


@pytest.mark.parametrize(("loads", "width"), [(0, 64), (3, 64), (3, 256)])
def test_pairs_are_pooled_normalised_rotated_and_packed(device, kernels, loads, width):
    projected = torch.randn(9, 2 * width, device=device)
    partial = torch.randn(7, 2 * width, device=device)
    load = torch.tensor([5, 0, 2], device=device) if loads else None
    first = torch.tensor([1, 0, 2, 4, 6], device=device)
    last = torch.tensor([0, 3, 5, 7, 8], device=device)
    norm = (1 + 0.1 * torch.randn(width, device=device)).bfloat16()
    rows = torch.tensor([4, 9, 1, 0, 7], device=device)
    caches, keys = both(kernels, projected, PairSource(partial, load, first, last), norm, rows, angles(5, 8, device), 10)
    nearly(*(cache.entries() for cache in caches))
    nearly(*keys)
    assert (caches[0].rows[[2, 3, 5, 6, 8]] == 0).all()


@pytest.mark.parametrize("count", [1, 16, 17])
def test_programs_that_are_not_full_leave_the_rest_alone(device, kernels, count):
    width, step = 64, torch.arange(count, device=device)
    projected = torch.randn(2 * count, 2 * width, device=device)
    partial = torch.full((1, 2 * width), float("nan"), device=device)
    norm = torch.ones(width, device=device).bfloat16()
    pairs = PairSource(partial, None, 2 * step, 2 * step + 1)
    caches, keys = both(kernels, projected, pairs, norm, step.flip(0) + 1, angles(count, 8, device), count + 2)
    nearly(*(cache.entries() for cache in caches))
    nearly(*keys)
    assert (caches[0].rows[[0, count + 1]] == 0).all()
    written = (caches[0].blocks != 0).sum()
    assert written <= count * index_row_bytes(32)


def test_single_tokens_need_no_pairs(device, kernels):
    width = 128
    projected, norm = torch.randn(3, width, device=device).bfloat16(), torch.ones(width, device=device).bfloat16()
    projected[1] = 0
    rows = torch.tensor([2, 0, 1], device=device)
    caches, keys = both(kernels, projected, None, norm, rows, angles(3, 16, device), 3, key_width=64)
    nearly(*(cache.entries() for cache in caches))
    nearly(*keys)
    assert (keys[0][1] == 0).all()


def test_no_entries_are_no_launch(device, kernels):
    norm, none = torch.ones(64, device=device).bfloat16(), torch.zeros(0, dtype=torch.int64, device=device)
    caches, _ = both(kernels, torch.zeros(0, 64, device=device).bfloat16(), None, norm, none, angles(0, 16, device), 2)
    assert (caches[0].rows == 0).all()


@pytest.mark.parametrize(("heads", "width"), [(16, 32), (5, 128)])
def test_index_queries_are_rotated_and_rounded(device, kernels, heads, width):
    q = torch.randn(3, heads, width, device=device).bfloat16()
    q[0, 0] = 0
    rot = angles(3, width // 4, device)
    nearly(kernels.queries(q.clone(), rot).float(), INDEX_QUERIES.reference(q.clone(), rot).float())


def test_fp32_runs_the_reference(device, kernels):
    q, rot = torch.randn(2, 4, 32, device=device), angles(2, 8, device)
    assert torch.equal(kernels.queries(q.clone(), rot), INDEX_QUERIES.reference(q.clone(), rot))


def test_entries_that_nobody_wants_share_a_row_and_leave_the_others_alone(device, kernels):
    """A replay sends the entries that the cache has already to the dummy block."""
    count, width, key_width = 20, 64, 32
    projected, norm = torch.randn(count, width, device=device).bfloat16(), torch.ones(width, device=device).bfloat16()
    weight = torch.randn(key_width, width, device=device).bfloat16()
    wanted = torch.arange(count, device=device) >= 17
    rows = torch.where(wanted, torch.arange(count, device=device), 0)
    block, place = wanted.long() * 2, torch.arange(count, device=device) % PER_BLOCK
    caches = [Caches(count, width, key_width, device) for _ in range(2)]
    for run, cache in zip((kernels.compress, COMPRESS_ENTRIES.reference), caches, strict=True):
        keys = IndexKeys(weight, norm[:key_width], IndexPlaces(cache.blocks, OFFSET, PER_BLOCK, block, place))
        run(projected, None, norm, EPS, angles(count, 8, device), cache.rows, rows, keys)
    nearly(*(cache.entries()[17:] for cache in caches))
    nearly(*(cache.keys(block[17:], place[17:]) for cache in caches))
    assert all((cache.rows[1:17] == 0).all() for cache in caches)
    assert all((cache.blocks[1] == 0).all() for cache in caches)
    assert all(cache.entries()[0].isfinite().all() for cache in caches)
