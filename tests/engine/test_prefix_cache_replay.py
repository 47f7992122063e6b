"""Prompts whose stored pages reach further than any window state: what a replay restores, computes, stores and reports."""

from __future__ import annotations

import random

import pytest

from engine.cache_contract import PlanKind
from engine.prefix_cache import PrefixCache
from engine.request import FinishReason, Sequence
from hicache.policy import restore_cap
from tests.engine.test_cache_answers import answered, next_turn
from tests.engine.test_prefix_cache import BLOCK, KEEP, _ids, admit, assert_idle, check_restored, make_cache, next_prompt, prefill, run
from tests.engine.test_prefix_cache_states import Clock, herd_cache, states
from tests.hicache.fake_kv import FakeKV, make_sequence

WINDOW = 4  # with three encoder layers: 4 tokens are replayed, or 3 * 3 + 1, which is three pages
TRUNK = list(range(1000, 1100))
REPLAYED = {"bounded": 4, "exact": 12}


def cache_with(mode: str, num_frames: int = 2000, **knobs: object) -> PrefixCache:
    return make_cache(FakeKV(num_blocks=240, window=WINDOW), num_frames, replay=mode, **knobs)


def edited(mark: int) -> list[int]:
    """The trunk with another tail: pages match up to token 80, and the only states lie behind that."""
    return TRUNK[:81] + [mark] * 40


@pytest.mark.parametrize("mode", ["bounded", "exact"])
def test_replay_restores_all_matching_pages_and_computes_the_last_of_them_again(mode: str) -> None:
    cache = cache_with(mode)
    run(cache, TRUNK)
    seq = make_sequence(next(_ids), edited(1))
    plan = admit(cache, seq)
    assert (plan.kind, plan.restore_tokens, plan.reason) == (PlanKind.HIT, 80 - REPLAYED[mode], f"{mode}_replay")
    assert (seq.num_computed, seq.swa_valid_start, seq.entries_start) == (plan.restore_tokens, plan.restore_tokens, 80)
    assert seq.cached_tokens == plan.restore_tokens
    assert seq.state_slot not in cache.mover._kv.loaded  # type: ignore[attr-defined]
    prefill(cache, seq)
    cache.finish(seq)
    stats = cache.stats()
    assert stats["hit_tokens_total"] == plan.restore_tokens
    assert stats["state_hits_total"] == {f"{mode}_replay": 1}
    assert stats["replayed_tokens_total"] == REPLAYED[mode]
    assert stats["restore_bytes_total"] == 20 * cache.mover.row_bytes
    assert_idle(cache)


def test_without_replay_the_same_prompt_computes_everything() -> None:
    cache = cache_with("off")
    run(cache, TRUNK)
    assert run(cache, edited(1)).cached_tokens == 0
    assert cache.stats()["replayed_tokens_total"] == 0


def test_exact_replay_leaves_the_state_that_the_next_prompt_resumes_at() -> None:
    cache = cache_with("exact")
    run(cache, TRUNK)
    run(cache, edited(1))
    assert states(cache)[80] == "FORK"
    assert run(cache, edited(2)).cached_tokens == 80
    assert run(cache, edited(1)).cached_tokens == restore_cap(len(edited(1)), KEEP, BLOCK)


def test_bounded_replay_stores_nothing_and_happens_once_at_a_page_end() -> None:
    cache = cache_with("bounded")
    run(cache, TRUNK)
    before = cache.stats()
    assert run(cache, edited(1)).cached_tokens == 76
    after = cache.stats()
    assert all(after[name] == before[name] for name in ("stores_total", "states", "states_written_total"))
    assert run(cache, edited(2)).cached_tokens == 0  # computed in full, so it leaves right pages and a state
    assert states(cache)[80] == "FORK"
    assert run(cache, edited(3)).cached_tokens == 80


