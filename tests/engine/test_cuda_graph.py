"""Sizes of recorded steps, padding, and what happens when memory is short. Graphs themselves are tested on a GPU."""

import pytest
import torch

from engine.cuda_graph import CudaRecorder, NullRecorder, StepGraphs, bucket_sizes
from engine.errors import NotEnoughMemory


@pytest.mark.parametrize(
    ("limit", "interval", "wanted"),
    [
        (48, 8, [1, 2, 4, 8, 16, 24, 32, 40, 48]),
        (6, 8, [1, 2, 4, 6]),
        (1, 8, [1]),
        (5, 1, [1, 2, 3, 4, 5]),
        (9, 4, [1, 2, 4, 8, 9]),
    ],
)
def test_sizes_are_powers_of_two_then_multiples_of_the_interval(limit, interval, wanted):
    assert bucket_sizes(limit, interval) == wanted


def test_256_sequences_with_5_drafts_make_195_sizes_at_interval_8():
    assert len(bucket_sizes(256 * 6, 8)) == 195


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [(1, [1]), (7, [1, 2, 4, 7]), (64, [1, 2, 4, 8, 16, 24, 32, 48, 64]), (100, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100])],
)
def test_default_sizes_are_fine_below_64_and_coarse_above(limit, wanted):
    assert bucket_sizes(limit) == wanted


def test_sizes_are_recorded_from_large_to_small():
    order = []
    StepGraphs("decode", order.append, [1, 4, 2], NullRecorder())
    assert order == [4, 2, 1]


def test_step_runs_in_the_smallest_size_that_holds_it():
    ran = []
    graphs = StepGraphs("decode", ran.append, bucket_sizes(48, 8), NullRecorder())
    ran.clear()
    for rows in (1, 3, 8, 9, 41, 48):
        graphs.replay(graphs.size_for(rows))
    assert ran == [1, 4, 8, 16, 48, 48]
    with pytest.raises(AssertionError, match="49 rows"):
        graphs.size_for(49)


def test_too_little_memory_says_what_to_change():
    def step(size):
        if size == 2:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(NotEnoughMemory, match="2 rows") as caught:
        StepGraphs("decode", step, [1, 2, 4], NullRecorder())
    assert "enforce_eager" in caught.value.hint


@pytest.mark.gpu
def test_replay_of_every_size_equals_the_step_itself():
    x, out = torch.randn(16, 64, device="cuda"), torch.zeros(16, 64, device="cuda")

    def step(size):
        out[:size] = (x[:size] @ x[:size].T) @ x[:size]

    graphs = StepGraphs("test", step, bucket_sizes(16), CudaRecorder())
    for size in bucket_sizes(16):
        x.normal_()
        wanted = (x[:size] @ x[:size].T) @ x[:size]
        out.zero_()
        graphs.replay(size)
        assert torch.equal(out[:size], wanted)
        assert not out[size:].any()
