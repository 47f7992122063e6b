"""Draws of the native kernel on a GPU. Without one: tests/csrc/test_sample_rows.py, by the emulator."""

import pytest
import torch

from engine.draws import FIXED_ONE
from engine.ops.sample_rows import SAMPLE_ROWS, Draws, Filters, Mode, largest_rows

pytestmark = pytest.mark.gpu


@pytest.fixture
def native(device):
    from engine.ops.cuda.sample_rows import launch

    return launch


@pytest.fixture
def native_backend(native):
    before = SAMPLE_ROWS.backend
    SAMPLE_ROWS.use("cuda")
    yield
    SAMPLE_ROWS.use(before)


def draws(rows, filtered, first=0):
    """Rows of all modes by turns, and of filters: none, the nucleus, few ids, least probability."""
    generator = torch.Generator("cuda").manual_seed(first)
    turn = torch.arange(rows, device="cuda")
    numbers = torch.randint(0, 2**53, (rows,), device="cuda", generator=generator)
    nucleus = torch.where(turn // 3 % 4 == 1, int(0.9 * FIXED_ONE), 2 * FIXED_ONE)
    few = torch.where(turn // 3 % 4 == 2, 40, 2**31 - 1).int()
    least = torch.where(turn // 3 % 4 == 3, 0.05, 0.0)
    temperature = 0.5 + (turn % 5).float() / 4
    return Draws(temperature, (turn % 3).int(), numbers, Filters(nucleus, few, least) if filtered else None)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("num_ids", "width"), [(1, 1), (500, 503), (32_000, 32_000), (129_279, 129_280)])
def test_rows_draw_the_tokens_of_the_definition(native, num_ids, width, filtered):
    torch.manual_seed(0)
    logits = torch.randn(96, width, device="cuda") * 3
    wanted = draws(96, filtered)
    ids, best = native(logits, wanted, num_ids)
    want_ids, want_best = SAMPLE_ROWS.reference(logits, wanted, num_ids)
    # Probabilities are rounded in another order than the library's: of many rows one may lie on the edge.
    assert (ids != want_ids).sum() <= 1
    assert torch.equal(best, want_best)
    assert torch.equal(ids[wanted.modes == Mode.GREEDY], want_ids[wanted.modes == Mode.GREEDY])


@pytest.mark.parametrize("filtered", [False, True])
def test_a_row_gets_the_same_token_in_every_batch_and_run(native, filtered):
    torch.manual_seed(1)
    logits, wanted = torch.randn(300, 129_280, device="cuda") * 2, draws(300, filtered)
    together, _ = native(logits, wanted, 129_280)
    assert torch.equal(native(logits, wanted, 129_280)[0], together)
    for begin, end in ((0, 1), (1, 3), (17, 60)):
        filters = wanted.filters and Filters(
            *(part[begin:end] for part in (wanted.filters.top_p, wanted.filters.top_k, wanted.filters.min_p))
        )
        part = Draws(wanted.temperature[begin:end], wanted.modes[begin:end], wanted.numbers[begin:end], filters)
        assert torch.equal(native(logits[begin:end], part, 129_280)[0], together[begin:end])


def test_rows_without_a_finite_maximum_give_some_id_and_say_so(native):
    logits = torch.randn(12, 5000, device="cuda")
    logits[0:3, 77], logits[3:6, 4999], logits[6:9] = float("nan"), float("inf"), -float("inf")
    ids, best = native(logits, draws(12, False), 5000)
    assert best[:3].isnan().all()
    assert (best[3:6] == float("inf")).all()
    assert (best[6:9] == -float("inf")).all()
    assert ((ids >= 0) & (ids < 5000)).all()


@pytest.mark.parametrize("rows", [1, 8, 96])
@pytest.mark.parametrize("width", [7, 1000, 129_280])
def test_the_first_of_equal_largest_logits_is_taken_eagerly_and_recorded(native_backend, rows, width):
    """Few values, so that every row has ties, in rows that are parts of longer ones."""
    torch.manual_seed(rows + width)
    whole = torch.randint(-3, 4, (rows, width + 24), device="cuda").float()
    logits = whole[:, :width]
    want_best = logits.amax(-1)
    want_ids = (logits == want_best[:, None]).int().argmax(-1)
    ids, best = largest_rows(logits)
    assert torch.equal(ids, want_ids)
    assert torch.equal(best, want_best)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded, _ = largest_rows(logits)
    whole.copy_(whole.flip(0))
    graph.replay()
    assert torch.equal(recorded, want_ids.flip(0))
