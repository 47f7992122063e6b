"""Stored answers: the next turn resumes behind them, with the bytes and the tokens that a cold prefill would have made."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.engine import Engine
from engine.page_mover import BAD_STATE
from engine.prefix_cache import PrefixCache
from engine.request import FinishReason, Request, SamplingParams, Sequence
from hicache.config import HiCacheConfig
from hicache.policy import restore_cap
from tests.engine.test_prefix_cache import BLOCK, KEEP, _ids, admit, assert_idle, device, make_cache, prefill, run
from tests.engine.test_prefix_cache_model import BLOCK as MODEL_BLOCK
from tests.engine.test_prefix_cache_model import KEEP as MODEL_KEEP
from tests.engine.test_prefix_cache_model import make_config
from tests.hicache.fake_kv import FakeKV, make_sequence

PROMPT, ANSWER = list(range(1000, 1030)), list(range(2000, 2021))


def answered(
    cache: PrefixCache, prompt: list[int], answer: list[int], reason: FinishReason = FinishReason.STOP, *, decode: bool = True
) -> Sequence:
    """A sequence that has computed all of its answer but the last token. Not finished yet."""
    seq = make_sequence(next(_ids), prompt)
    seq.request = dataclasses.replace(seq.request, cache_decode=decode)
    seq.block_table = list(range(1, 2 + (len(prompt) + len(answer)) // BLOCK))
    admit(cache, seq)
    prefill(cache, seq)
    seq.token_ids += answer
    device(cache).compute(seq, seq.prefill_len // BLOCK * BLOCK, len(seq.token_ids) - 1)
    seq.num_computed, seq.finish_reason = len(seq.token_ids) - 1, reason
    return seq


def next_turn(cache: PrefixCache, seq: Sequence) -> int:
    """Cached tokens of a prompt that goes on behind an answer; its restored bytes are checked."""
    return run(cache, seq.token_ids + list(range(3000, 3000 + 4 * KEEP))).cached_tokens or 0


@pytest.mark.parametrize("count", [2, 3, 4, 6, 7, 21])
def test_next_turn_resumes_at_the_last_page_end_that_was_computed(count: int) -> None:
    cache = make_cache()
    seq = answered(cache, PROMPT, ANSWER[:count])
    cache.finish(seq)
    assert_idle(cache)
    assert next_turn(cache, seq) == (len(PROMPT) + count - 1) // BLOCK * BLOCK
    written = cache.stats()["states_written_total"].get("decode", 0)
    assert written == ((len(PROMPT) + count - 1) // BLOCK > (len(PROMPT) - 1) // BLOCK)


def test_prompt_without_a_whole_page_has_its_answer_stored_too() -> None:
    cache = make_cache()
    seq = answered(cache, PROMPT[:3], ANSWER)
    cache.finish(seq)
    assert next_turn(cache, seq) == 20


@pytest.mark.parametrize(
    ("mode", "decode", "reason", "stored"),
    [
        ("auto", True, FinishReason.STOP, True),
        ("auto", True, FinishReason.LENGTH, True),
        ("auto", True, FinishReason.ABORT, False),
        ("auto", True, FinishReason.ERROR, False),
        ("auto", True, None, False),  # preempted: nothing has ended
        ("auto", False, FinishReason.STOP, False),
        ("on", False, FinishReason.STOP, True),
        ("off", True, FinishReason.STOP, False),
    ],
)
def test_only_complete_answers_that_will_be_continued_are_stored(
    mode: str, decode: bool, reason: FinishReason | None, stored: bool
) -> None:
    cache = make_cache(store_decode=mode)
    seq = answered(cache, PROMPT, ANSWER, decode=decode)
    seq.finish_reason = reason
    pages = len(cache.cache.index)
    cache.finish(seq)
    assert (len(cache.cache.index) > pages) == stored
    cache.finish(seq)
    assert_idle(cache)
    assert next_turn(cache, seq) == (48 if stored else 28)


def test_answer_that_ends_after_a_reset_is_not_stored() -> None:
    cache = make_cache()
    seq = answered(cache, PROMPT, ANSWER)
    cache.reset()
    cache.finish(seq)
    assert_idle(cache)
    assert next_turn(cache, seq) == 0


def test_answer_that_went_on_from_pages_found_wrong_is_not_stored() -> None:
    cache = make_cache()
    long = PROMPT + list(range(1100, 1130))
    run(cache, long)
    seq = answered(cache, long + list(range(1200, 1240)), ANSWER)
    assert seq.cached_tokens
    frame = cache.cache.index.match(cache._keys.page_keys(long, ""))[0]
    cache.cache.drop(frame)
    cache.finish(seq)
    assert_idle(cache)
    assert next_turn(cache, seq) == 0
    again = answered(cache, long, ANSWER)
    cache.finish(again)
    assert next_turn(cache, again), "what is computed anew is stored"


def test_answer_that_went_on_from_a_state_found_wrong_is_not_stored() -> None:
    cache = make_cache()
    long = PROMPT + list(range(1100, 1130))
    run(cache, long)
    seq = answered(cache, long + list(range(1200, 1240)), ANSWER)
    other = cache.plan(make_sequence(next(_ids), long + list(range(1300, 1340))))
    cache._reader._drop(other.match, BAD_STATE)
    cache.abandon(other)
    cache.finish(seq)
    assert_idle(cache)
    assert "decode" not in cache.stats()["states_written_total"]


def test_request_that_must_not_be_stored_stores_no_answer_either() -> None:
    cache = make_cache()
    seq = answered(cache, PROMPT, ANSWER)
    seq.request = dataclasses.replace(seq.request, cache_write=False)
    pages = len(cache.cache.index)
    cache.finish(seq)
    assert len(cache.cache.index) == pages


def test_prompt_that_was_evicted_meanwhile_is_stored_again_with_its_answer() -> None:
    cache = make_cache(num_frames=40, scan_share=1.0)
    seq = answered(cache, PROMPT, ANSWER)
    blocks = device(cache).blocks.clone()
    for number in range(6):
        run(cache, [number] * 60)
    assert cache.cache.index.match(cache._keys.page_keys(PROMPT)) == []
    device(cache).blocks.copy_(blocks)
    device(cache).tokens_in_slot[seq.state_slot] = seq.token_ids[:-1]
    cache.finish(seq)
    assert_idle(cache)
    assert next_turn(cache, seq) == 48


def test_refused_copy_at_the_end_of_an_answer_loses_nothing_else() -> None:
    cache = make_cache()
    seq = answered(cache, PROMPT, ANSWER)
    cache.inject_fault("refuse")
    cache.finish(seq)
    assert_idle(cache)
    assert cache.stats()["copy_errors_total"] == 1
    assert next_turn(cache, seq) == 28


def test_frames_of_an_older_answers_state_go_first_when_frames_are_short() -> None:
    """A conversation of many turns in an arena of few frames keeps its newest states."""
    cache = make_cache(num_frames=60)
    seq = answered(cache, PROMPT, ANSWER)
    cache.finish(seq)
    for turn in range(4):
        seq = answered(cache, seq.token_ids + list(range(100 * turn, 100 * turn + 10)), ANSWER)
        assert (seq.cached_tokens or 0) == (seq.prompt_len - 10 - 1) // BLOCK * BLOCK
        cache.finish(seq)
        assert_idle(cache)
    assert cache.cache.evicted_frames["state/superseded"] > 0


def test_session_of_twenty_tool_calls_recomputes_what_is_new_and_one_page_on_average() -> None:
    cache, rng = make_cache(FakeKV(num_blocks=500), num_frames=900), random.Random(4)
    tokens, new = list(PROMPT), len(PROMPT)
    more: list[int] = []  # recomputed tokens of each turn beyond its new ones
    for _ in range(20):
        seq = answered(cache, tokens, [rng.randrange(9000) for _ in range(rng.randrange(5, 40))])
        cache.finish(seq)
        result = [rng.randrange(9000) for _ in range(rng.randrange(2 * KEEP, 60))]
        tokens = seq.token_ids + result
        more.append(seq.prompt_len - (seq.cached_tokens or 0) - new)
        new = len(result)
    assert sum(more) <= BLOCK * len(more)
    assert 0 < max(more) <= BLOCK


def serve(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], int]]:
    """(answer, cached tokens) of requests that run together."""
    running = len(prompts)
    found: list[tuple[list[int], int]] = [([], 0)] * len(prompts)
    for at, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(Request(str(at), prompt, params, cache_decode=True))
    while running:
        for output in engine.step():
            running -= output.finish_reason is not None
            answer, cached = found[int(output.request_id)]
            found[int(output.request_id)] = (answer + output.token_ids, cached or output.cached_tokens or 0)
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_conversations_of_a_real_model_say_the_same_and_resume_behind_their_answers(overlap: bool) -> None:
    config = dataclasses.replace(make_config(num_blocks=200, max_num_seqs=4), zero_overhead_scheduling=overlap)
    with_cache = Engine(config, HiCacheConfig(size_gb=0.004, audit="full", min_restore_tokens=MODEL_BLOCK))
    without = Engine(config, HiCacheConfig(size_gb=0))
    rng, resumed = random.Random(2), 0
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randrange(20, 90))] for _ in range(3)]
    lengths = [0] * len(prompts)
    for turn in range(4):
        expected, got = serve(without, prompts, 17 + 8 * turn), serve(with_cache, prompts, 17 + 8 * turn)
        for at, ((answer, cached), (right, _)) in enumerate(zip(got, expected, strict=True)):
            assert answer == right
            behind = max(0, lengths[at] - 1) // MODEL_BLOCK * MODEL_BLOCK
            assert cached == behind or behind > restore_cap(len(prompts[at]), MODEL_KEEP, MODEL_BLOCK) >= cached
            resumed += cached == behind > 0
            lengths[at] = len(prompts[at]) + len(answer)
            prompts[at] = prompts[at] + answer + [rng.randrange(3, 500) for _ in range(rng.choice((5, 30, 60)))]
    assert resumed >= 3
    cache = with_cache.cache
    assert isinstance(cache, PrefixCache)
    assert cache.counters.states_written["decode"] > 0
    assert_idle(cache)