@pytest.mark.parametrize(("mode", "hit"), [("bounded", 0), ("exact", 140)])
def test_answer_is_stored_unless_it_follows_an_approximate_window(mode: str, hit: int) -> None:
    cache = cache_with(mode)
    run(cache, TRUNK)
    before = cache.stats()["stores_total"]
    seq = answered(cache, edited(1), list(range(2000, 2020)))
    assert seq.entries_start == 80
    cache.finish(seq)
    assert (cache.stats()["stores_total"] > before) == (mode == "exact")
    assert next_turn(cache, seq) == hit
    assert_idle(cache)


@pytest.mark.parametrize(("mode", "length", "hit"), [("bounded", 64, 0), ("bounded", 68, 64), ("exact", 12, 0), ("exact", 16, 4)])
def test_replay_needs_a_gain(mode: str, length: int, hit: int) -> None:
    """Bounded: more than 16 windows, for a smaller gain is not worth its error. Exact: more than what it computes again."""
    cache = cache_with(mode)
    run(cache, TRUNK)
    assert run(cache, TRUNK[:length] + [1] * 40).cached_tokens == hit


@pytest.mark.parametrize(("length", "hit"), [(16, 0), (20, 8)])
def test_shortest_prefix_worth_restoring_counts_what_a_replay_spares(length: int, hit: int) -> None:
    cache = cache_with("exact", min_restore_tokens=8)
    run(cache, TRUNK)
    assert run(cache, TRUNK[:length] + [1] * 40).cached_tokens == hit


def test_replay_leaves_the_kept_tokens_to_compute() -> None:
    cache = cache_with("exact", store_tail_state=False)
    run(cache, TRUNK)
    assert run(cache, TRUNK[:89]).cached_tokens == restore_cap(89, KEEP, BLOCK) - REPLAYED["exact"]


def test_state_near_the_end_of_the_pages_is_better_than_a_replay() -> None:
    cache = cache_with("exact")
    run(cache, TRUNK)
    assert run(cache, TRUNK + [1] * 40).cached_tokens == 96


