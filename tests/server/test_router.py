"""Routing rules as pure functions: affinity, load guard, ends of conversations, bounded memory."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from server.prompt_keys import BLOCK, prompt_keys
from server.route_cost import RankLoad
from server.router import Router

IDLE = [RankLoad(0), RankLoad(1), RankLoad(2)]


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(4000), k=count)


def test_a_session_stays_on_its_rank() -> None:
    router = Router()
    first = router.route("s", prompt_keys(tokens(1, 300)), IDLE)
    for turn in range(5):
        again = router.route("s", prompt_keys(tokens(turn, 300)), IDLE)
        assert (again.rank, again.reason) == (first.rank, "session")


def test_sessions_spread_over_idle_ranks() -> None:
    router = Router()
    ranks = [router.route(f"s{i}", prompt_keys([1]), IDLE).rank for i in range(300)]
    assert all(60 < ranks.count(rank) < 140 for rank in range(3))


def test_the_end_of_a_finished_request_brings_the_next_turn_back() -> None:
    router = Router()
    prompt = tokens(1, 200)
    answer = tokens(2, 77)
    router.finished(prompt + answer, len(prompt), rank=2)
    decision = router.route(None, prompt_keys(prompt + answer + tokens(3, 40)), IDLE)
    assert (decision.rank, decision.reason, decision.saved_tokens) == (2, "content", 2 * BLOCK)


def test_a_rewritten_answer_still_finds_the_rank_of_its_prompt() -> None:
    router = Router()
    prompt = tokens(1, 200)
    router.finished(prompt + tokens(2, 50), len(prompt), rank=1)
    # The header's last token of the earlier prompt was another one (reasoning was dropped).
    decision = router.route(None, prompt_keys(prompt[:-1] + tokens(9, 80)), IDLE)
    assert (decision.rank, decision.reason) == (1, "content")


def test_a_shared_system_prompt_does_not_gather_a_fleet_on_one_rank() -> None:
    router = Router()
    system = tokens(1, 4 * BLOCK)
    ranks = []
    for agent in range(60):
        keys = prompt_keys(system + tokens(100 + agent, 30))
        ranks.append(router.route(None, keys, IDLE).rank)
        router.finished(system + tokens(100 + agent, 30) + tokens(500 + agent, 20), len(system) + 30, ranks[-1])
    assert all(ranks.count(rank) > 5 for rank in range(3))


def test_the_guard_moves_a_session_whose_rank_is_busier_than_the_cache_saves() -> None:
    router = Router()
    keys = prompt_keys(tokens(1, 4 * BLOCK))
    home = router.route("s", keys, IDLE).rank

    def loads(queued: int) -> list[RankLoad]:
        return [RankLoad(rank, queued if rank == home else 0) for rank in range(3)]

    assert router.route("s", keys, loads(4 * BLOCK)).rank == home
    moved = router.route("s", keys, loads(4 * BLOCK + 1))
    assert moved.reason == "moved"
    assert moved.rank != home
    assert router.route("s", keys, IDLE).rank == moved.rank, "the key moves with the session"


def test_a_dead_rank_loses_its_keys_at_once() -> None:
    router = Router()
    prompt = tokens(1, 200)
    home = router.route("s", prompt_keys(prompt), IDLE).rank
    router.finished(prompt, len(prompt), home)
    router.forget([home])
    assert router.num_keys == 0
    assert router.known_tokens(prompt_keys(prompt), home) == 0
    assert router.route("s", prompt_keys(prompt), [load for load in IDLE if load.rank != home]).rank != home


def test_least_loaded_ignores_keys() -> None:
    router = Router("least-loaded")
    loads = [RankLoad(0, 5, 0), RankLoad(1, 0, 2), RankLoad(2, 0, 1)]
    assert [router.route("s", prompt_keys([1]), loads).rank for _ in range(3)] == [2, 2, 2]
    assert router.route("s", prompt_keys([1]), [RankLoad(1), RankLoad(0)]).rank == 0
    assert router.num_keys == 0


def test_hash_chains_depend_on_everything_before() -> None:
    a, b = tokens(1, 3 * BLOCK), tokens(1, 3 * BLOCK)
    b[0] += 1
    assert prompt_keys(a).chain[:2] == prompt_keys(a[:BLOCK]).chain
    assert not set(prompt_keys(a).chain[1:]) & set(prompt_keys(b).chain[1:])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 400), st.integers(0, 500)), max_size=60), st.integers(0, 2**32)
)
def test_random_traffic_keeps_every_promise(steps: list[tuple[int, int, int, int]], seed: int) -> None:
    random_ = random.Random(seed)
    router = Router(most_bytes=16_000)
    most = (router.max_sessions, router.max_ends, router.max_blocks)
    assert max(most) < 80, "so few that they are reached"
    dead: set[int] = set()
    for kind, name, length, queued in steps:
        alive = [RankLoad(rank, random_.randrange(queued + 1), random_.randrange(4)) for rank in range(4) if rank not in dead]
        ids = tokens(name, length)
        session = f"s{name}" if name % 2 else None
        if kind == 3 and len(dead) < 3:
            dead.add(random_.choice([load.rank for load in alive]))
            router.forget(dead)
            continue
        decision = router.route(session, prompt_keys(ids), alive)
        assert decision.rank in {load.rank for load in alive}
        assert 0 <= decision.saved_tokens <= length
        if kind == 1:
            router.finished(ids + [7] * 5, length, decision.rank)
        kept = (len(router._sessions), len(router._ends), len(router._blocks))
        assert all(count <= limit for count, limit in zip(kept, most, strict=True)), kept
        assert not any(ranks >> rank & 1 for ranks in router._blocks.values() for rank in dead)
        assert sum(sum(tails.values()) for tails in router._tails.values()) == len(router._ends)
        counts = router.counts
        routed = counts.affine_total + counts.content_total + counts.load_total + counts.moved_total
        assert routed > 0


def test_what_is_remembered_takes_about_what_it_may() -> None:
    bound = 2 * 2**20
    router = Router(most_bytes=bound)
    load = [RankLoad(0, 0, 0)]
    taken = []
    tracemalloc.start()
    for number in range(9_000):
        keys = prompt_keys([number] * 700)
        router.route(f"conversation {number:020}", keys, load)
        router.ended(keys, 650, 0)
        if number % 1_000 == 999:
            taken.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(router._sessions) == router.max_sessions
    assert len(router._ends) == router.max_ends
    assert len(router._blocks) == router.max_blocks
    assert max(taken) < 1.5 * bound, taken
    assert taken[-1] < 1.05 * taken[5], "no more behind its bound"
