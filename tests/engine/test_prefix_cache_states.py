"""States beyond the end of a prompt, waiting for a prefix in progress, and damage that must be noticed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.cache_contract import PlanKind
from engine.cache_start import build_prefix_cache
from engine.errors import ConfigError
from engine.prefix_cache import PrefixCache
from engine.request import FinishReason, Request, SamplingParams, Sequence
from hicache.config import HiCacheConfig
from hicache.index import StateReason
from hicache.policy import restore_cap
from hicache.restore_budget import RestoreBudget
from tests.engine.test_prefix_cache import FRAME, KEEP, _ids, admit, assert_idle, make_cache, prefill, run
from tests.hicache.fake_kv import FakeKV, make_sequence

SHARED = list(range(1000, 1060))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def herd_cache(clock: Clock, **knobs: object) -> PrefixCache:
    config = HiCacheConfig(min_restore_tokens=1, herd_min_tokens=16, audit="full", **knobs)  # type: ignore[arg-type]
    return PrefixCache(config, FakeKV(num_blocks=4000, num_state_slots=80), "model", KEEP, num_bytes=2000 * FRAME, clock=clock)  # type: ignore[arg-type]


def states(cache: PrefixCache) -> dict[int, str]:
    """Position -> reason of every state."""
    index = cache.cache.index
    found = [index.states.of[page] for page in index.pages() if index.states.of[page] >= 0]
    return {index.position[s]: StateReason(index.states.reason[s]).name for s in found}


def test_prompt_that_leaves_a_path_far_beyond_its_last_state_keeps_one_there_for_the_next() -> None:
    cache = make_cache()
    run(cache, SHARED + [1] * 60)
    assert run(cache, SHARED + [2] * 60).cached_tokens == 0
    assert states(cache)[60] == "FORK"
    assert run(cache, SHARED + [3] * 60).cached_tokens == 60
    assert_idle(cache)


def test_short_turns_keep_no_fork_states() -> None:
    cache = make_cache()
    tokens = list(SHARED)
    for turn in range(6):
        run(cache, tokens)
        tokens = tokens + [turn] * 3
    assert "FORK" not in states(cache).values()


def test_fork_states_of_one_path_are_limited() -> None:
    cache = make_cache(FakeKV(num_blocks=200), num_frames=2000, states_per_path=2)
    trunk = list(range(400))
    run(cache, trunk)
    for turn, length in enumerate((80, 160, 240, 320)):
        run(cache, trunk[:length] + [1000 + turn] * 60)
    forks = [p for p, reason in states(cache).items() if reason == "FORK"]
    assert len(forks) == 2


def test_first_prefill_of_an_anchored_prompt_keeps_a_state_at_the_anchor() -> None:
    cache = make_cache()

    def anchored(tail: int) -> Sequence:
        seq = make_sequence(next(_ids), SHARED + [tail] * 60)
        seq.request = Request("r", seq.token_ids, SamplingParams(), cache_anchor_tokens=len(SHARED) - 1)
        return seq

    first, second = anchored(1), anchored(2)
    admit(cache, first)
    assert first.checkpoints == [56]
    prefill(cache, first)
    cache.finish(first)
    admit(cache, second)
    assert second.cached_tokens == 56
    cache.finish(second)


def test_long_prompt_keeps_states_at_intervals() -> None:
    cache = make_cache(FakeKV(num_blocks=200), num_frames=2000, state_interval_tokens=40)
    trunk = list(range(200))
    run(cache, trunk)
    assert states(cache) == {40: "INTERVAL", 80: "INTERVAL", 120: "INTERVAL", 160: "INTERVAL", 192: "RESEND", 196: "TAIL"}
    assert run(cache, trunk[:130] + [1] * 60).cached_tokens == 120


@pytest.mark.parametrize("reason", [FinishReason.ABORT, None])
def test_cut_off_long_prefill_leaves_a_state_at_its_last_page_end(reason: FinishReason | None) -> None:
    cache = make_cache(FakeKV(num_blocks=2000), num_frames=3000)
    tokens = list(range(6000))
    seq = make_sequence(next(_ids), tokens)
    admit(cache, seq)
    prefill(cache, seq, chunk=1001, stop_after=5)
    seq.finish_reason = reason
    cache.finish(seq)
    assert states(cache) == {5004: "ABORT"}
    assert run(cache, tokens).cached_tokens == 5004
    assert_idle(cache)


def test_failed_prefill_leaves_no_state() -> None:
    cache = make_cache(FakeKV(num_blocks=2000), num_frames=3000)
    seq = make_sequence(next(_ids), list(range(6000)))
    admit(cache, seq)
    prefill(cache, seq, chunk=1000, stop_after=5)
    seq.finish_reason = FinishReason.ERROR
    cache.finish(seq)
    assert states(cache) == {}
    assert_idle(cache)


def herd(cache: PrefixCache, prompts: list[list[int]]) -> tuple[int, int]:
    """Serve equal prompts that arrive together, a chunk of each admitted one per round. Returns computed tokens and full prefills."""
    waiting = []
    for at, tokens in enumerate(prompts):
        seq = make_sequence(next(_ids), tokens, first_block=1 + at * 60)
        seq.state_slot = 1 + at
        waiting.append(seq)
    running: list[Sequence] = []
    computed = full = 0
    while waiting or running:
        for seq in list(waiting):
            plan = cache.plan(seq)
            if plan.kind is PlanKind.HOLD:
                cache.abandon(plan)
                continue
            cache.restore(seq, plan)
            seq.checkpoints = cache.checkpoints(seq)
            waiting.remove(seq)
            running.append(seq)
            full += seq.num_computed == 0
            computed += seq.prefill_len - seq.num_computed
        for seq in list(running):
            prefill(cache, seq, chunk=16, stop_after=1)
            if seq.num_computed == seq.prefill_len:
                cache.finish(seq)
                running.remove(seq)
    assert_idle(cache)
    assert len(cache._herd.in_flight) == 0
    return computed, full


def test_identical_prompts_that_arrive_together_prefill_once() -> None:
    cache = herd_cache(Clock())
    tokens = list(range(200))
    computed, full = herd(cache, [tokens] * 64)
    assert full == 1
    assert computed == 200 + 63 * (200 - 192)
    assert cache.stats()["holds_total"] == 63
    assert cache.stats()["held_requests"] == 0


def test_followers_with_other_endings_ask_for_a_state_where_they_part() -> None:
    cache = herd_cache(Clock())
    shared = list(range(150))
    computed, full = herd(cache, [shared + [900 + i] * 40 for i in range(64)])
    assert full == 1
    assert computed == 190 + 63 * (190 - 148)
    assert states(cache)[148] == "ASKED"


def test_follower_whose_parting_point_has_passed_does_not_wait_in_vain() -> None:
    cache = herd_cache(Clock())
    leader = make_sequence(next(_ids), list(range(200)))
    admit(cache, leader)
    prefill(cache, leader, chunk=160, stop_after=1)
    follower = make_sequence(next(_ids), list(range(150)) + [9] * 40)
    assert cache.plan(follower).kind is PlanKind.MISS
    for seq in (follower, leader):
        cache.finish(seq)
    assert_idle(cache)


def test_follower_goes_on_alone_when_its_producer_stalls_or_ends() -> None:
    clock = Clock()
    cache = herd_cache(clock)
    leader, follower = (make_sequence(next(_ids), list(range(200))) for _ in range(2))
    admit(cache, leader)
    assert cache.plan(follower).kind is PlanKind.HOLD
    assert cache.stats()["held_requests"] == 1
    clock.now = 2.5
    assert cache.plan(follower).kind is PlanKind.MISS
    clock.now = 0.0
    assert cache.plan(follower).kind is PlanKind.HOLD
    cache.finish(leader)
    assert cache.plan(follower).kind is PlanKind.MISS
    cache.finish(follower)
    assert cache.stats()["held_requests"] == 0
    assert_idle(cache)


def test_tenants_do_not_wait_for_each_other() -> None:
    cache = herd_cache(Clock())
    leader = make_sequence(next(_ids), list(range(200)), salt="a")
    admit(cache, leader)
    assert cache.plan(make_sequence(next(_ids), list(range(200)), salt="b")).kind is PlanKind.MISS


def test_explain_names_the_miss_and_the_first_differing_token() -> None:
    cache = make_cache()
    run(cache, SHARED)
    record = cache.explain([*SHARED[:33], 7, *SHARED[34:]])
    assert record["matched_pages"] == 8
    assert record["miss"] == "no_state"
    assert record["first_difference"]["index"] == 33
    assert record["first_difference"]["stored"][0] == SHARED[33]
    assert record["first_difference"]["asked"][0] == 7
    assert cache.explain(SHARED)["restore_tokens"] == 52
    assert cache.explain(SHARED)["first_difference"] is None
    assert cache.explain(SHARED, salt="other")["miss"] == "no_page"
    assert_idle(cache)


@pytest.mark.parametrize("kind", ["drop", "short"])
def test_lost_or_cut_store_copy_is_noticed_before_its_bytes_are_used(kind: str) -> None:
    cache = make_cache()
    cache.inject_fault(kind, count=1)
    run(cache, SHARED)
    assert run(cache, SHARED).cached_tokens == 0
    assert cache.stats()["checksum_errors_total"] == 1
    assert run(cache, SHARED).cached_tokens == 52


def test_late_restore_copy_changes_nothing_but_time() -> None:
    cache = make_cache()
    run(cache, SHARED)
    cache.inject_fault("delay", seconds=0.02)
    began = time.perf_counter()
    assert run(cache, SHARED).cached_tokens == 52
    assert time.perf_counter() - began >= 0.02


def test_unknown_fault_and_impossible_places_are_refused() -> None:
    cache = make_cache()
    run(cache, SHARED)
    for kind, where in (("melt", {}), ("flip", {"page": 99}), ("flip", {"target": "x"}), ("flip", {"byte": 10**6}), ("flip", {"count": 0})):
        with pytest.raises(ConfigError):
            cache.inject_fault(kind, **where)


def test_restores_beyond_the_steps_budget_wait_for_the_next_step() -> None:
    cache = make_cache(max_restore_bytes_per_step=1)
    run(cache, SHARED)
    first, second = (make_sequence(next(_ids), SHARED) for _ in range(2))
    cache.begin_step()
    assert admit(cache, first).kind is PlanKind.HIT
    assert cache.plan(second).kind is PlanKind.HOLD
    cache.begin_step()
    assert admit(cache, second).kind is PlanKind.HIT
    for seq in (first, second):
        cache.finish(seq)
    assert cache.stats()["holds_total"] == 0
    assert_idle(cache)


def test_restores_beside_decoding_wait_until_the_last_one_is_paid_off() -> None:
    clock = Clock()
    cache = herd_cache(clock)
    cache.lookup.budget = RestoreBudget(2**30, 0.05, 1e-6, clock)  # 1 kB/s
    run(cache, SHARED)
    first, second, other = (make_sequence(next(_ids), tokens) for tokens in (SHARED, SHARED, [*range(500, 560)]))
    cache.begin_step(decoding=True)
    assert admit(cache, first).kind is PlanKind.HIT
    for now in (1.0, 2.0):
        clock.now = now
        cache.begin_step(decoding=True)
        plan = cache.plan(second)
        assert (plan.kind, plan.reason) == (PlanKind.HOLD, "restore_budget")
        assert plan.match.path == []  # looked up only once it may be restored
        cache.abandon(plan)
    assert admit(cache, other).kind is PlanKind.MISS
    cache.begin_step(decoding=False)
    assert admit(cache, second).kind is PlanKind.HIT
    for seq in (first, second, other):
        cache.finish(seq)
    assert_idle(cache)


def test_time_spent_on_letting_go_of_a_restored_path_is_paid_off_as_well() -> None:
    clock = Clock()
    cache = herd_cache(clock)
    run(cache, SHARED)
    first, second = (make_sequence(next(_ids), SHARED) for _ in range(2))
    admit(cache, first)
    cache.lookup.budget = RestoreBudget(2**30, 0.05, 1.0, clock)
    cache.begin_step(decoding=True)
    assert not cache.lookup.budget.exhausted
    cache.finish(first)
    assert cache.plan(second).kind is PlanKind.HOLD  # the clock stands still, so nothing was paid
    cache.finish(second)
    assert_idle(cache)


def test_rings_that_lose_a_window_before_the_prefill_ends_are_refused() -> None:
    kv = FakeKV()
    kv.ring_rows = kv.window + kv.block_size + KEEP - 1
    with pytest.raises(AssertionError, match="are needed"):
        make_cache(kv)


class FakeLimits:
    def __init__(self, keep_tokens: int) -> None:
        self.keep_tokens, self.fingerprint = keep_tokens, "model"


def test_host_cache_without_decoder_truncation_is_refused_and_auto_turns_it_off() -> None:
    kv = FakeKV()
    with pytest.raises(ConfigError, match="yoco-keep-tokens"):
        build_prefix_cache(HiCacheConfig(size_gb=1), kv, FakeLimits(0))  # type: ignore[arg-type]
    assert build_prefix_cache(HiCacheConfig(), kv, FakeLimits(0)) is None  # type: ignore[arg-type]
    assert build_prefix_cache(HiCacheConfig(size_gb=0), kv, FakeLimits(KEEP)) is None  # type: ignore[arg-type]
    built = build_prefix_cache(HiCacheConfig(size_gb=0.001), kv, FakeLimits(KEEP))  # type: ignore[arg-type]
    assert built is not None
    assert built.mover.arena.num_bytes == int(0.001 * 2**30) // FRAME * FRAME


def test_refused_copy_is_computed_anew_and_loses_nothing() -> None:
    cache = make_cache()
    run(cache, SHARED)
    cache.inject_fault("refuse")
    assert run(cache, SHARED).cached_tokens == 0
    assert cache.stats()["miss_total"]["copy_error"] == cache.stats()["copy_errors_total"] == 1
    assert run(cache, SHARED).cached_tokens == 52
    cache.inject_fault("refuse")
    other = list(range(500, 560))
    run(cache, other)  # its first chunk is not stored, the next one brings those pages too
    assert_idle(cache)
    assert run(cache, other).cached_tokens == 52
    assert cache.stats()["switched_off"] == 0


def test_three_refused_copies_in_a_row_switch_the_cache_off_and_the_model_goes_on() -> None:
    cache = make_cache()
    run(cache, SHARED)
    cache.inject_fault("refuse", count=3)
    run(cache, list(range(500, 540)))
    assert cache.stats()["switched_off"] == 1
    assert run(cache, SHARED).cached_tokens == 0
    assert cache.stats()["copy_errors_total"] == 3
    assert_idle(cache)
    cache.close()


def test_compiled_map_of_pages_is_taken_into_use_in_the_middle_of_a_prefill_and_changes_nothing(tmp_path: Path) -> None:
    cache = make_cache(num_frames=80)
    run(cache, SHARED)
    seq = make_sequence(next(_ids), SHARED + list(range(60)))
    admit(cache, seq)
    prefill(cache, seq, stop_after=2)
    cache.index_compiled(tmp_path)
    cache.begin_step()
    if cache.cache.index.map.name == "python":
        pytest.skip("no compiler")
    prefill(cache, seq)
    cache.finish(seq)
    assert_idle(cache)
    assert run(cache, list(seq.token_ids)).cached_tokens == restore_cap(len(seq.token_ids), KEEP, 4)
    for number in range(20):
        run(cache, [number] * 50)
        assert_idle(cache)
    assert cache.cache.evicted_pages > 40