@pytest.mark.parametrize("mode", ["bounded", "exact"])
@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_prefill_that_ends_within_or_behind_a_replay_keeps_no_wrong_state(mode: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of short prefills are worth keeping here; `FakeKV` refuses to give out a wrong one."""
    monkeypatch.setattr("engine.cache_store.MIN_ABORT_TOKENS", BLOCK)
    cache = cache_with(mode)
    run(cache, TRUNK)
    seq = make_sequence(next(_ids), edited(1))
    admit(cache, seq)
    prefill(cache, seq, chunk=5, stop_after=chunks)
    seq.finish_reason = FinishReason.ABORT
    cache.finish(seq)
    assert_idle(cache)
    kept = [position for position, reason in states(cache).items() if reason == "ABORT"]
    assert kept == ([92] if (mode, chunks) == ("exact", 6) else [])


@pytest.mark.parametrize("mode", ["bounded", "exact"])
def test_preempted_replay_starts_over_with_clean_marks(mode: str) -> None:
    cache = cache_with(mode)
    run(cache, TRUNK)
    seq = make_sequence(next(_ids), edited(1))
    admit(cache, seq)
    first = seq.cached_tokens
    cache.finish(seq)
    cache.reset()
    admit(cache, seq)
    assert (seq.num_computed, seq.swa_valid_start, seq.entries_start, seq.cached_tokens) == (0, 0, 0, first)
    prefill(cache, seq)
    cache.finish(seq)


@pytest.mark.parametrize("fault", ["flip", "refuse"])
def test_damaged_page_or_failed_copy_turns_a_replay_into_a_full_prefill(fault: str) -> None:
    cache = cache_with("bounded")
    run(cache, TRUNK)
    cache.inject_fault("flip", page=3) if fault == "flip" else cache.inject_fault("refuse")
    seq = run(cache, edited(1))
    assert (seq.cached_tokens, seq.swa_valid_start, seq.entries_start) == (0, 0, 0)
    assert cache.stats()["replayed_tokens_total"] == 0
    assert cache.stats()["stores_total"] > 25  # what it computed is right and was stored
    assert_idle(cache)


def test_followers_wait_for_an_exact_replay_but_not_for_an_approximate_one() -> None:
    for mode, kind in (("exact", PlanKind.HOLD), ("bounded", PlanKind.MISS)):
        cache = herd_cache(Clock(), replay=mode)
        cache.mover._kv.window = WINDOW
        trunk = list(range(300))
        run(cache, trunk)
        leader, follower = (make_sequence(next(_ids), trunk[:200] + [7] * 150) for _ in range(2))
        admit(cache, leader)
        assert leader.entries_start == 200
        assert cache.plan(follower).kind is kind
        for seq in (leader, follower):
            cache.finish(seq)
        assert_idle(cache)


def test_explanation_tells_of_the_replay() -> None:
    cache = cache_with("exact")
    run(cache, TRUNK)
    record = cache.explain(edited(1))
    assert (record["restore_tokens"], record["matched_tokens"], record["miss"]) == (68, 80, "")
    assert record["replay"] == {"mode": "exact", "end": 80, "tokens": 12}
    assert cache.explain(TRUNK)["replay"] is None
    assert cache_with("off").explain(TRUNK)["replay"] is None


def short_window() -> FakeKV:
    """4 or 12 tokens are replayed, and more than 32 are gain enough for an approximation."""
    return FakeKV(num_blocks=240, window=2, num_encoder_layers=8)


def expected_start(cache: PrefixCache, tokens: list[int], mode: str) -> int:
    """The rule in its shortest form, from the index's own pages and states, with `short_window`."""
    index = cache.cache.index
    path, cap = index.match(cache._keys.page_keys(tokens)), restore_cap(len(tokens), KEEP, BLOCK)
    state = max([index.position[s] for s in index.states.on(path) if index.position[s] <= cap], default=0)
    end = min(len(path) * BLOCK, cap)
    if mode == "exact" and end - state > 12:
        return end - 12
    new = mode == "bounded" and end - state > 32 and cache._keys.page_keys(tokens)[end // BLOCK - 1] not in cache._replay._done
    return end - 4 if new else state


@pytest.mark.parametrize("mode", ["bounded", "exact"])
@pytest.mark.parametrize("seed", range(4))
def test_random_sessions_with_replays_restore_and_store_only_right_bytes_and_leak_nothing(seed: int, mode: str) -> None:
    """Several sequences at once in a small arena, aborts and abandoned plans. Wrong bytes in a stored page show at its next restore."""
    rng = random.Random(seed)
    cache = make_cache(short_window(), rng.choice((60, 90, 150)), replay=mode, state_slots=rng.choice((0, 4)))
    history: list[list[int]] = []
    running: list[Sequence] = []
    for _ in range(250):
        tokens = next_prompt(rng, history)
        slot = min({1, 2, 3, 4, 5, 6} - {s.state_slot for s in running})
        seq = make_sequence(next(_ids), tokens, first_block=31 * slot)
        seq.state_slot = slot
        expected = expected_start(cache, tokens, mode)
        plan = cache.plan(seq)
        assert plan.restore_tokens == expected
        if rng.random() < 0.2:
            cache.abandon(plan)
            continue
        cache.restore(seq, plan)
        seq.checkpoints = cache.checkpoints(seq)
        check_restored(cache, seq, seq.num_computed)
        running.append(seq)
        for other in running:
            prefill(cache, other, chunk=rng.choice((3, 9, 40)), stop_after=1)
        finished = [s for s in running if s.num_computed >= s.prefill_len or len(running) > 4 or rng.random() < 0.1]
        for done in finished:
            cache.finish(done)
        running = [s for s in running if s not in finished]
        cache.cache.check()
        history = [*history[-7:], tokens]
    for seq in running:
        cache.finish(seq)
    stats = cache.stats()
    assert stats["state_hits_total"][f"{mode}_replay"] > 0
    assert stats["checksum_errors_total"] == 0
    assert_idle(cache)
