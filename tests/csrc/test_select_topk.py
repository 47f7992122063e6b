"""The top-k kernel, thread by thread on a CPU, against the plain definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.cuda.select_topk import Division, select_rows
from engine.ops.index_search import ascending
from engine.ops.select_topk import SELECT_TOPK
from tests.csrc.emulated import emulated_kernels

INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def run():
    return emulated_kernels()


def agrees(run, scores, k, count=None, blocks=1, dtype=torch.int32):
    """Whether both ways, the short one where it can be gone, give what the reference gives."""
    hidden = scores.clone()
    if count is not None:
        count = torch.tensor(count)
        hidden[torch.arange(scores.shape[1]) >= count[:, None]] = -INF
    wanted = ascending(SELECT_TOPK.reference(hidden, k)).to(dtype)
    ways = [select_rows(run, 0, scores, k, count, dtype, Division(256, blocks, lists)) for lists in (False, True)]
    assert all(way.dtype == dtype for way in ways)
    return all(torch.equal(way, wanted) for way in ways)


@pytest.mark.parametrize("blocks", [1, 2, 8])
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (7, 5), (300, 1), (1000, 64), (1003, 500), (40, 64)])
def test_picks_are_the_set_of_the_reference_in_ascending_order(run, columns, k, blocks):
    torch.manual_seed(columns)
    assert agrees(run, torch.randn(2, columns), k, blocks=blocks)


@pytest.mark.parametrize("blocks", [1, 4])
def test_scores_just_below_what_every_thread_has_are_not_picked(run, blocks):
    """As many above the rest as there are threads, one for each, and the rest so close that the first digits are the same."""
    scores = torch.full((1, 1024 * blocks), 1.001)
    scores[0, :256] = 1.005
    for k in (200, 256):
        assert agrees(run, scores, k, blocks=blocks)


@pytest.mark.parametrize("blocks", [1, 4])
def test_few_of_many_scores_are_picked_wherever_they_lie(run, blocks):
    """Large beside their differences, all but one alike, some not numbers: then a level tells few apart, or none."""
    torch.manual_seed(1)
    scores = torch.randn(6, 4099)
    scores[0] += 1e6
    scores[1] *= 1e-40
    scores[2] = 5.0
    scores[2, 4000] = 6.0
    scores[3, 17:30] = NAN
    scores[4, ::3] = INF
    scores[5, 100:] = -INF
    for k in (3, 120, 600):
        assert agrees(run, scores, k, blocks=blocks)


@pytest.mark.parametrize("blocks", [1, 4])
def test_ties_go_to_the_lower_index_across_threads_and_blocks(run, blocks):
    torch.manual_seed(0)
    scores = torch.cat((torch.randint(0, 3, (3, 700)).float(), torch.zeros(1, 700)))
    for k in (1, 70, 512):
        assert agrees(run, scores, k, blocks=blocks)


def test_scores_that_differ_in_their_last_bits_are_told_apart(run):
    bits = torch.tensor(1.0).view(torch.int32) + torch.randperm(900)
    assert agrees(run, bits.view(torch.float32)[None], 300, blocks=2)


def test_what_lies_behind_a_row_s_count_is_never_picked(run):
    torch.manual_seed(0)
    scores = torch.randn(5, 600)
    scores[1, 3:] = INF
    scores[4, 100:] = NAN
    for blocks in (1, 8):
        assert agrees(run, scores, 20, [0, 3, 64, 600, 100], blocks, torch.int64)


def test_rows_that_no_shared_memory_holds_give_the_same(run, monkeypatch):
    import engine.ops.cuda.select_topk as module

    torch.manual_seed(0)
    monkeypatch.setattr(module, "_MOST_ROOM", 64)
    scores = torch.randn(2, 1300)
    for blocks in (1, 4):
        assert agrees(run, scores, 200, [1300, 200], blocks)


def test_rows_may_lie_apart_and_begin_anywhere(run):
    torch.manual_seed(0)
    assert agrees(run, torch.randn(3, 803)[:, 2:], 90, blocks=2)
    assert select_rows(run, 0, torch.empty(0, 9), 4).shape == (0, 4)
    assert select_rows(run, 0, torch.empty(2, 0), 4).shape == (2, 0)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, INF, -INF]), min_size=1, max_size=20), st.integers(1, 8))
def test_signs_zeros_and_extremes_are_ordered_as_numbers(values, k):
    assert agrees(emulated_kernels(), torch.tensor([values]), k)


def test_rows_are_divided_so_that_the_device_is_busy_and_no_block_idle():
    assert Division.of(1, 65_536, 132).blocks == Division.of(33, 65_536, 132).blocks == 8
    assert Division.of(64, 65_536, 132).blocks == 4
    assert Division.of(1, 4096, 132).blocks == 2
    assert Division.of(4096, 16_384, 132).blocks == Division.of(1, 500, 132).blocks == 1
    assert Division.of(4096, 65_536, 132).blocks == 4  # shared memory holds a quarter of a row
