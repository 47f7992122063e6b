"""What waits for clients that do not read is bounded in bytes: the one furthest behind is ended, with an error, and nobody else."""

from __future__ import annotations

import asyncio
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from engine.request import FinishReason, Output, Request, SamplingParams, TokenLogprob
from server import protocol, rank_pool, tickets
from server.choice import ENTRY_BYTES, Choice, EndRules
from server.config import ServerConfig
from server.errors import ApiError
from server.generation import Generation
from server.metrics import FrontMetrics, json_document
from server.prometheus import RankCollector, exposition
from server.prompt_keys import prompt_keys
from server.rank_pool import RankPool
from server.tickets import Mailbox, Ticket, size_of
from tests.server.test_choice import LetterParser


def accepted(pool: RankPool, name: str) -> Ticket:
    return pool.dispatch([Request(name, [1, 2, 3], SamplingParams())], None, "", prompt_keys([1, 2, 3]), f"client-{name}")


def output(name: str, tokens: int = 1, alternatives: int | None = None) -> Output:
    """As it comes from a rank."""
    top = [(5000 + i, -1.5 - i) for i in range(alternatives or 0)]
    logprobs = () if alternatives is None else tuple(TokenLogprob(-0.5, top) for _ in range(tokens))
    sent = protocol.encode(protocol.Outputs([Output(name, list(range(1000, 1000 + tokens)), logprobs=logprobs)]))
    received = protocol.decode_from_rank(sent)
    assert isinstance(received, protocol.Outputs)
    return received.outputs[0]


@pytest.mark.parametrize(("tokens", "alternatives"), [(1, None), (4, None), (1, 0), (1, 20), (4, 20)])
def test_the_size_of_an_output_is_about_what_it_takes(tokens: int, alternatives: int | None) -> None:
    output("a" * 32, tokens, alternatives)
    tracemalloc.start()
    kept = [output("a" * 32, tokens, alternatives) for _ in range(500)]
    taken = tracemalloc.get_traced_memory()[0] / len(kept)
    tracemalloc.stop()
    assert 0.7 * taken < size_of(kept[0]) < 1.4 * taken


async def test_a_box_knows_how_much_waits_in_it() -> None:
    box = Mailbox()
    sizes = []
    for number in range(tickets.MAX_BATCH + 3):
        box.put(0, output("a", 1 + number % 3, number % 2 or None))
        sizes.append(size_of(output("a", 1 + number % 3, number % 2 or None)))
    assert box.num_bytes == sum(sizes)
    await box.get(1)
    assert box.num_bytes == sum(sizes[-3:])
    await box.get(1)
    assert box.num_bytes == 0


def test_a_box_is_full_by_its_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    box, large = Mailbox(), output("a", 1, 20)
    monkeypatch.setattr(tickets, "SLOW_READER_S", 0.0)
    most = tickets.MAX_MAIL_BYTES // size_of(large)
    assert most < tickets.MAX_MAIL * 2
    monkeypatch.setattr(tickets, "MAX_MAIL", 10 * most)
    assert all(box.put(0, large) for _ in range(most))
    assert not box.put(0, large)


async def test_the_client_furthest_behind_is_ended_and_its_mail_dropped(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_pool, "MAX_UNREAD_BYTES", 30 * size_of(output("x")))
    open_ = {name: accepted(pool, name) for name in ("quick", "slow", "stuck")}
    for name, count in (("quick", 1), ("slow", 10), ("stuck", 19)):
        for _ in range(count):
            pool._deliver(output(name), 0.0)
    pool.bound_memory()
    assert pool.num_open == 3, "as much as may wait"
    pool._deliver(output("slow"), 0.0)
    pool.bound_memory()
    assert (pool.num_open, pool.slow_readers_total) == (2, 1)
    assert pool.unread_bytes == 12 * size_of(output("x"))
    with pytest.raises(ApiError) as caught:
        await open_["stuck"].mailbox.get(1)
    assert (caught.value.status, caught.value.code) == (503, "slow_reader")
    assert len(await open_["slow"].mailbox.get(1)) == 11
    assert [record.request_id for record in caplog.records] == ["client-stuck"]  # type: ignore[attr-defined]


async def test_the_sweep_looks_for_it_by_itself(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "MAX_UNREAD_BYTES", 0)
    monkeypatch.setattr(rank_pool, "SWEEP_S", 0.001)
    ticket = accepted(pool, "a")
    pool._deliver(output("a"), 0.0)
    sweep = asyncio.create_task(pool.sweep_forever())
    async with asyncio.timeout(10):
        while not ticket.closed:
            await asyncio.sleep(0.001)
    sweep.cancel()
    assert (pool.num_open, pool.slow_readers_total) == (0, 1)


async def test_a_client_that_is_behind_for_too_long_leaves_no_mail_behind(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "SLOW_READER_S", 0.0)
    ticket = accepted(pool, "a")
    for _ in range(tickets.MAX_MAIL):
        pool._deliver(output("a"), 0.0)
    assert (ticket.closed, ticket.mailbox.num_bytes, pool.slow_readers_total) == (True, 0, 1)
    pool._deliver(output("a"), 0.0)
    with pytest.raises(ApiError, match="too slowly"):
        await ticket.mailbox.get(1)


async def test_the_largest_answer_that_waits_for_its_end_is_ended(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "MAX_HELD_BYTES", 1000)
    small, large = accepted(pool, "small"), accepted(pool, "large")
    small.held_bytes, large.held_bytes = 400, 600
    pool.bound_memory()
    assert pool.num_open == 2, "as much as may wait"
    large.held_bytes += 1
    pool.bound_memory()
    assert (pool.num_open, pool.held_bytes, pool.slow_readers_total) == (1, 400, 0)
    with pytest.raises(ApiError) as caught:
        await large.mailbox.get(1)
    assert (caught.value.status, caught.value.code) == (503, "answer_too_large")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_tells_what_it_holds_and_hears_that_it_is_too_much(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setattr(rank_pool, "MAX_HELD_BYTES", 5 * 21 * ENTRY_BYTES)
    front: Any = SimpleNamespace(pool=pool, config=ServerConfig())
    choice = Choice(0, LetterParser(), EndRules(1), lambda _: b"x", streamed=streamed)  # type: ignore[arg-type]
    generation = Generation(front, accepted(pool, "a"), [choice], [1, 2, 3])

    async def answer() -> int:
        given = 0
        async for batch in generation.pieces():
            given += sum(len(choice.logprobs(piece)) for choice, piece in batch or ())
            pool.bound_memory()
            last = Output("a", [1], FinishReason.LENGTH) if given == 9 else output("a", 1, 20)
            pool._deliver(last, 0.0)
        return given

    pool._deliver(output("a", 1, 20), 0.0)
    if streamed:
        assert await answer() == 9
    else:
        with pytest.raises(ApiError) as caught:
            await answer()
        assert caught.value.code == "answer_too_large"


def test_what_waits_and_who_was_ended_is_in_the_metrics(pool: RankPool) -> None:
    accepted(pool, "a")
    pool._deliver(output("a"), 0.0)
    pool.slow_readers_total = 3
    metrics = FrontMetrics("m")
    metrics.registry.register(RankCollector(metrics, pool))
    text = exposition(metrics.registry).decode()
    assert "deepinfer:slow_readers_total 3.0\n" in text
    assert f"deepinfer:unread_output_bytes {size_of(output('a')):.1f}\n" in text
    requests = json_document(metrics, pool, "ready")["requests"]
    assert (requests["slow_readers_total"], requests["unread_bytes"]) == (3, size_of(output("a")))
