from functools import partial
from itertools import product

import pytest
import torch

from engine.ops.cache_rows import pack_entry_rows, pack_window_rows, unpack_entry_rows, unpack_window_rows
from engine.ops.rope import plain_frequencies, rotation
from engine.ops.row_attention import ROW_ATTENTION, PackedKeys, row_attention

LIMIT = ROW_ATTENTION.tolerance.bf16
GOLDEN, REAL = (4, 64, 16), (64, 512, 64)  # heads, width, rotary part


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def kernel(device):
    from engine.ops.triton.row_attention import launch

    return launch


class Problem:
    """Random rows and indices; `sources` says how many keys of which kind each query may name."""

    def __init__(self, device, num_queries, shape=GOLDEN, window=16, entries=12, num_rows=40, second="entries", scale=1.0):
        heads, width, rotary = shape
        self.q = torch.randn(num_queries, heads, width, device=device).bfloat16()
        self.rot = rotation(torch.arange(num_queries, device=device) * 37 + 5, plain_frequencies(rotary, 10_000.0).to(device))
        self.sink = torch.randn(heads, device=device)
        pack = pack_entry_rows if second == "entries" else pack_window_rows
        self.sources = [self._keys(pack_window_rows, num_rows, width, num_queries, window, scale, device)]
        if entries is not None:
            self.sources.append(self._keys(pack, num_rows, width, num_queries, entries, scale, device))

    @staticmethod
    def _keys(pack, num_rows, width, num_queries, count, scale, device):
        index = torch.randint(-1, num_rows, (num_queries, count), dtype=torch.int32, device=device)
        return PackedKeys(pack(torch.randn(num_rows, width, device=device) * scale), index)

    def run(self, function, splits=0):
        return function(self.q.clone(), self.rot, self.sources, self.sink, self.q.shape[2] ** -0.5, splits)

    def error(self, function, splits=0):
        """Largest error relative to each row's largest value."""
        got, want = self.run(function, splits).float(), self.run(ROW_ATTENTION.reference).float()
        assert got.isfinite().all()
        return ((got - want).abs().amax((1, 2)) / want.abs().amax((1, 2)).clamp(min=1e-9)).max().item()


def test_reference_is_the_explicit_sum_over_unpacked_rows():
    problem = Problem("cpu", 3)
    problem.q, cos_sin = problem.q.float(), problem.rot
    got = problem.run(row_attention)
    for t in range(3):
        rows = [
            unpack(s.rows, torch.float32)[s.index[t][s.index[t] >= 0].long()]
            for s, unpack in zip(problem.sources, (unpack_window_rows, unpack_entry_rows), strict=True)
        ]
        keys = torch.cat(rows)
        q = problem.q[t].clone()
        pairs = torch.view_as_complex(q[:, -16:].unflatten(-1, (-1, 2)).contiguous()) * cos_sin[t]
        q[:, -16:] = torch.view_as_real(pairs).flatten(-2)
        weights = (q @ keys.T / 8).exp()
        out = weights @ keys / (weights.sum(1) + problem.sink.exp())[:, None]
        pairs = torch.view_as_complex(out[:, -16:].unflatten(-1, (-1, 2)).contiguous()) * cos_sin[t].conj()
        out[:, -16:] = torch.view_as_real(pairs).flatten(-2)
        assert (got[t] - out).abs().max() <= 1e-5


@pytest.mark.parametrize("splits", [0, 1, 2, 5])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_kernel_agrees_with_the_reference(device, kernel, num_queries, splits):
    assert Problem(device, num_queries).error(kernel, splits) <= LIMIT


@pytest.mark.parametrize(
    "changes",
    [
        {"entries": None},
        {"second": "window", "entries": 4},
        {"window": 1, "entries": 1},
        {"window": 33, "entries": 75},
        {"scale": 200.0},
        {"scale": 1e-5},
        {"shape": (20, 128, 32)},
        {"shape": (3, 64, 8)},
    ],
)
def test_kernel_agrees_on_odd_sizes_and_extreme_values(device, kernel, changes):
    assert Problem(device, 3, **changes).error(kernel, 2) <= LIMIT


