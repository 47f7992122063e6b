"""How long the prefix cache keeps whose prefixes, what it admits, and what it says about those that are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cache_contract import PlanKind
from engine.prefix_cache import PrefixCache
from engine.request import FinishReason, Sequence
from hicache.page_tokens import PageTokens
from hicache.ranking import DEFAULT_PRIORITY
from tests.engine.test_prefix_cache import _ids, admit, assert_idle, device, make_cache, prefill, run
from tests.engine.test_prefix_cache_restart import PROMPTS, hits, kill, start
from tests.hicache.fake_kv import make_sequence

PROMPT = list(range(41))


def others(cache: PrefixCache, count: int, **options: object) -> None:
    for number in range(count):
        run(cache, [1000 + number] * 41, **options)


def answer(cache: PrefixCache, seq: Sequence, tokens: range) -> None:
    """Generate `tokens` and end."""
    seq.block_table += [60, 61, 62]
    seq.token_ids += [*tokens]
    device(cache).compute(seq, seq.num_computed, len(seq.token_ids) - 1)
    seq.num_computed, seq.finish_reason = len(seq.token_ids) - 1, FinishReason.STOP
    cache.finish(seq)


def misses(cache: PrefixCache) -> dict[str, int]:
    return {reason: count for reason, count in cache.stats()["miss_total"].items() if count}


# -- priorities ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priority", "hit"), [(90, 32), (DEFAULT_PRIORITY, 0)])
def test_prompt_of_raised_priority_hits_after_pressure_that_evicts_others(priority: int, hit: int) -> None:
    cache = make_cache(num_frames=60)
    run(cache, PROMPT, priority=priority)
    others(cache, 12)
    assert run(cache, PROMPT).cached_tokens == hit
    assert_idle(cache)


def test_prompt_of_lowest_priority_leaves_the_others_where_they_are() -> None:
    cache = make_cache(num_frames=60)
    run(cache, PROMPT)
    others(cache, 12, priority=0)
    assert run(cache, PROMPT).cached_tokens == 32
    assert_idle(cache)


def test_priority_ends_with_its_time() -> None:
    now = [0.0]
    cache = make_cache(num_frames=60, clock=lambda: now[0])
    run(cache, PROMPT, priority=90, seconds=5.0)
    assert cache.stats()["priority_pages"] == {"low": 0, "default": 0, "high": 10}
    now[0] = 5.0
    cache.begin_step()
    assert cache.stats()["priority_pages"] == {"low": 0, "default": 10, "high": 0}
    others(cache, 12)
    assert run(cache, PROMPT).cached_tokens == 0


def test_waiting_or_stale_sequences_raise_nothing() -> None:
    cache = make_cache()
    run(cache, PROMPT)
    waiting = make_sequence(next(_ids), PROMPT, priority=90)
    cache.abandon(cache.plan(waiting))
    cache.finish(waiting)
    assert cache.explain(PROMPT)["priority"] == DEFAULT_PRIORITY
    running = make_sequence(next(_ids), PROMPT, priority=90)
    admit(cache, running)
    cache.reset()
    cache.finish(running)
    assert cache.stats()["priority_pages"]["high"] == 0
    assert_idle(cache)


def test_aborted_prefill_keeps_its_pages_at_its_priority() -> None:
    cache = make_cache()
    seq = make_sequence(next(_ids), PROMPT, priority=90)
    admit(cache, seq)
    prefill(cache, seq, stop_after=1)
    cache.finish(seq)
    assert cache.stats()["priority_pages"]["high"] == 2


def test_explain_tells_the_priority_of_what_it_finds() -> None:
    cache = make_cache()
    assert cache.explain(PROMPT)["priority"] is None
    run(cache, PROMPT, priority=77)
    assert cache.explain(PROMPT)["priority"] == 77


def test_priorities_survive_a_killed_rank(tmp_path: Path) -> None:
    first = start(tmp_path, num_frames=60)
    run(first, PROMPTS[0], priority=90)
    run(first, PROMPTS[1])
    run(first, PROMPTS[2], priority=0)
    kill(first)
    second = start(tmp_path, num_frames=60)
    assert second.stats()["priority_pages"] == first.stats()["priority_pages"] == {"low": 10, "default": 10, "high": 10}
    assert_idle(second)
    others(second, 12)
    assert hits(second, [PROMPTS[0], PROMPTS[1]]) == [32, 0]


# -- admission -------------------------------------------------------------------------------------------------------------


def test_pages_are_stored_at_second_sight_when_asked_for() -> None:
    cache = make_cache(store_threshold=2)
    assert [run(cache, PROMPT).cached_tokens for _ in range(3)] == [0, 0, 32]
    stats = cache.stats()
    assert stats["store_skipped_total"]["threshold"] == 10
    assert stats["stores_total"] == 10
    assert_idle(cache)


def test_follower_is_the_second_sight_of_its_leaders_pages() -> None:
    cache = make_cache(store_threshold=2, herd_min_tokens=8)
    leader, follower = (make_sequence(next(_ids), PROMPT) for _ in range(2))
    admit(cache, leader)
    plan = cache.plan(follower)
    assert plan.kind is PlanKind.HOLD
    cache.abandon(plan)
    prefill(cache, leader)
    cache.finish(leader)
    assert admit(cache, follower).restore_tokens == 32
    cache.finish(follower)
    assert_idle(cache)


def test_pages_that_are_seen_again_only_behind_their_chunk_count_nothing_twice() -> None:
    """The follower shares the leader's first pages, which the leader has passed unstored."""
    cache = make_cache(store_threshold=2, herd_min_tokens=8)
    leader, follower = make_sequence(next(_ids), PROMPT), make_sequence(next(_ids), [*PROMPT[:20], *range(900, 930)])
    admit(cache, leader)
    prefill(cache, leader, chunk=24, stop_after=1)
    cache._admission.see(cache.plan(follower).match.keys)
    prefill(cache, leader)
    stats = cache.stats()
    assert stats["stores_total"] == 5
    assert stats["store_skipped_total"]["threshold"] == 10
    assert stats["store_skipped_total"].get("pinned", 0) == 0
    for seq in (leader, follower):
        cache.finish(seq)
    assert_idle(cache)


