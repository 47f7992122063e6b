"""The prefix cache against a device whose bytes are functions of the tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from engine.cache_contract import PlanKind
from engine.errors import ConfigError
from engine.prefix_cache import PrefixCache
from engine.prefix_plan import Plan
from engine.request import Sequence
from hicache.config import HiCacheConfig
from hicache.host_pool import Owner
from hicache.policy import restore_cap
from tests.hicache.fake_kv import FakeKV, make_sequence

BLOCK, KEEP, FRAME = 4, 6, 4096


def make_cache(
    kv: FakeKV | None = None, num_frames: int = 200, clock: Callable[[], float] = time.monotonic, **knobs: object
) -> PrefixCache:
    config = HiCacheConfig(**{"min_restore_tokens": 1, "audit": "full", **knobs})  # type: ignore[arg-type]
    return PrefixCache(config, kv or FakeKV(), "model", KEEP, num_bytes=num_frames * FRAME, clock=clock)  # type: ignore[arg-type]


def device(cache: PrefixCache) -> FakeKV:
    return cache.mover._kv  # type: ignore[return-value]


def check_restored(cache: PrefixCache, seq: Sequence, tokens: int) -> None:
    """Every restored block and the window hold what a forward pass would have left there. A replay restores blocks only."""
    kv = device(cache)
    for block in range((seq.entries_start or tokens) // BLOCK):
        expected = kv.page_bytes(seq.token_ids[: (block + 1) * BLOCK])
        assert kv.blocks[seq.block_table[block]].equal(expected), f"block {block} holds other bytes"
    if tokens and not seq.entries_start:
        assert kv.loaded[seq.state_slot] == (tokens, bytes(kv.window_bytes(seq.token_ids[:tokens]).tolist()))


def admit(cache: PrefixCache, seq: Sequence) -> Plan:
    plan = cache.plan(seq)
    device(cache).blocks.fill_(0xEE)
    device(cache).loaded.pop(seq.state_slot, None)
    cache.restore(seq, plan)
    seq.checkpoints = cache.checkpoints(seq)
    check_restored(cache, seq, seq.num_computed)
    return plan


def prefill(cache: PrefixCache, seq: Sequence, chunk: int = 8, stop_after: int | None = None) -> None:
    while seq.num_computed < seq.prefill_len and (stop_after is None or stop_after > 0):
        end = min([seq.prefill_len, seq.num_computed + chunk, *(p for p in seq.checkpoints if p > seq.num_computed)])
        device(cache).compute(seq, seq.num_computed, end)
        cache.store_chunk(seq, seq.num_computed, end)
        seq.num_computed = end
        stop_after = None if stop_after is None else stop_after - 1


_ids = iter(range(1, 10**9))


def run(cache: PrefixCache, tokens: list[int], **options: object) -> Sequence:
    seq = make_sequence(next(_ids), tokens, **options)  # type: ignore[arg-type]
    admit(cache, seq)
    prefill(cache, seq)
    cache.finish(seq)
    return seq


def assert_idle(cache: PrefixCache) -> None:
    """Nothing is pinned, reserved or planned, and every frame is accounted for."""
    cache.cache.check()
    assert cache.cache.pool.count(Owner.RESERVED) == 0
    assert not cache._planned
    assert not cache._active
    assert all(cache.cache.index.ref[f] == 0 for f in cache.cache.index.pages())


def test_identical_prompt_resumes_at_the_last_page_end_that_leaves_keep_tokens() -> None:
    cache = make_cache()
    tokens = list(range(41))
    assert run(cache, tokens).cached_tokens == 0
    assert run(cache, tokens).cached_tokens == (41 - KEEP) // BLOCK * BLOCK
    assert_idle(cache)


def test_prompt_that_grew_by_keep_tokens_resumes_at_the_last_page_end_of_the_old_one() -> None:
    cache = make_cache()
    tokens = list(range(41))
    run(cache, tokens)
    assert run(cache, tokens + [900] * KEEP).cached_tokens == 40


def test_without_tail_states_a_grown_prompt_resumes_at_the_resend_point() -> None:
    cache = make_cache(store_tail_state=False)
    tokens = list(range(41))
    run(cache, tokens)
    assert run(cache, tokens + [900] * KEEP).cached_tokens == (41 - KEEP) // BLOCK * BLOCK


def test_prompt_too_short_to_keep_its_last_tokens_never_hits() -> None:
    cache = make_cache()
    short = list(range(BLOCK + KEEP - 1))
    run(cache, short)
    assert run(cache, short).cached_tokens == 0
    assert cache.stats()["miss_total"]["short"] == 2


def test_requests_that_bypass_the_cache_neither_read_nor_write() -> None:
    cache = make_cache()
    tokens = list(range(40))
    run(cache, tokens, read=False, write=False)
    assert len(cache.cache.index) == 0
    run(cache, tokens)
    assert run(cache, tokens, read=False).cached_tokens == 0
    stats = cache.stats()
    assert stats["lookups_total"] == 1
    assert stats["lookup_tokens_total"] == 40
    assert stats["miss_total"]["bypass"] == 2


def test_read_only_request_leaves_no_pages_behind() -> None:
    cache = make_cache()
    run(cache, list(range(40)))
    before = len(cache.cache.index)
    assert run(cache, list(range(40)) + [7] * 40, write=False).cached_tokens == 36
    assert len(cache.cache.index) == before
    assert_idle(cache)


def test_other_salt_meets_no_page() -> None:
    cache = make_cache()
    run(cache, list(range(40)), salt="a")
    assert run(cache, list(range(40)), salt="b").cached_tokens == 0
    assert run(cache, list(range(40)), salt="a").cached_tokens == 32


def test_reset_forgets_every_prefix_and_running_sequences_store_nothing_more() -> None:
    cache = make_cache()
    tokens = list(range(40))
    run(cache, tokens)
    running = make_sequence(next(_ids), tokens)
    assert admit(cache, running).restore_tokens == 32
    cache.reset()
    stored = cache.stats()["stores_total"]
    prefill(cache, running)
    cache.finish(running)
    assert cache.stats()["stores_total"] == stored
    assert run(cache, tokens).cached_tokens == 0
    assert_idle(cache)


def test_abandoned_plan_moves_no_counter_and_pins_nothing() -> None:
    cache = make_cache()
    run(cache, list(range(40)))
    before = cache.stats()
    seq = make_sequence(next(_ids), list(range(40)))
    plan = cache.plan(seq)
    assert plan.kind is PlanKind.HIT
    cache.abandon(plan)
    cache.abandon(plan)
    assert {k: v for k, v in cache.stats().items() if k.endswith("_total")} == {k: v for k, v in before.items() if k.endswith("_total")}
    assert_idle(cache)


def test_planning_again_replaces_the_earlier_plan() -> None:
    cache = make_cache()
    run(cache, list(range(40)))
    seq = make_sequence(next(_ids), list(range(40)))
    cache.plan(seq)
    cache.plan(seq)
    cache.finish(seq)
    cache.finish(seq)
    assert_idle(cache)


def test_abort_between_chunks_keeps_the_finished_pages_and_leaks_nothing() -> None:
    cache = make_cache()
    seq = make_sequence(next(_ids), list(range(40)))
    admit(cache, seq)
    prefill(cache, seq, chunk=8, stop_after=2)
    cache.finish(seq)
    assert len(cache.cache.index) == 4
    assert_idle(cache)


def test_preempted_sequence_keeps_its_first_cached_tokens() -> None:
    cache = make_cache()
    run(cache, list(range(40)))
    seq = make_sequence(next(_ids), list(range(44)))
    admit(cache, seq)
    prefill(cache, seq)
    first = seq.cached_tokens
    cache.finish(seq)
    seq.token_ids += [1] * 20
    seq.prefill_len, seq.num_computed, seq.block_table = 64, 0, list(range(1, 17))
    admit(cache, seq)
    assert seq.num_computed == 40
    assert seq.cached_tokens == first == 36
    assert cache.stats()["resume_tokens_total"] == 40
    assert cache.stats()["hit_tokens_total"] == 36
    prefill(cache, seq)
    cache.finish(seq)
    assert_idle(cache)


def test_two_sequences_that_compute_the_same_pages_store_them_once() -> None:
    cache = make_cache()
    first, second = (make_sequence(next(_ids), list(range(40)), first_block=b) for b in (1, 20))
    second.state_slot = 2
    admit(cache, first)
    admit(cache, second)
    for seq in (first, second):
        prefill(cache, seq)
        cache.finish(seq)
    assert cache.stats()["stores_total"] == 10
    assert_idle(cache)


def test_prompt_larger_than_the_arena_stores_what_fits_and_counts_the_rest() -> None:
    cache = make_cache(num_frames=8)
    seq = make_sequence(next(_ids), list(range(60)))
    admit(cache, seq)
    prefill(cache, seq)
    cache.finish(seq)
    stats = cache.stats()
    assert stats["stores_total"] == 8
    assert stats["store_skipped_total"]["pinned"] == 7
    assert_idle(cache)


def test_tail_state_is_given_up_first_when_frames_are_short() -> None:
    cache = make_cache(num_frames=10 + 3 + 2)
    tokens = list(range(41))
    run(cache, tokens)
    stats = cache.stats()
    assert stats["states_written_total"] == {"resend": 1}
    assert stats["store_skipped_total"]["no_state_frames"] == 1
    assert run(cache, tokens).cached_tokens == 32


def test_state_slots_cap_the_states() -> None:
    cache = make_cache(state_slots=2)
    for start in range(5):
        run(cache, list(range(start * 100, start * 100 + 41)))
    assert cache.stats()["states"] == 2


@pytest.mark.parametrize("audit", ["sampled", "full"])
@pytest.mark.parametrize("target", ["page", "state"])
def test_flipped_byte_is_reported_and_its_tokens_are_recomputed(audit: str, target: str) -> None:
    cache = make_cache(audit=audit)
    tokens = list(range(41))
    run(cache, tokens)
    report = cache.inject_fault("flip", target=target)
    assert len(report["flips"]) == 1
    assert run(cache, tokens).cached_tokens == 0
    stats = cache.stats()
    assert stats["checksum_errors_total"] == 1
    assert stats["miss_total"]["audit"] == 1
    assert_idle(cache)
    assert run(cache, tokens).cached_tokens == 32


def test_flipped_byte_reaches_the_device_when_the_audit_is_off() -> None:
    cache = make_cache(audit="off")
    run(cache, list(range(41)))
    report = cache.inject_fault("flip", page=-2, count=3)
    seq = make_sequence(next(_ids), list(range(41)))
    cache.restore(seq, cache.plan(seq))
    kv = device(cache)
    changed = [b for b in range(8) if not kv.blocks[seq.block_table[b]].equal(kv.page_bytes(seq.token_ids[: (b + 1) * BLOCK]))]
    assert changed == [report["page"]] == [6]
    assert len(report["flips"]) == 3


def test_other_sequences_on_a_dropped_path_recompute_and_leak_nothing() -> None:
    cache = make_cache()
    tokens = list(range(41))
    run(cache, tokens)
    bystander, victim = make_sequence(next(_ids), tokens), make_sequence(next(_ids), tokens)
    waiting = cache.plan(bystander)
    plan = cache.plan(victim)
    cache.inject_fault("flip", page=3)
    cache.restore(victim, plan)
    assert victim.num_computed == 0
    cache.restore(bystander, waiting)
    assert bystander.num_computed == 0
    for seq in (victim, bystander):
        prefill(cache, seq)
        cache.finish(seq)
    assert_idle(cache)
    assert run(cache, tokens).cached_tokens == 32


def test_fault_on_an_empty_cache_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="no window state"):
        make_cache().inject_fault("flip")


def test_arena_below_one_page_and_one_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than one page and one window state"):
        make_cache(num_frames=3)


class SessionModel:
    """What an unlimited cache must answer: pages as a set of prefixes, states as a set of prefixes, and the rule."""

    def __init__(self) -> None:
        self.pages: set[tuple[int, ...]] = set()
        self.states: set[tuple[int, ...]] = set()

    def matched(self, tokens: list[int]) -> int:
        matched = 0
        while matched + BLOCK <= len(tokens) and tuple(tokens[: matched + BLOCK]) in self.pages:
            matched += BLOCK
        return matched

    def cached(self, tokens: list[int]) -> int:
        matched = self.matched(tokens)
        cap = (len(tokens) - KEEP) // BLOCK * BLOCK
        usable = [s for s in range(BLOCK, min(matched, cap) + 1, BLOCK) if tuple(tokens[:s]) in self.states]
        return max(usable, default=0)

    def fork(self, tokens: list[int]) -> int:
        """Where a prompt that leaves a stored path well beyond its last state keeps one; 0 for nowhere."""
        matched, last = self.matched(tokens), (len(tokens) - KEEP) // BLOCK * BLOCK
        return matched if matched - self.cached(tokens) > 2 * BLOCK and matched < last else 0

    def computed(self, tokens: list[int], upto: int, fork: int) -> None:
        if 0 < fork <= upto:
            self.states.add(tuple(tokens[:fork]))
        self.pages |= {tuple(tokens[:end]) for end in range(BLOCK, upto + 1, BLOCK)}
        if upto == len(tokens):
            for position in ((upto - KEEP) // BLOCK * BLOCK, (upto - 1) // BLOCK * BLOCK):
                if position > 0:
                    self.states.add(tuple(tokens[:position]))


def next_prompt(rng: random.Random, history: list[list[int]]) -> list[int]:
    """Extend, edit, regenerate or branch an earlier prompt, or start a new one."""
    base = list(rng.choice(history)) if history and rng.random() < 0.85 else []
    kind = rng.choice(("extend", "edit", "regenerate", "branch"))
    if kind == "edit" and base:
        base[rng.randrange(len(base))] = rng.randrange(10, 20)
    if kind == "branch":
        base = base[: rng.randrange(len(base) + 1)]
    if kind != "regenerate" or not base:
        base = base + [rng.randrange(3) for _ in range(rng.choice((1, 3, 6, 9, 25)))]
    return base[:120]


@pytest.mark.parametrize("seed", range(6))
def test_random_sessions_report_exactly_the_cached_tokens_of_the_model(seed: int) -> None:
    """Extend, edit, regenerate, branch and abort at a random chunk, in an arena that never evicts."""
    rng, model = random.Random(seed), SessionModel()
    cache = make_cache(FakeKV(num_blocks=40, state_bytes=100), num_frames=4000)
    history: list[list[int]] = []
    total = 0
    for step in range(150):
        tokens = next_prompt(rng, history)
        expected, fork = model.cached(tokens), model.fork(tokens)
        seq = make_sequence(next(_ids), tokens)
        assert admit(cache, seq).restore_tokens == expected, f"step {step}"
        assert seq.cached_tokens == expected
        total += expected
        prefill(cache, seq, chunk=rng.choice((4, 7, 16, 200)), stop_after=rng.choice((None, None, 1, 2)))
        model.computed(tokens, seq.num_computed, fork)
        cache.finish(seq)
        history = [*history[-7:], tokens]
    assert cache.stats()["hit_tokens_total"] == total > 0
    assert cache.stats()["evictions_total"] == 0
    assert_idle(cache)


@pytest.mark.parametrize("seed", range(6))
def test_random_sessions_under_pressure_restore_only_right_bytes_and_leak_nothing(seed: int) -> None:
    """A tiny arena, several sequences at once, aborts and abandoned plans: restored bytes are checked at every admission, and the
    hit is the one that the index's own pages and states allow."""
    rng = random.Random(seed)
    cache = make_cache(FakeKV(num_blocks=240), num_frames=rng.choice((12, 40, 70)))
    history: list[list[int]] = []
    running: list[Sequence] = []
    for _ in range(250):
        tokens = next_prompt(rng, history)
        slot = min({1, 2, 3, 4, 5, 6} - {s.state_slot for s in running})
        seq = make_sequence(next(_ids), tokens, first_block=31 * slot)
        seq.state_slot = slot
        index = cache.cache.index
        path = index.match(cache._keys.page_keys(tokens))
        states = [index.position[s] for s in index.states.on(path)]
        plan = cache.plan(seq)
        assert plan.restore_tokens == max([s for s in states if s <= restore_cap(len(tokens), KEEP, BLOCK)], default=0)
        if rng.random() < 0.2:
            cache.abandon(plan)
            continue
        cache.restore(seq, plan)
        seq.checkpoints = cache.checkpoints(seq)
        check_restored(cache, seq, seq.num_computed)
        assert 0 <= seq.num_computed <= max(0, len(tokens) - KEEP)
        running.append(seq)
        for other in running:
            prefill(cache, other, chunk=rng.choice((4, 9, 40)), stop_after=1)
        finished = [s for s in running if s.num_computed >= s.prefill_len or len(running) > 4 or rng.random() < 0.1]
        for done in finished:
            cache.finish(done)
        running = [s for s in running if s not in finished]
        cache.cache.check()
        history = [*history[-7:], tokens]
    for seq in running:
        cache.finish(seq)
    assert cache.stats()["evictions_total"] > 0
    assert cache.stats()["hit_tokens_total"] > 0
    assert_idle(cache)


@pytest.mark.parametrize("growth", [1, 24, 60, 128, 141])
def test_short_turns_never_recompute_more_than_two_pages_and_the_kept_tokens(growth: int) -> None:
    """Sessions that grow by less than the kept tokens: the case in which a single end-of-prompt state misses almost always."""
    kv = FakeKV(block_size=128, num_blocks=64, state_bytes=64)
    cache = PrefixCache(HiCacheConfig(audit="full"), kv, "model", 140, num_bytes=4000 * FRAME)  # type: ignore[arg-type]
    tokens = list(range(3000))
    for turn in range(12):
        seq = make_sequence(next(_ids), tokens, block_size=128)
        cache.restore(seq, cache.plan(seq))
        if turn:
            assert len(tokens) - seq.num_computed - growth <= 267
            previous = len(tokens) - growth
            options = [(previous - 140) // 128 * 128, (previous - 1) // 128 * 128]
            assert seq.cached_tokens == max(s for s in options if s <= (len(tokens) - 140) // 128 * 128)
        prefill(cache, seq, chunk=512)
        cache.finish(seq)
        tokens = tokens + [5000 + turn] * growth
