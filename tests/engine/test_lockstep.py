"""Groups of simulated ranks: equal step kinds, votes, waits, stopping together."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import StepKind
from engine.prefill_gate import DECODE_PAUSE, VoteRule
from engine.prefill_queue import PATIENCE_S
from tests.engine.simulation import (
    FakeClock,
    drain,
    expected_tokens,
    finals_of,
    make_scheduler,
    make_sequence,
    run_ranks,
    run_step,
    tokens_of,
)


@settings(max_examples=15, deadline=None)
@given(
    size=st.sampled_from([2, 4]),
    seed=st.integers(0, 10**6),
    any_=st.sampled_from([1, 2, 20]),
    num_blocks=st.sampled_from([9, 24]),
    rule=st.sampled_from(list(VoteRule)),
)
def test_all_ranks_run_the_same_kind_of_step_and_stop_together(size, seed, any_, num_blocks, rule):
    def rank_main(group):
        rng = random.Random(f"{seed}/{group.rank}")
        scheduler = make_scheduler(group, any_=any_, attempt=5, num_blocks=num_blocks, rule=rule)
        kinds, outputs, sent = [], [], {}
        for step_number in range(1500):
            if step_number < 60 and rng.random() < 0.2 and group.rank != 1:  # rank 1 stays idle all the time
                seq = make_sequence(f"{group.rank}-{step_number}", rng.randint(1, 30), rng.randint(1, 12))
                sent[seq.request.request_id] = seq
                scheduler.add(seq)
            if step_number < 60 and sent and rng.random() < 0.03:
                scheduler.abort(rng.choice(list(sent)))
            step, new = run_step(scheduler)
            outputs += new
            kinds.append(("idle" if step.idle else step.kind.value, scheduler.gate.decode_step))
        return kinds, outputs, sent

    results = run_ranks(size, rank_main)
    assert all(kinds == results[0][0] for kinds, _, _ in results)
    assert results[0][0][-1][0] == "idle"
    assert results[1][1] == []
    for _, outputs, sent in results:
        for name, seq in sent.items():
            assert len(finals_of(outputs, name)) == 1
            tokens = tokens_of(outputs, name)
            assert tokens == expected_tokens(seq, 48)[: len(tokens)]


def prompt_steps(rule: VoteRule, any_: int, num_steps: int, *, busy: bool) -> list[int]:
    """Which steps of two ranks are prompt steps while rank 0 has one prompt of three chunks; busy: the other one decodes all the time."""

    def rank_main(group):
        scheduler = make_scheduler(group, any_=any_, rule=rule)
        if group.rank == 0:
            scheduler.add(make_sequence("long", 40, max_tokens=1))
        elif busy:
            scheduler.add(make_sequence("other", 1, max_tokens=400, ignore_eos=True))
        return [run_step(scheduler)[0].kind for _ in range(num_steps)]

    kinds = run_ranks(2, rank_main)
    assert kinds[0] == kinds[1]
    return [i for i, kind in enumerate(kinds[0]) if kind is StepKind.PREFILL]


@pytest.mark.parametrize("any_", [1, 2, 100])
def test_under_the_rule_of_the_reference_every_chunk_waits_for_the_any_interval(any_: int):
    # Both ranks want the first step; from then on rank 0 is alone with its chunks.
    assert prompt_steps(VoteRule.REFERENCE, any_, 2 * any_ + 3, busy=True) == [0, any_ + 1, 2 * (any_ + 1)]
    first = any_  # nobody else wants even that one
    assert prompt_steps(VoteRule.REFERENCE, any_, 3 * any_ + 3, busy=False) == [first, first + any_ + 1, first + 2 * (any_ + 1)]


@pytest.mark.parametrize("any_", [1, 2, 100])
def test_a_prompt_in_progress_leaves_two_decode_steps_to_others_and_waits_for_no_interval(any_: int):
    pause = min(any_, DECODE_PAUSE)
    assert prompt_steps(VoteRule.INTERVALS, any_, 2 * any_ + 9, busy=True) == [0, pause + 1, 2 * (pause + 1)]


@pytest.mark.parametrize("any_", [1, 2, 100])
def test_an_isolated_prompt_of_several_chunks_waits_once(any_: int):
    assert prompt_steps(VoteRule.INTERVALS, any_, any_ + 3, busy=False) == [any_, any_ + 1, any_ + 2]


@pytest.mark.parametrize("any_", [2, 100])
def test_an_isolated_prompt_waits_exactly_the_any_interval_from_a_cold_start(any_: int):
    def rank_main(group):
        scheduler = make_scheduler(group, any_=any_)
        if group.rank == 0:
            scheduler.add(make_sequence("a", 4, max_tokens=1))
        return [run_step(scheduler)[0].kind for _ in range(any_ + 1)]

    for kinds in run_ranks(2, rank_main):
        assert kinds == [StepKind.DECODE] * any_ + [StepKind.PREFILL]


def test_a_failed_second_vote_does_not_reset_the_count():
    def rank_main(group):
        scheduler = make_scheduler(group, any_=2, max_num_seqs=1)
        scheduler.add(make_sequence(f"run-{group.rank}", 2, max_tokens=30, ignore_eos=True))
        run_step(scheduler)
        scheduler.add(make_sequence(f"wait-{group.rank}", 2))  # wanted at every vote, but the only place is taken
        steps = []
        for _ in range(7):
            kind = run_step(scheduler)[0].kind
            steps.append((kind, scheduler.gate.decode_step))
        return steps

    for steps in run_ranks(2, rank_main):
        assert steps == [(StepKind.DECODE, n) for n in range(1, 8)]


def test_a_rank_without_work_joins_prompt_steps_with_an_empty_one():
    def rank_main(group):
        scheduler = make_scheduler(group, any_=1)
        if group.rank == 0:
            scheduler.add(make_sequence("a", 4, max_tokens=1))
        run_step(scheduler)
        step, outputs = run_step(scheduler)
        return step.kind, len(step.seqs), len(outputs)

    assert run_ranks(2, rank_main) == [(StepKind.PREFILL, 1, 1), (StepKind.PREFILL, 0, 0)]


def test_waves_of_prompts_on_all_ranks_prefill_at_once():
    def rank_main(group):
        scheduler = make_scheduler(group)
        for i in range(2):
            scheduler.add(make_sequence(f"{group.rank}-{i}", 16, max_tokens=3, ignore_eos=True))
        kinds = [run_step(scheduler)[0].kind for _ in range(2)]
        drain(scheduler)
        return kinds

    assert run_ranks(3, rank_main) == [[StepKind.PREFILL] * 2] * 3


def test_an_urgent_prompt_alone_in_the_group_starts_at_once_and_so_do_its_chunks():
    def rank_main(group):
        scheduler = make_scheduler(group, rule=VoteRule.URGENT)
        if group.rank == 0:
            scheduler.add(make_sequence("long", 40, max_tokens=1))  # three chunks
        return [run_step(scheduler)[0].kind for _ in range(3)]

    assert run_ranks(4, rank_main) == [[StepKind.PREFILL] * 3] * 4


def test_urgent_chunks_leave_two_decode_steps_to_those_who_decode():
    def rank_main(group):
        scheduler = make_scheduler(group, rule=VoteRule.URGENT)
        if group.rank == 1:
            scheduler.add(make_sequence("other", 1, max_tokens=400, ignore_eos=True))
        run_step(scheduler)
        if group.rank == 0:
            scheduler.add(make_sequence("long", 40, max_tokens=1))
        return [run_step(scheduler)[0].kind for _ in range(9)]

    wanted = [StepKind.DECODE, StepKind.DECODE, StepKind.PREFILL] * 3
    assert run_ranks(2, rank_main) == [wanted] * 2


def test_a_prompt_that_is_not_urgent_waits_until_it_is():
    clock = FakeClock()

    def rank_main(group):
        scheduler = make_scheduler(group, rule=VoteRule.URGENT, clock=clock)
        scheduler.add(make_sequence(f"run-{group.rank}", 2, max_tokens=40, ignore_eos=True))
        run_step(scheduler)
        if group.rank == 0:
            scheduler.add(make_sequence("late", 2, max_tokens=1))
        kinds = [run_step(scheduler)[0].kind for _ in range(5)]
        group.max([0])
        clock.now = 1.0 + PATIENCE_S + 0.001
        group.max([0])
        return [*kinds, run_step(scheduler)[0].kind]

    assert run_ranks(2, rank_main) == [[StepKind.DECODE] * 5 + [StepKind.PREFILL]] * 2
