from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from server import completions
from server.errors import ApiError
from server.generation import merged
from tests.server.harness import FakeServer


class Begun:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("failure", [RuntimeError("a fault of ours"), asyncio.CancelledError()], ids=["fault", "cancelled"])
def test_prompts_that_have_begun_are_closed_when_a_later_one_cannot_begin(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    first, calls = Begun(), iter((None, failure))

    async def begin(*_: Any) -> Begun:
        if (raised := next(calls)) is not None:
            raise raised
        return first

    async def in_place(*arguments: Any, **_: Any) -> Any:
        return [[1], [2]] if arguments else None

    async def body(_: Any) -> dict[str, Any]:
        return {}

    front: Any = SimpleNamespace(
        metrics=SimpleNamespace(received_total=0, note_unknown=lambda _: None),
        bodies=SimpleNamespace(read_object=body),
        workers=SimpleNamespace(run=in_place),
        checked_grammar=in_place,
        text=SimpleNamespace(plain_constraint=None),
        limits=SimpleNamespace(vocab_size=10),
        bounds=None,
    )
    http: Any = SimpleNamespace(state=SimpleNamespace(small_body=True))
    for name, value in (
        ("parse_common", SimpleNamespace(unknown=())),
        ("refuse_plain_extras", None),
        ("parse_prompts", []),
        ("resolve_max_tokens", 4),
    ):
        monkeypatch.setattr(completions, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(completions, "begin", begin)
    with pytest.raises(type(failure)):
        asyncio.run(completions.create(front, http))
    assert first.closed


class Talking:
    """A prompt whose batches come when `hears` says so."""

    def __init__(self, batches: list[Any], hears: asyncio.Event | None = None, tells: asyncio.Event | None = None) -> None:
        self.batches, self.hears, self.tells, self.closed = batches, hears, tells, False

    async def pieces(self) -> AsyncIterator[Any]:
        try:
            for number, batch in enumerate(self.batches):
                if isinstance(batch, ApiError):
                    raise batch
                if number and self.hears is not None:
                    await self.hears.wait()
                yield batch
            if self.tells is not None:
                self.tells.set()
        finally:
            self.closed = True


async def all_of(*prompts: Talking) -> list[tuple[int, Any]]:
    async with asyncio.timeout(10):
        return [item async for item in merged(prompts)]  # type: ignore[arg-type]


async def test_a_prompt_is_read_while_another_one_of_its_request_goes_on() -> None:
    """What nobody reads is taken for a slow client's: two prompts of one stream used to be read one after the other."""
    over = asyncio.Event()
    first, second = Talking(["a", "b"], hears=over), Talking(["c", None, "d"], tells=over)
    read = await all_of(first, second)
    assert [batch for number, batch in read if number == 0] == ["a", "b"]
    assert [batch for number, batch in read if number == 1] == ["c", None, "d"]
    assert read[-1] == (0, "b")


async def test_prompts_take_turns() -> None:
    read = await all_of(*(Talking([f"{name}{i}" for i in range(50)]) for name in "abc"))
    counts = [0, 0, 0]
    for number, batch in read:
        assert batch == f"{'abc'[number]}{counts[number]}"
        counts[number] += 1
        assert max(counts) - min(counts) <= 1
    assert counts == [50, 50, 50]


async def test_the_failure_of_one_prompt_ends_the_reading_of_all() -> None:
    waits = Talking(["a", "never"], hears=asyncio.Event())
    with pytest.raises(ApiError, match="gone"):
        await all_of(waits, Talking(["b", ApiError(503, "rank_failed", "gone")]))
    assert waits.closed


def test_two_prompts_of_one_stream_come_whole_with_their_own_numbers(fake: FakeServer) -> None:
    fake.script("one two three four five")
    body = {"prompt": ["a b", "c d"], "max_tokens": 40, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    whole = httpx.post(f"{fake.url}/v1/completions", json={**body, "stream": False, "stream_options": None}, timeout=60).json()
    with httpx.stream("POST", f"{fake.url}/v1/completions", json=body, timeout=60) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    texts = dict.fromkeys(range(4), "")
    ends: list[int] = []
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert sorted(ends) == [0, 1, 2, 3]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
