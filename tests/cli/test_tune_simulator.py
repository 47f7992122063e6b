"""The simulator of prompt steps: waits follow the interval, chunks pay it once, nothing is lost."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_cli.tune.simulator import SimulatedGroup, StepCosts, Workload, mean_wait_steps, simulate
from engine.prefill_gate import VoteRule
from tests.engine.simulation import make_scheduler, make_sequence, run_ranks, run_step

COSTS = StepCosts(vote_s=0.001, decode_s=0.010, decode_row_s=0.0, prompt_s=0.020, prompt_token_s=0.0)
LONE = Workload(prompt_tokens=128, output_tokens=1, count=5, think_s=1.0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("any_", "steps"), [(100, 100), (10, 10), (2, 2), (1, 1)])
def test_an_isolated_request_waits_one_any_interval(ranks: int, any_: int, steps: int) -> None:
    requests = simulate(LONE, SimulatedGroup(ranks=ranks, attempt=70, any_=any_, costs=COSTS))
    assert [request.waited_steps for request in requests] == [steps] * 5
    assert requests[0].ttft_s == pytest.approx(steps * 0.001 + 0.020 + 2 * 0.001)


def test_one_rank_never_waits() -> None:
    assert mean_wait_steps(simulate(LONE, SimulatedGroup(ranks=1, attempt=70, any_=100, costs=COSTS))) == 0


@pytest.mark.parametrize("any_", [100, 2])
def test_chunks_of_a_long_prompt_wait_again_under_the_rule_of_the_reference_only(any_: int) -> None:
    long = Workload(prompt_tokens=4096, output_tokens=1, count=1)
    group = SimulatedGroup(ranks=2, attempt=70, any_=any_, costs=COSTS, chunk_tokens=1024, rule=VoteRule.REFERENCE)
    (request,) = simulate(long, group)
    assert (request.waited_steps, request.paused_steps) == (any_, 3 * any_)
    assert request.ttft_s == pytest.approx(4 * (any_ * 0.001 + 0.020 + 0.002))
    (request,) = simulate(long, dataclasses.replace(group, rule=VoteRule.INTERVALS))
    assert (request.waited_steps, request.paused_steps) == (any_, 0)
    assert request.ttft_s == pytest.approx(any_ * 0.001 + 4 * (0.020 + 0.002))


def test_a_trace_gives_every_request_its_own_length() -> None:
    work = Workload(0, 0, 3, (0.0, 5.0, 10.0), trace=((64, 1), (4096, 5), (1, 3)))
    requests = simulate(work, SimulatedGroup(ranks=2, attempt=70, any_=2, costs=COSTS, chunk_tokens=1024))
    assert [len(request.gaps_s) for request in requests] == [0, 4, 2]
    assert requests[1].ttft_s == pytest.approx(requests[0].ttft_s + 3 * 0.022)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("chunks", [1, 5])
def test_at_interval_two_a_first_token_comes_within_prefill_and_two_decode_steps_per_chunk(ranks: int, decoding: bool, chunks: int) -> None:
    """The bound of `engine` G3: prefill + 2 decode steps + 50 ms. Each chunk leaves two steps to those who decode."""
    costs = StepCosts(vote_s=0.0005, decode_s=0.014, decode_row_s=0.0002, prompt_s=0.010, prompt_token_s=0.00003)
    long = 8192 * chunks
    arrivals = (*((0.0,) * (3 * ranks) if decoding else ()), 10.0)
    work = Workload(prompt_tokens=long, output_tokens=2000, count=len(arrivals), arrivals_s=arrivals)
    last = simulate(work, SimulatedGroup(ranks=ranks, attempt=70, any_=2, costs=costs))[-1]
    prefill = chunks * (costs.prompt(8192) + 2 * costs.vote_s)
    step = costs.decode(4) + costs.vote_s if decoding else costs.vote_s
    assert last.ttft_s <= prefill + chunks * 2 * step + 0.050
    assert last.waited_steps <= 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_urgent_prompts_need_no_interval_and_their_chunks_never_wait_on_an_idle_group(ranks: int) -> None:
    long = Workload(prompt_tokens=5 * 8192, output_tokens=1, count=1)
    (request,) = simulate(long, SimulatedGroup(ranks=ranks, attempt=70, any_=100, costs=COSTS, rule=VoteRule.URGENT))
    assert request.waited_steps == 0
    assert request.ttft_s == pytest.approx(5 * (0.020 + 2 * 0.001))


def test_urgent_prompts_wait_at_most_two_steps_of_those_who_decode() -> None:
    work = Workload(prompt_tokens=64, output_tokens=500, count=9, arrivals_s=(*(0.0,) * 8, 1.0))
    last = simulate(work, SimulatedGroup(ranks=2, attempt=70, any_=100, costs=COSTS, rule=VoteRule.URGENT))[-1]
    assert last.ttft_s <= 0.05 + 0.020 + 2 * (0.010 + 0.001) + 0.002 + 1e-9  # patience, since its rank decodes too
    intervals = simulate(work, SimulatedGroup(ranks=2, attempt=70, any_=100, costs=COSTS))[-1]
    assert intervals.ttft_s > last.ttft_s


def test_a_larger_interval_trades_the_wait_of_prompts_for_the_gaps_of_answers() -> None:
    work = Workload(prompt_tokens=64, output_tokens=200, count=12, arrivals_s=tuple(0.3 * i for i in range(12)))
    often = simulate(work, SimulatedGroup(ranks=2, attempt=1000, any_=2, costs=COSTS))
    seldom = simulate(work, SimulatedGroup(ranks=2, attempt=1000, any_=60, costs=COSTS))
    assert sum(r.ttft_s for r in often) < sum(r.ttft_s for r in seldom)
    assert sum(gap > 0.02 for r in often for gap in r.gaps_s) >= sum(gap > 0.02 for r in seldom for gap in r.gaps_s)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 4),
    attempt=st.integers(1, 80),
    any_=st.integers(1, 120),
    count=st.integers(1, 12),
    gap_ms=st.integers(0, 200),
    concurrency=st.integers(0, 5),
    tokens_per_step=st.sampled_from([1.0, 2.5]),
    rule=st.sampled_from(list(VoteRule)),
)
def test_every_request_ends_in_order_of_time(
    ranks: int, attempt: int, any_: int, count: int, gap_ms: int, concurrency: int, tokens_per_step: float, rule: VoteRule
) -> None:
    arrivals = tuple(i * gap_ms / 1e3 for i in range(count)) if concurrency == 0 else ()
    work = Workload(700, 9, count, arrivals, max(1, concurrency), 0.01)
    costs = StepCosts(0.001, 0.01, 0.001, 0.01, 0.0001, tokens_per_step=tokens_per_step)
    requests = simulate(work, SimulatedGroup(ranks=ranks, attempt=attempt, any_=any_, costs=costs, chunk_tokens=256, rule=rule))
    assert len(requests) == count
    for request in requests:
        assert request.first_s > request.at_s
        assert request.last_s == pytest.approx(request.first_s + sum(request.gaps_s))
        assert 1 + len(request.gaps_s) * tokens_per_step >= 9


@pytest.mark.parametrize("prompt", [8, 40])  # one chunk and three
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("rule", list(VoteRule))
@pytest.mark.parametrize("any_", [100, 7, 2])
def test_it_agrees_with_the_scheduler_of_the_engine(any_: int, rule: VoteRule, busy: bool, prompt: int) -> None:
    """Three scheduler threads in lockstep, one with one prompt, perhaps another that decodes: as many steps to its end as simulated."""
    wait = 0 if rule is VoteRule.URGENT else any_
    lead = wait + 2 if busy else 0  # the other one waits, has its prompt step, and decodes once

    def rank_main(group: object) -> int:
        scheduler = make_scheduler(group, any_=any_, rule=rule, max_model_len=400, num_blocks=120)  # type: ignore[arg-type]
        rank = group.rank  # type: ignore[attr-defined]
        if busy and rank == 0:
            scheduler.add(make_sequence("busy", 1, max_tokens=399, ignore_eos=True))
        for _ in range(lead):
            run_step(scheduler)
        if rank == 1:
            scheduler.add(make_sequence("lone", prompt, max_tokens=1))
        steps = 0
        while group.max([int(scheduler.has_work and rank == 1)])[0]:  # type: ignore[attr-defined]
            run_step(scheduler)
            steps += 1
        return steps

    taken = run_ranks(3, rank_main)
    group = SimulatedGroup(ranks=3, attempt=70, any_=any_, costs=COSTS, chunk_tokens=16, rule=rule)
    decoded_s = wait * COSTS.vote_s + COSTS.prompt(1) + 2 * COSTS.vote_s + COSTS.decode(1) + COSTS.vote_s
    arrivals = (0.0, decoded_s - 1e-6) if busy else (0.0,)
    request = simulate(Workload(0, 0, len(arrivals), arrivals, trace=((1, 399), (prompt, 1))[-len(arrivals) :]), group)[-1]
    chunks = -(-prompt // 16)
    assert taken == [request.waited_steps + request.paused_steps + chunks] * 3
