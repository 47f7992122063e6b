"""Cost curves of a start: which steps are timed, how long that may take, and by which clock."""

import random
import time

import numpy as np
import pytest

from engine.batch import StepKind
from engine.step_timing import measure, step_timer
from tests.engine.fake_runner import FakeRunner
from tests.engine.test_speculation import LIMITS

PLACES = [(slot, [2 * slot, 2 * slot + 1]) for slot in range(1, 5)]


def test_measuring_covers_the_largest_step_and_leaves_the_runner_usable():
    now = iter(np.arange(0, 1e4, 0.001))
    runner = FakeRunner(LIMITS)
    cost = measure(runner, 5, PLACES, clock=lambda: next(now), budget_s=100.0)
    assert cost.verify_s(4, 20)[-1] == pytest.approx(0.001)
    rows = {sum(len(piece.token_ids) for piece in batch.slices) for batch in runner.batches}
    assert rows == {1, 2, 4, 8, 16, 24}
    assert {batch.kind for batch in runner.batches} == {StepKind.VERIFY}


def test_measuring_stops_when_its_time_is_over():
    now = iter(np.arange(0, 1e4, 0.2))
    runner = FakeRunner(LIMITS)
    measure(runner, 5, PLACES, clock=lambda: next(now), budget_s=1.0)
    assert {batch.num_tokens for batch in runner.batches} == {1, 2}


def test_a_curve_by_the_thread_s_own_time_does_not_see_neighbours():
    """The wall clock jumps as on a busy machine; the timer counts what the runs themselves cost."""
    runner, spent, rng = FakeRunner(LIMITS), [0.0], random.Random(1)
    run, draft = runner.run, runner.draft
    runner.run = lambda batch: (run(batch), spent.append(spent.pop() + 0.001 * batch.num_tokens))[0]
    runner.draft = lambda slices: (draft(slices), spent.append(spent.pop() + 0.002 * len(slices)))[0]
    cost = measure(runner, 5, PLACES, clock=lambda: rng.random(), timer=lambda: spent[0])
    assert [cost.plain_s(1), cost.verify_s(1, 5)[-1], cost.verify_s(4, 20)[-1]] == pytest.approx([0.001, 0.006, 0.024])
    assert cost.draft_s(3) == pytest.approx(0.006)
    assert step_timer("compiled") is time.thread_time
    assert step_timer("eager") is step_timer("graphs") is time.perf_counter
