"""Answers come back as history with the ids they were sampled with: same text, no other tenant's, bounded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer import Tokenizer
from server.sampled_ids import BYTES_OF_ID, BYTES_OF_STRETCH, SampledIds
from tests.server.harness import FakeServer, eventually, finish, start_fake


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    server = start_fake(isolation="field")
    yield server
    finish(server)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text token by token per character, as no tokenizer with merges would split it."""
    ids = [i for char in text for i in tokenizer.encode_plain(char)]
    assert ids != tokenizer.encode_plain(text)
    return ids


def test_answer_keeps_its_ids_only_where_the_tokenizer_would_split_it_otherwise(fake: FakeServer) -> None:
    tokenizer, memory = fake.tokenizer, SampledIds(10**6)
    odd, plain = letters(tokenizer, "Hello there"), tokenizer.encode_plain(" a usual answer")
    think_end = tokenizer.token_id("</think>")
    assert memory.learn(tokenizer, "s", [*plain, think_end, *odd, tokenizer.token_id("<｜end▁of▁sentence｜>")]) == 1
    assert list(memory.view("s")("Hello there") or ()) == odd
    assert memory.view("s")(" a usual answer") is None
    assert memory.view("other")("Hello there") is None
    assert memory.view("s")("Hello there.") is None


def test_half_a_character_is_not_kept(fake: FakeServer) -> None:
    memory = SampledIds(10**6)
    ids = fake.tokenizer.encode_plain("é")
    if len(ids) > 1:
        assert memory.learn(fake.tokenizer, "", ids[:1]) == 0
    assert len(memory) == 0


def test_memory_is_bounded_in_bytes(fake: FakeServer) -> None:
    few = SampledIds(3 * (BYTES_OF_STRETCH + 14 * BYTES_OF_ID))
    for number in range(9):
        few.learn(fake.tokenizer, "", letters(fake.tokenizer, f"Hello number {number}"))
    assert len(few) == 3
    assert few.view("")("Hello number 8")
    assert few.view("")("Hello number 0") is None


def test_bytes_that_are_told_are_about_those_that_are_taken(fake: FakeServer) -> None:
    memory = SampledIds(10**8)
    stretches = [letters(fake.tokenizer, f"Hello number {number}") for number in range(2000)]
    tracemalloc.start()
    for stretch in stretches:
        memory.learn(fake.tokenizer, "", stretch)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(memory) == 2000
    assert 0.5 * taken < memory.num_bytes < 2 * taken


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1, max_size=40), cuts=st.lists(st.integers(1, 39), max_size=6))
def test_spliced_ids_spell_exactly_the_text_they_stand_for(fake: FakeServer, text: str, cuts: list[int]) -> None:
    tokenizer, memory = fake.tokenizer, SampledIds(10**6)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    ids = [i for a, b in pairwise(edges) for i in tokenizer.encode_plain(text[a:b])]
    memory.learn(tokenizer, "", ids)
    found = memory.view("")(text)
    if found is not None:
        assert b"".join(map(tokenizer.token_bytes, found)).decode() == text
        assert list(found) == ids


def ask(fake: FakeServer, messages: list[dict[str, str]], **body: object) -> str:
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json={"messages": messages, **body}, timeout=20)
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("mode", ["disabled", "enabled"])
def test_next_turn_extends_the_sampled_sequence_token_by_token(fake: FakeServer, mode: str) -> None:
    tokenizer = fake.tokenizer
    eos, think_end = tokenizer.token_id("<｜end▁of▁sentence｜>"), tokenizer.token_id("</think>")
    sampled = [*letters(tokenizer, f"Nothing unusual {mode}"), eos]
    if mode == "enabled":
        sampled = [*letters(tokenizer, "Thinking about it"), think_end, *sampled]
    fake.script(sampled)
    talk = [{"role": "user", "content": f"hello {mode}"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    options = {"thinking": {"type": mode}, "tools": tools}
    content = ask(fake, talk, **options)
    before = fake.recorded()[-1]["ids"]
    reasoning = {"reasoning_content": "Thinking about it"} if mode == "enabled" else {}
    talk += [{"role": "assistant", "content": content, **reasoning}, {"role": "user", "content": "go on"}]

    def extends() -> bool:
        ask(fake, talk, **options)
        return bool(fake.recorded()[-1]["ids"][: len(before) + len(sampled)] == [*before, *sampled])

    assert eventually(extends)
    ask(fake, talk, cache_salt="somebody else", **options)
    assert fake.recorded()[-1]["ids"][: len(before) + len(sampled)] != [*before, *sampled]


def test_explanation_counts_spliced_stretches_and_tells_a_split_from_a_text(fake: FakeServer) -> None:
    tokenizer = fake.tokenizer
    fake.script([*letters(tokenizer, "Certainly so"), tokenizer.token_id("<｜end▁of▁sentence｜>")])
    talk = [{"role": "user", "content": "hello there"}]
    content = ask(fake, talk, thinking={"type": "disabled"})
    body = {"messages": [*talk, {"role": "assistant", "content": content}, talk[0]], "thinking": {"type": "disabled"}}

    def spliced() -> int:
        headers = {"X-DeepInfer-Cache-Explain": "1"}
        answer = httpx.post(f"{fake.url}/v1/chat/completions", json=body, headers=headers, timeout=20).json()
        return int(answer["cache_explain"]["spliced_stretches"])

    assert eventually(spliced) == 1
    other = httpx.post(f"{fake.url}/deepinfer/cache/explain", json={**body, "cache_salt": "x"}, timeout=20).json()
    assert other["ranks"][0]["first_difference"]["kind"] == "split"


def test_splicing_can_be_turned_off() -> None:
    server = start_fake(splice_sampled_ids=False)
    try:
        tokenizer = server.tokenizer
        server.script([*letters(tokenizer, "Certainly so"), tokenizer.token_id("<｜end▁of▁sentence｜>")])
        talk = [{"role": "user", "content": "hello"}]
        talk += [{"role": "assistant", "content": ask(server, talk, thinking={"type": "disabled"})}, talk[0]]
        ask(server, talk, thinking={"type": "disabled"})
        ids = server.recorded()[-1]["ids"]
        plain = tokenizer.encode_plain("Certainly so")
        assert any(ids[at : at + len(plain)] == plain for at in range(len(ids)))
    finally:
        finish(server)
