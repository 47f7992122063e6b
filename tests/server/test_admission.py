"""What may wait for a rank is bounded by prompt tokens, too: a queue that is short by its requests can be long by their prompts."""

from __future__ import annotations

import itertools

import pytest

from engine.request import Output, Request, SamplingParams
from server import rank_view
from server.errors import ApiError
from server.prompt_keys import prompt_keys
from server.rank_pool import RankPool
from server.tickets import Ticket

NAMES = itertools.count()


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_view, "MAX_QUEUED_TOKENS", 100)


def send(pool: RankPool, tokens: int, choices: int = 1) -> Ticket:
    ids = list(range(tokens))
    requests = [Request(f"r{next(NAMES)}", ids, SamplingParams()) for _ in range(choices)]
    return pool.dispatch(requests, None, "", prompt_keys(ids), "x")


def refused(pool: RankPool, tokens: int, choices: int = 1) -> bool:
    before = pool.num_open
    try:
        pool.close(send(pool, tokens, choices))
    except ApiError as error:
        return (error.status, error.code, error.retry_after_s, pool.num_open) == (429, "queue_full", 1, before)
    return False


async def test_prompts_that_wait_are_refused_beyond_their_sum(pool: RankPool) -> None:
    send(pool, 60)
    assert not refused(pool, 40)
    assert refused(pool, 41)


async def test_every_choice_is_a_prompt_of_its_own_to_its_rank(pool: RankPool) -> None:
    send(pool, 20, choices=2)
    assert not refused(pool, 20, choices=3)
    assert refused(pool, 20, choices=4)


async def test_a_prompt_alone_may_be_as_long_as_it_likes(pool: RankPool) -> None:
    assert not refused(pool, 500)


async def test_a_prompt_that_runs_waits_no_more(pool: RankPool) -> None:
    running = send(pool, 90)
    assert refused(pool, 90)
    pool._deliver(Output(running.engine_ids[0], [1]), 0.0)
    assert not refused(pool, 90)