@pytest.mark.parametrize("answered_too", [False, True])
def test_large_prompt_leaves_first_also_when_its_answer_is_stored(answered_too: bool) -> None:
    cache = make_cache(num_frames=60, store_decode="on" if answered_too else "off", scan_share=0.25)
    run(cache, PROMPT)
    seq = make_sequence(next(_ids), range(500, 580))
    admit(cache, seq)
    prefill(cache, seq)
    answer(cache, seq, range(600, 608))
    seq = make_sequence(next(_ids), [9] * 80)
    admit(cache, seq)
    prefill(cache, seq)
    cache.finish(seq)
    assert cache.stats()["evictions_total"] > 0
    assert run(cache, PROMPT).cached_tokens == 32
    assert_idle(cache)


def test_large_prompts_in_turn_do_not_push_one_another_out_for_ever() -> None:
    """Two of a third of the arena each, which is full of what nobody asks for any more."""
    cache = make_cache(num_frames=60, scan_share=0.25)
    others(cache, 12)
    prompts = [[token] * 73 for token in (3, 4)]
    for prompt in prompts * 2:
        run(cache, prompt)
    assert [run(cache, prompt).cached_tokens for prompt in prompts] == [64, 64]
    assert_idle(cache)


def test_session_that_grew_large_stays_when_its_answer_is_stored() -> None:
    cache = make_cache(num_frames=120, store_decode="on", scan_share=0.25)
    prompt = list(range(200))
    for length in (100, 200):
        seq = make_sequence(next(_ids), prompt[:length])
        admit(cache, seq)
        prefill(cache, seq)
        others(cache, 3)
        answer(cache, seq, range(900, 908))
    run(cache, [7] * 60)
    assert cache.stats()["evictions_total"] > 0
    assert run(cache, prompt).cached_tokens == 192
    assert_idle(cache)


def test_damaged_large_prompt_is_dropped_whole() -> None:
    """Its pages are given back with its last pin: there is nothing left to put last."""
    cache = make_cache(num_frames=60, scan_share=0.1)
    seq = make_sequence(next(_ids), range(500, 580))
    admit(cache, seq)
    prefill(cache, seq, chunk=40, stop_after=1)
    index = cache.cache.index
    cache.cache.drop(index.match(cache._keys.page_keys(list(seq.token_ids)))[3])
    cache.finish(seq)
    assert_idle(cache)
    others(cache, 8)
    assert_idle(cache)


# -- reasons ---------------------------------------------------------------------------------------------------------------


def cut_off(cache: PrefixCache, reason: FinishReason | None, chunks: int) -> None:
    seq = make_sequence(next(_ids), PROMPT)
    admit(cache, seq)
    prefill(cache, seq, stop_after=chunks)
    seq.finish_reason = reason
    cache.finish(seq)


@pytest.mark.parametrize(
    ("reason", "chunks", "miss"),
    [
        (FinishReason.ABORT, 2, "aborted"),
        (FinishReason.ABORT, 0, "aborted"),
        (None, 2, "no_state"),  # preempted: it comes back itself
        (FinishReason.ERROR, 2, "no_state"),
    ],
)
def test_miss_behind_an_aborted_prefill_says_so(reason: FinishReason | None, chunks: int, miss: str) -> None:
    cache = make_cache()
    cut_off(cache, reason, chunks)
    assert cache.explain(PROMPT)["miss"] == miss
    assert run(cache, PROMPT).cached_tokens == 0
    assert misses(cache)[miss] == 1
    assert run(cache, PROMPT).cached_tokens == 32