def test_rows_without_keys_are_zero_and_absent_keys_may_hold_anything(device, kernel):
    problem = Problem(device, 3)
    for source in problem.sources:
        source.index[0] = -1
        source.index[source.index == 0] = -1
        source.rows[0] = 0xFF
    for splits in (1, 3):
        got = problem.run(kernel, splits)
        assert (got[0] == 0).all()
        assert got.isfinite().all()
    assert problem.run(ROW_ATTENTION.reference).isfinite().all()
    empty = Problem(device, 0)
    assert empty.run(kernel).shape == empty.q.shape


def test_the_sink_takes_its_share(device, kernel):
    problem = Problem(device, 2)
    problem.sink[:] = 60.0
    assert problem.run(kernel).abs().max() < 1e-6
    problem.sink[:] = -60.0
    assert problem.error(kernel) <= LIMIT


def test_a_row_does_not_depend_on_its_batch_when_splits_are_fixed(device, kernel):
    problem = Problem(device, 6)
    together, twice = problem.run(kernel, 2), problem.run(kernel, 2)
    assert torch.equal(together, twice)
    for row in range(6):
        part = slice(row, row + 1)
        sources = [PackedKeys(s.rows, s.index[part].contiguous()) for s in problem.sources]
        alone = kernel(problem.q[part].clone(), problem.rot[part], sources, problem.sink, problem.q.shape[2] ** -0.5, 2)
        assert torch.equal(alone[0], together[row])


def test_fp32_and_odd_widths_run_the_reference(device, kernel, caplog):
    problem = Problem(device, 2)
    problem.q = problem.q.float()
    assert torch.equal(problem.run(kernel), problem.run(ROW_ATTENTION.reference))
    assert not caplog.records
    odd = Problem(device, 2, shape=(2, 96, 16))
    assert torch.equal(odd.run(kernel), odd.run(ROW_ATTENTION.reference))
    assert "no power of two" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("form", [{"decoders": 4}, {"decoders": 8}, {"decoders": 0}, {"hopper": False}])
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize(("num_queries", "window", "entries"), [(1, 128, 512), (8, 100, 300), (300, 128, 512), (3, 128, None), (2, 1, 1)])
def test_kernel_agrees_at_the_released_shape(device, kernel, num_queries, window, entries, splits, form):
    from engine.ops.triton.row_attention import Tuning

    problem = Problem(device, num_queries, REAL, window=window, entries=entries, num_rows=20_000)
    assert problem.error(partial(kernel, tuning=Tuning(**form)), splits) <= LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "entries"), [(128, 512), (128, 40), (128, None)])
@pytest.mark.parametrize("part_keys", [128, 320])
def test_a_program_with_all_parts_of_a_row_gives_the_bits_of_parts_apart(device, kernel, window, entries, part_keys):
    from engine.ops.triton.row_attention import Tuning

    problem = Problem(device, 150, REAL, window=window, entries=entries, num_rows=2000)
    for source in problem.sources:
        source.index[:4] = -1
    apart = problem.run(partial(kernel, tuning=Tuning(joined=0), part_keys=part_keys))
    assert torch.equal(problem.run(partial(kernel, tuning=Tuning(joined=1), part_keys=part_keys)), apart)
    assert problem.error(partial(kernel, part_keys=part_keys)) <= LIMIT


@pytest.mark.gpu
def test_released_shape_survives_absent_rows_and_extremes(device, kernel):
    problem = Problem(device, 3, REAL, window=128, entries=512, num_rows=2000, scale=100.0)
    for source in problem.sources:
        source.index[0] = -1
        source.index[source.index == 0] = -1
        source.rows[0] = 0xFF
    from engine.ops.triton.row_attention import Tuning

    for splits, decoders in product((1, 5), (0, 4)):
        form = partial(kernel, tuning=Tuning(decoders=decoders))
        got = problem.run(form, splits)
        assert (got[0] == 0).all()
        assert torch.equal(got, problem.run(form, splits))
        assert got.isfinite().all()


def test_real_shape_in_the_interpreter(device, kernel):
    assert Problem(device, 1, REAL, window=128, entries=70, num_rows=300).error(kernel, 3) <= LIMIT


def test_wrong_rows_are_refused():
    problem = Problem("cpu", 2)
    problem.sources.reverse()
    with pytest.raises(ValueError, match="row_attention"):
        problem.run(row_attention)
