"""Routing by cost: the least expected work by what the caches hold, prefixes in flight, conversations only between equals."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prefix_cache import PrefixCache
from engine.request import Timing
from hicache.config import HiCacheConfig
from hicache.segment import CacheHome
from server.prompt_keys import BLOCK, PromptKeys, prompt_keys
from server.rank_index import RankIndexes
from server.route_cost import CostModel, RankLoad, RestoreRule, Saving, shared_queues
from server.router import Router
from tests.engine.test_prefix_cache import FRAME, KEEP, run
from tests.hicache.fake_kv import FakeKV
from tests.server.routing_simulation import Summary, run_policy

RULE = RestoreRule(keep_tokens=140, min_restore_tokens=BLOCK, herd_min_tokens=1024)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(4000), k=count)


class Held:
    """Caches that hold given numbers of leading tokens of every prompt."""

    def __init__(self, held: dict[int, int], *, shared: bool = False) -> None:
        self.held, self.shared = held, shared

    def __len__(self) -> int:
        return len(self.held)

    def tokens(self, keys: PromptKeys, most_tokens: int) -> dict[int, int]:
        return {rank: min(tokens, most_tokens) for rank, tokens in self.held.items()}


def router(held: dict[int, int] | None = None, *, shared: bool = False, rule: RestoreRule | None = RULE) -> Router:
    return Router("cost", costs=CostModel(rule), stored=None if held is None else Held(held, shared=shared))


def idle(count: int) -> list[RankLoad]:
    return [RankLoad(rank) for rank in range(count)]


def test_the_rank_that_holds_the_longest_prefix_is_taken_when_all_are_idle() -> None:
    decision = router({0: 1280, 1: 5120, 2: 2560}).route(None, prompt_keys(tokens(1, 8000)), idle(3))
    assert (decision.rank, decision.reason, decision.saved_tokens, decision.source) == (1, "prefix", 5120, "own")


def test_a_queue_longer_than_the_saving_sends_the_prompt_elsewhere() -> None:
    keys = prompt_keys(tokens(1, 8000))
    assert router({0: 5120, 1: 0}).route(None, keys, [RankLoad(0, 4800), RankLoad(1)]).rank == 0
    assert router({0: 5120, 1: 0}).route(None, keys, [RankLoad(0, 5200), RankLoad(1)]).rank == 1


def test_ranks_that_prefill_together_have_one_queue() -> None:
    assert shared_queues([8000, 0, 100, 300], 2) == [4000, 4000, 200, 200]
    assert shared_queues([8000, 0, 100], 1) == [8000, 0, 100]
    assert shared_queues([9, 3, 6], 2) == [6, 6, 6]


def test_running_sequences_count_a_little() -> None:
    keys = prompt_keys(tokens(1, 500))
    assert router({0: 0, 1: 0}).route("s", keys, [RankLoad(0, 0, 9), RankLoad(1, 0, 2)]).rank == 1


def test_a_prefix_of_another_rank_is_as_good_as_ones_own_at_its_price() -> None:
    keys = prompt_keys(tokens(1, 8000))
    shared = router({0: 5120, 1: 0}, shared=True)
    decision = shared.route(None, keys, [RankLoad(0, 1000), RankLoad(1)])
    assert (decision.rank, decision.source, decision.saved_tokens) == (1, "peer", 5120)
    assert router({0: 5120, 1: 0}).route(None, keys, [RankLoad(0, 1000), RankLoad(1)]).rank == 0, "arenas are private"
    for _ in range(20):  # copies from peers turn out to be nearly as slow as computing
        shared.learn("peer", 8000, 5120, Timing(0.0, 0.9 * 5120e-6, 2880e-6))
    assert shared.costs.price("peer") == pytest.approx(0.9)
    assert shared.route(None, keys, [RankLoad(0, 1000), RankLoad(1)]).rank == 0


def test_conversations_decide_only_between_equals() -> None:
    route = router(dict.fromkeys(range(4), 0))
    keys = prompt_keys(tokens(1, 600))
    home = route.route("s", keys, idle(4)).rank
    again = route.route("s", prompt_keys(tokens(2, 600)), idle(4))
    assert (again.rank, again.reason) == (home, "session")
    almost = [RankLoad(rank, BLOCK if rank == home else 0) for rank in range(4)]
    assert route.route("s", keys, almost).rank == home
    busy = [RankLoad(rank, BLOCK + 1 if rank == home else 0) for rank in range(4)]
    moved = route.route("s", keys, busy)
    assert moved.reason == "moved"
    assert moved.rank != home


def test_a_herd_meets_where_its_first_prompt_is_being_computed() -> None:
    route = router(dict.fromkeys(range(4), 0))
    head = tokens(1, 16 * 1024)
    queued = [0] * 4
    ranks = []
    for number in range(24):
        keys = prompt_keys(head + tokens(100 + number, 50))
        decision = route.route(None, keys, [RankLoad(rank, queued[rank]) for rank in range(4)])
        ranks.append(decision.rank)
        queued[decision.rank] += len(keys.token_ids) - decision.saved_tokens  # as the front counts it
        route.sent(str(number), keys, decision.rank)
    # Behind the first prompt the wait is as long as an idle rank's own cold prefill, so the next ones open one prefill per rank; then
    # everybody joins one of them.
    assert max(queued) < 16 * 1024 + 24 * 600
    assert len(set(ranks)) == 4
    for number in range(24):
        route.computed(str(number))
        route.computed(str(number))
    assert len(route.costs.in_flight) == 0


def test_short_overlaps_do_not_hold_a_prompt() -> None:
    route = router({0: 0, 1: 0})
    keys = prompt_keys(tokens(1, 900))
    route.sent("a", keys, 0)
    assert route.route(None, keys, idle(2)).saved_tokens == 0


def test_a_request_that_bypasses_the_cache_goes_by_load_alone() -> None:
    decision = router({0: 5120, 1: 0}).route(None, prompt_keys(tokens(1, 8000)), [RankLoad(0, 200), RankLoad(1)], reads_cache=False)
    assert (decision.rank, decision.saved_tokens) == (1, 0)


def test_without_caches_nothing_is_saved_anywhere() -> None:
    route = router(rule=None)
    keys = prompt_keys(tokens(1, 8000))
    first = route.route(None, keys, idle(2))
    route.sent("a", keys, first.rank)
    assert route.route(None, keys, idle(2)).saved_tokens == 0


def test_ranks_that_cannot_be_asked_are_judged_by_what_was_sent_there() -> None:
    route = router()
    keys = prompt_keys(tokens(1, 8000))
    home = route.route(None, keys, idle(3)).rank
    decision = route.route(None, keys, idle(3))
    assert (decision.rank, decision.saved_tokens) == (home, (8000 - 140) // BLOCK * BLOCK)
    route.forget([home])
    assert route.route(None, keys, idle(3)).saved_tokens == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 30), st.integers(0, 70)), min_size=1, max_size=6),
    st.integers(1, 9000),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_choice_is_never_more_than_a_block_above_the_cheapest(
    ranks: list[tuple[int, int, int]], length: int, shared: bool, seed: int
) -> None:
    route = router({rank: pages * BLOCK for rank, (_, _, pages) in enumerate(ranks)}, shared=shared)
    keys = prompt_keys(tokens(seed, length))
    loads = [RankLoad(rank, queued, running) for rank, (queued, running, _) in enumerate(ranks)]
    random.Random(seed).shuffle(loads)
    decision = route.route(f"s{seed % 3}", keys, loads)
    savings = route.costs.savings(keys, range(len(ranks)), Held(route.stored.held).tokens(keys, route.costs.most_tokens(keys)), {}, shared)  # type: ignore[union-attr]
    costs = {load.rank: route.costs.cost(length, load, savings[load.rank]) for load in loads}
    assert costs[decision.rank] <= min(costs.values()) + BLOCK
    assert decision.saved_tokens <= max(0, length - RULE.keep_tokens)
    assert decision.source == savings[decision.rank].source
    if decision.saved_tokens == 0:
        assert decision.source == ""
    # A longer queue on another rank changes nothing; so does a better cache here.
    others = [RankLoad(load.rank, load.queued_tokens + (load.rank != decision.rank) * 500, load.running) for load in loads]
    assert route.route(f"s{seed % 3}", keys, others).rank == decision.rank


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=80))
def test_prefixes_in_flight_leave_nothing_behind(events: list[tuple[int, int, bool]]) -> None:
    flight = CostModel().in_flight
    open_: dict[str, tuple[list[int], int]] = {}
    for number, (name, rank, begins) in enumerate(events):
        if begins:
            ids = tokens(name, BLOCK * (1 + name))
            flight.add(str(number), prompt_keys(ids), rank)
            open_[str(number)] = ids, rank
        elif open_:
            flight.remove(open_.popitem()[0])
        for ids, at in open_.values():
            assert flight.tokens(prompt_keys(ids), at) == len(ids)
    for name in list(open_):
        flight.remove(name)
    assert len(flight) == 0
    assert flight._counts == {}


def test_prices_follow_the_answers() -> None:
    costs = CostModel(RULE)
    first = costs.price("own")
    costs.learn("own", 3000, 2000, Timing(0.1, 2000 * 2e-6, 1000 * 1e-4))
    assert costs.price("own") == first, "too few tokens to know"
    for _ in range(100):
        costs.learn("own", 30_000, 20_000, Timing(0.1, 20_000 * 2e-6, 10_000 * 1e-4))
    assert costs.price("own") == pytest.approx(0.02)
    for _ in range(300):
        costs.learn("own", 30_000, 20_000, Timing(0.1, 20_000 * 5e-5, 10_000 * 1e-4))
    assert costs.price("own") == pytest.approx(0.5, rel=0.05)
    assert costs.work(1000, Saving(400, "own")) == pytest.approx(1000 - 400 * 0.5, rel=0.05)


# --- what the caches hold, read from the ranks' own shared memory ---


def open_ranks(directory: Path) -> tuple[list[PrefixCache], dict[int, Path]]:
    homes = [CacheHome(directory, "dix-test", rank, 2, b"s" * 32) for rank in range(2)]
    config = HiCacheConfig(min_restore_tokens=1)
    caches = [PrefixCache(config, FakeKV(), "model", KEEP, num_bytes=60 * FRAME, home=home) for home in homes]  # type: ignore[arg-type]
    return caches, {home.rank: home.path(home.rank) for home in homes}


def restorable(indexes: RankIndexes, prompt: list[int], page: int) -> dict[int, int]:
    keys = prompt_keys(prompt, "", indexes.space)
    indexes.tokens(PromptKeys(prompt, [b""], b"", True), 0)  # follow the epoch
    found = {}
    for rank, table in indexes._tables.items():
        table.refresh()
        found[rank] = table.find(keys.chain[1:], (len(prompt) - KEEP) // page)[0] * page
    return found


def test_the_front_sees_exactly_what_each_rank_would_restore(tmp_path: Path) -> None:
    caches, paths = open_ranks(tmp_path)
    space = caches[0]._keys
    twin = type(space)("model", FakeKV().format_id, space.page_tokens, secret=b"s" * 32)
    indexes = RankIndexes.open(twin, paths, shared=True)
    assert len(indexes) == 2
    draw = random.Random(5)
    prompts = [[draw.randrange(50) for _ in range(draw.randrange(20, 60))] for _ in range(12)]
    for step in range(60):
        cache = caches[step % 2]
        run(cache, draw.choice(prompts))
        if step == 40:
            for each in caches:
                each.reset()
        for prompt in prompts:
            found = restorable(indexes, prompt, space.page_tokens)
            for rank, each in enumerate(caches):
                assert found[rank] == each.explain(prompt)["restore_tokens"], (step, rank)


def test_private_arenas_and_other_models_cannot_be_asked(tmp_path: Path) -> None:
    caches, paths = open_ranks(tmp_path)
    other = type(caches[0]._keys)("another model", FakeKV().format_id, caches[0]._keys.page_tokens, secret=b"s" * 32)
    assert len(RankIndexes.open(other, paths, shared=True)) == 0
    assert len(RankIndexes.open(caches[0]._keys, {0: tmp_path / "none"}, shared=True)) == 0


def test_the_front_cannot_write_into_an_arena(tmp_path: Path) -> None:
    caches, paths = open_ranks(tmp_path)
    indexes = RankIndexes.open(caches[0]._keys, paths, shared=True)
    with pytest.raises(TypeError):
        indexes._tables[0].segment.mapping[0] = 1


def test_reading_while_a_rank_writes_never_fails(tmp_path: Path) -> None:
    caches, paths = open_ranks(tmp_path)
    indexes = RankIndexes.open(caches[0]._keys, paths, shared=True)
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        while not stop.is_set():
            try:
                restorable(indexes, list(range(40)), caches[0]._keys.page_tokens)
            except BaseException as error:
                failures.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    draw = random.Random(6)
    for _ in range(150):
        run(caches[0], [draw.randrange(50) for _ in range(draw.randrange(20, 60))])
    stop.set()
    reader.join()
    assert failures == []


# --- the point of it ---


def test_cost_beats_affinity_and_least_loaded_on_mixed_traffic() -> None:
    """Ranks that do not share arenas, where the choice of the rank decides what is computed again; see docs/routing.md."""
    mean = {policy: Summary.of(run_policy(policy, 0, seconds=15.0)).mean_s for policy in ("affinity", "least-loaded", "cost")}
    assert mean["cost"] < 0.85 * mean["affinity"]
    assert mean["cost"] < 0.85 * mean["least-loaded"]