def test_prompt_that_parts_before_the_lost_states_is_no_victim_of_the_abort() -> None:
    cache = make_cache()
    cut_off(cache, FinishReason.ABORT, 2)
    assert cache.explain([*PROMPT[:16], *range(900, 930)])["miss"] == "no_state"


def test_abort_that_was_made_good_is_forgotten_when_the_prefix_is_evicted_later() -> None:
    cache = make_cache(num_frames=60)
    cut_off(cache, FinishReason.ABORT, 2)
    run(cache, PROMPT)
    others(cache, 12)
    assert cache.explain(PROMPT)["miss"] == "no_page"


def test_prefix_of_another_salt_is_named_within_one_key_only() -> None:
    cache = make_cache()
    run(cache, PROMPT, salt="key-a/one", scope="key-a")
    assert cache.explain(PROMPT, "key-a/two", "key-a")["miss"] == "tenant"
    assert cache.explain(PROMPT, "key-b/two", "key-b")["miss"] == "no_page"
    assert cache.explain(PROMPT, "key-a/two")["miss"] == "no_page"
    run(cache, PROMPT, salt="key-b/two", scope="key-b")
    run(cache, PROMPT, salt="key-a/two", scope="key-a")
    assert misses(cache) == {"no_page": 2, "tenant": 1}


# -- proof -----------------------------------------------------------------------------------------------------------------


def test_page_behind_the_key_of_other_tokens_is_dropped_by_the_full_audit_and_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collision cannot be had, so one page of the prompt is entered with tokens that differ in its middle."""
    store: Callable[..., None] = PageTokens.store

    def stored(self: PageTokens, frames: list[int], tokens: list[int]) -> None:
        wrong = list(tokens)
        wrong[5] = 999
        store(self, frames, wrong)

    cache = make_cache(audit="full")
    monkeypatch.setattr(PageTokens, "store", stored)
    run(cache, PROMPT)
    monkeypatch.setattr(PageTokens, "store", store)
    assert run(cache, PROMPT).cached_tokens == 0
    assert (cache.stats()["token_errors_total"], misses(cache)["audit"]) == (1, 1)
    assert_idle(cache)
    assert run(cache, PROMPT).cached_tokens == 32


@pytest.mark.parametrize("audit", ["sampled", "full", "off"])
def test_wrong_ends_of_the_last_page_are_noticed_whatever_the_audit(audit: str) -> None:
    cache = make_cache(audit=audit)
    run(cache, PROMPT)
    path = cache.cache.index.match(cache._keys.page_keys(PROMPT))
    cache.cache.index.last_token[path[7]] = 999
    assert run(cache, PROMPT).cached_tokens == 0
    assert cache.stats()["token_errors_total"] == 1


def test_pages_that_replace_damaged_ones_count_as_new() -> None:
    cache = make_cache(eviction="slru")
    run(cache, PROMPT)
    index = cache.cache.index
    index.last_token[index.match(cache._keys.page_keys(PROMPT))[7]] = 999
    run(cache, PROMPT)
    assert cache.stats()["token_errors_total"] == 1
    assert index.ranks.num_protected == 7
    assert_idle(cache)


def test_adopted_pages_are_not_compared_with_tokens_that_nobody_knows(tmp_path: Path) -> None:
    first = start(tmp_path)
    hits(first, PROMPTS)
    kill(first)
    second = start(tmp_path)
    assert hits(second, PROMPTS) == [32] * len(PROMPTS)
    assert second.stats()["token_errors_total"] == 0


# -- figures ---------------------------------------------------------------------------------------------------------------


def test_pages_beyond_the_last_state_are_counted_as_unreachable() -> None:
    cache = make_cache(store_tail_state=False)
    run(cache, PROMPT)
    assert cache.stats()["pages_unreachable"] == 2  # the state lies at 32 of 40
    index = cache.cache.index
    cache.cache.remove_state(index.states.on(index.match(cache._keys.page_keys(PROMPT)))[0], "test")
    assert cache.stats()["pages_unreachable"] == 10


def test_times_are_sorted_into_buckets_that_end_with_all_of_them() -> None:
    cache = make_cache()
    for _ in range(3):
        run(cache, PROMPT)
    stats = cache.stats()
    assert list(stats["restore_seconds_buckets_total"].values())[-1] == 2
    buckets = list(stats["store_seconds_buckets_total"].values())
    assert buckets == sorted(buckets)
    assert stats["transfer"] == {cache.mover.transfer.name: 1}


def test_sequence_is_the_same_for_all_its_plans() -> None:
    """Keys are made once, also when planning is repeated."""
    cache = make_cache()
    seq: Sequence = make_sequence(next(_ids), PROMPT)
    first = cache.plan(seq).match.keys
    assert cache.plan(seq).match.keys is first
    cache.finish(seq)
