"""A request that was there both times a rank crashed is refused; the others are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from engine.request import Grammar, GrammarKind, Request, SamplingParams
from server.errors import BadRequest
from server.poison import FORGET_S, Poison, fingerprint
from tests.server.harness import FakeServer, eventually, finish, start_fake

GOOD, BAD = b"good", b"bad"


def test_two_crashes_refuse_one_does_not_and_a_good_end_acquits() -> None:
    poison = Poison(clock=lambda: 0.0)
    poison.blame([GOOD, BAD, BAD])
    poison.check(BAD)
    poison.acquit(GOOD)
    poison.blame([GOOD, BAD])
    poison.check(GOOD)
    with pytest.raises(BadRequest) as caught:
        poison.check(BAD)
    assert caught.value.code == "poison_request"


def test_blame_is_forgotten_after_a_while() -> None:
    now = [0.0]
    poison = Poison(clock=lambda: now[0])
    poison.blame([BAD])
    poison.blame([BAD])
    now[0] = FORGET_S
    poison.check(BAD)
    poison.blame([BAD])
    poison.check(BAD)


def test_prompt_sampling_and_grammar_make_the_identity_and_nothing_else_does() -> None:
    one = Request("a", [1, 2], SamplingParams(max_tokens=4))
    assert fingerprint(b"p", one) == fingerprint(b"p", replace(one, request_id="b"))
    others = [
        fingerprint(b"q", one),
        fingerprint(b"p", replace(one, params=SamplingParams(max_tokens=5))),
        fingerprint(b"p", replace(one, grammar=Grammar(GrammarKind.REGEX, "a+"))),
    ]
    assert len({fingerprint(b"p", one), *others}) == 4


@pytest.fixture
def server() -> Iterator[FakeServer]:
    running = start_fake()
    yield running
    finish(running)


@pytest.mark.slow
def test_request_that_crashes_a_rank_twice_is_not_given_to_the_third(server: FakeServer) -> None:
    deadly = {"messages": [{"role": "user", "content": "die"}], "max_tokens": 5}
    harmless = {"messages": [{"role": "user", "content": "live"}], "max_tokens": 5}
    prompt = httpx.post(f"{server.url}/tokenize", json=deadly).json()["tokens"]
    server.script("fine", crash_on=prompt)
    for incarnation in (2, 3):
        died = httpx.post(f"{server.url}/v1/chat/completions", json=deadly, timeout=20)
        assert (died.status_code, died.json()["error"]["code"]) == (503, "rank_failed")
        eventually(lambda: server.current().state == "ready" and server.current().incarnation == incarnation, 30)  # noqa: B023
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=deadly, timeout=20)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "poison_request")
    assert httpx.post(f"{server.url}/v1/chat/completions", json=harmless, timeout=20).status_code == 200
    assert server.current().incarnation == 3
