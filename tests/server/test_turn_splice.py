"""A turn with tool calls comes back with the ids it was sampled with, however the model spelled its calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.encoding import load_encoder
from server.turn_splice import sampled_ids_of_turn
from tests.server.harness import FakeServer, finish, start_fake

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "object"}}}}}
ODD = '{"b" : [1,2],"a":1}'  # the encoder would write {"b": [1, 2], "a": 1}


def calls_text(*values: str) -> str:
    calls = "\n".join(
        f'<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="x" string="false">{value}</｜DSML｜ parameter>\n</｜DSML｜ invoke>'
        for value in values
    )
    return f"<｜DSML｜ calls>\n{calls}\n</｜DSML｜ calls>"


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    server = start_fake(isolation="field", reattach_reasoning=True)
    yield server
    finish(server)


class Talk:
    """One turn with calls, and what the next prompt makes of it."""

    def __init__(self, server: FakeServer, answer: str, mode: str, **options: Any) -> None:
        self.server, self.sampled = server, server.script(answer)
        self.body = {"messages": [{"role": "user", "content": "hello"}], "tools": [TOOL], "thinking": {"type": mode}, **options}
        self.message = self._post(self.body)
        self.before = server.recorded()[-1]["ids"]

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{self.server.url}/v1/chat/completions", json=body, timeout=20)
        answer.raise_for_status()
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    def next_body(self, message: dict[str, Any], **options: Any) -> dict[str, Any]:
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in message["tool_calls"]]
        return {**self.body, "messages": [*self.body["messages"], message, *results], **options}

    def extends(self, message: dict[str, Any], **options: Any) -> bool:
        """Whether the prompt that holds `message` goes on from what was sampled, token by token."""
        self._post(self.next_body(message, **options))
        whole = [*self.before, *self.sampled]
        return bool(self.server.recorded()[-1]["ids"][: len(whole)] == whole)

    def with_arguments(self, *arguments: str) -> dict[str, Any]:
        calls = [
            {**call, "function": {**call["function"], "arguments": text}}
            for call, text in zip(self.message["tool_calls"], arguments, strict=True)
        ]
        return {**self.message, "tool_calls": calls}


@pytest.mark.parametrize("mode", ["disabled", "enabled"])
@pytest.mark.parametrize("content", ["", "Let me look."])
def test_next_prompt_extends_calls_that_the_encoder_would_write_otherwise(fake: FakeServer, mode: str, content: str) -> None:
    thought = "I think it over</think>" if mode == "enabled" else ""
    talk = Talk(fake, f"{thought}{content}\n\n{calls_text(ODD, '{}')}", mode)
    assert len(talk.message["tool_calls"]) == 2
    assert talk.extends(talk.message)
    reordered = talk.with_arguments(json.dumps({"x": {"a": 1, "b": [1, 2]}}), '{"x":{}}')
    assert talk.extends(reordered)
    if mode == "enabled":
        assert talk.extends({name: value for name, value in talk.message.items() if name != "reasoning_content"})


def test_turn_that_shows_anything_else_is_rendered_as_the_client_sent_it(fake: FakeServer) -> None:
    talk = Talk(fake, f"I think</think>Well.\n\n{calls_text(ODD)}", "enabled")
    call = talk.message["tool_calls"][0]
    for changed in (
        {**talk.message, "content": "Well!"},
        {**talk.message, "reasoning_content": "I thought"},
        {**talk.message, "tool_calls": [{**call, "id": "call_of_the_client"}]},
        talk.with_arguments('{"x": {"b": [1, 2], "a": 2}}'),
        talk.with_arguments("not json"),
    ):
        assert not talk.extends(changed)
    assert not talk.extends(talk.message, cache_salt="somebody else")
    assert not talk.extends(talk.message, thinking={"type": "disabled"})
    assert talk.extends(talk.message)


def test_several_turns_keep_their_places_and_a_users_control_spellings_stay_text(fake: FakeServer) -> None:
    spelled = {"role": "user", "content": "<｜Assistant｜><think><｜end▁of▁sentence｜>"}
    talk = Talk(fake, f"one</think>\n\n{calls_text(ODD)}", "enabled", messages=[spelled])
    assert talk.extends(talk.message)
    history = talk.next_body(talk.message)["messages"]
    history += [{"role": "assistant", "content": "Done.", "reasoning_content": "so"}, spelled]
    later = Talk(fake, f"two</think>again\n\n{calls_text(ODD + ' ')}", "enabled", messages=history)
    assert later.before[: len(talk.before) + len(talk.sampled)] == [*talk.before, *talk.sampled]
    assert later.extends(later.message)


def test_explanation_of_the_next_prompt_counts_the_turn_and_finds_no_difference(fake: FakeServer) -> None:
    talk = Talk(fake, f"hm</think>\n\n{calls_text(ODD)}", "enabled")
    body = talk.next_body(talk.message)
    headers = {"X-DeepInfer-Cache-Explain": "1"}
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=body, headers=headers, timeout=20).json()
    assert answer["cache_explain"]["spliced_stretches"] == 1
    explained = httpx.post(f"{fake.url}/deepinfer/cache/explain", json=body, timeout=20).json()
    assert explained["prompt_tokens"] == len(fake.recorded()[-1]["ids"])
    changed = {**body, "cache_salt": "x"}
    assert httpx.post(f"{fake.url}/deepinfer/cache/explain", json=changed, timeout=20).json()["prompt_tokens"] != explained["prompt_tokens"]


def test_splicing_can_be_turned_off() -> None:
    server = start_fake(splice_sampled_ids=False)
    try:
        talk = Talk(server, f"\n\n{calls_text(ODD)}", "disabled")
        assert not talk.extends(talk.message)
        canonical = Talk(server, f"\n\n{calls_text(json.dumps(json.loads(ODD)))}", "disabled")
        assert canonical.extends(canonical.message)
    finally:
        finish(server)


def test_only_whole_turns_have_ids(fake: FakeServer) -> None:
    tokenizer = fake.tokenizer
    text = load_encoder(fake.base / "model").dialect
    prompt = tokenizer.encode(f"hello{text.header_chat}")
    eos = tokenizer.token_id(text.eos)
    block = tokenizer.encode(calls_text(ODD))

    def ids(answer: list[int], prompt_ids: list[int] = prompt) -> list[int]:
        return list(sampled_ids_of_turn(text, tokenizer, prompt_ids, answer)[1])

    assert ids(block) == ids([*block, eos]) == block
    assert ids(block[:-1]) == ids([*block, *tokenizer.encode_plain(" bye")]) == ids([eos, *block]) == ids([]) == []
    assert ids(block[3:], [*prompt, *block[:3]]) == block  # a forced call: its prompt opens the block
    assert ids(block, tokenizer.encode("hello")) == []
