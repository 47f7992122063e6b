"""Chat completions over TCP: shapes, streaming order, usage, finish reasons, stop, log-probabilities, tools."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.server.harness import FakeServer

HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"messages": HELLO, "thinking": {"type": "disabled"}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]
CALL = '<｜DSML｜ invoke name="look">\n<｜DSML｜ parameter name="a" string="true">{}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
ONE_CALL = "Let me see.\n\n<｜DSML｜ calls>\n" + CALL.format("x y") + "</｜DSML｜ calls>"
TWO_CALLS = "\n\n<｜DSML｜ calls>\n" + CALL.format("1") + CALL.format("2") + "</｜DSML｜ calls>"


def post(fake: FakeServer, body: dict[str, Any], **options: Any) -> httpx.Response:
    return httpx.post(f"{fake.url}/v1/chat/completions", json=body, timeout=20, **options)


def events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    lines = [line for line in text.split("\n\n")[:-1] if not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), lines
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def stream(fake: FakeServer, body: dict[str, Any]) -> list[Any]:
    response = post(fake, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(response.text)


def gather(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of one choice add up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}, "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"] if isinstance(chunk, dict) else ():
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
            for call in delta.get("tool_calls", []):
                known = message["tool_calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"]["arguments"]
    return message


def test_answer_has_the_documented_shape(fake: FakeServer) -> None:
    answer = post(fake, {**CHAT, "model": "fake"}).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello there"}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 3


def test_thinking_splits_reasoning_from_content(fake: FakeServer) -> None:
    fake.script("because</think>So.")
    answer = post(fake, {"messages": HELLO}).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("because", "So.")
    reasoning = fake.tokenizer.encode("because")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(reasoning)


def test_stream_begins_with_the_role_and_ends_with_finish_usage_done(fake: FakeServer) -> None:
    chunks = stream(fake, {**CHAT, "stream_options": {"include_usage": True}})
    first, *middle, finish, usage, done = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    assert finish["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks[:-1]}) == 1


def test_without_include_usage_no_chunk_has_usage_or_empty_choices(fake: FakeServer) -> None:
    chunks = stream(fake, CHAT)[:-1]
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_continuous_usage_grows_in_every_chunk(fake: FakeServer) -> None:
    chunks = stream(fake, {**CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 3)


@pytest.mark.parametrize("text", ["plain", "reason</think>answer", ONE_CALL, TWO_CALLS, "half 𝄞 ü 你好", "</think>\n\nlead"])
def test_streamed_deltas_add_up_to_the_complete_message(fake: FakeServer, text: str) -> None:
    fake.script(text)
    for body in ({"messages": HELLO, "tools": TOOLS}, {**CHAT, "tools": TOOLS}):
        message = post(fake, body).json()["choices"][0]
        streamed = gather(stream(fake, body))
        assert streamed["content"] == (message["message"]["content"] or "")
        assert streamed["reasoning_content"] == message["message"].get("reasoning_content", "")
        assert streamed["finish_reason"] == message["finish_reason"]
        calls = [call["function"] for call in message["message"].get("tool_calls", [])]
        assert list(streamed["tool_calls"].values()) == calls


def test_calls_are_delivered_with_ids_and_parseable_arguments(fake: FakeServer) -> None:
    fake.script(TWO_CALLS)
    choice = post(fake, {**CHAT, "tools": TOOLS}).json()["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": "1"}, {"a": "2"}]
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("call_") and len(call["id"]) >= 25 for call in calls)


def test_without_parallel_calls_generation_ends_after_the_first(fake: FakeServer) -> None:
    fake.script(TWO_CALLS)
    choice = post(fake, {**CHAT, "tools": TOOLS, "parallel_tool_calls": False}).json()["choices"][0]
    assert [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == [{"a": "1"}]
    assert choice["finish_reason"] == "tool_calls"


def test_token_limit_is_length_even_inside_a_call(fake: FakeServer) -> None:
    fake.script(ONE_CALL)
    choice = post(fake, {**CHAT, "tools": TOOLS, "max_tokens": 12}).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_stop_string_is_removed_and_named(fake: FakeServer) -> None:
    fake.script("one two three four five six")
    body = {**CHAT, "stop": ["ree f", "zzz"]}
    choice = post(fake, body).json()["choices"][0]
    assert choice["message"]["content"] == "one two th"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "ree f")
    assert gather(stream(fake, body))["content"] == "one two th"


def test_stop_strings_do_not_count_in_reasoning(fake: FakeServer) -> None:
    fake.script("a stop b</think>c stop d")
    message = post(fake, {"messages": HELLO, "stop": "stop"}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a stop b", "c ")


def test_stop_token_ends_without_showing_its_text(fake: FakeServer) -> None:
    tokens = fake.script("one two three")
    body = {**CHAT, "stop_token_ids": [tokens[1]]}
    choice = post(fake, body).json()["choices"][0]
    assert choice["message"]["content"] == fake.tokenizer.decode(tokens[:1])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[1])


def test_ignore_eos_runs_to_the_limit_and_keeps_showing_text(fake: FakeServer) -> None:
    fake.script("ab")
    answer = post(fake, {**CHAT, "ignore_eos": True, "max_tokens": 9}).json()
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"].count("ab") > 1


def test_logprobs_match_the_tokens_of_content_and_reasoning(fake: FakeServer) -> None:
    fake.script("why</think>yes no")
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    complete = post(fake, body).json()["choices"][0]["logprobs"]
    for part, text in (("reasoning_content", "why"), ("content", "yes no")):
        assert "".join(entry["token"] for entry in complete[part]) == text
        assert all(bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 2 for entry in complete[part])
    assert complete["content"][0]["top_logprobs"][1]["logprob"] == -9999.0
    streamed: dict[str, list[Any]] = {"content": [], "reasoning_content": []}
    for chunk in stream(fake, body)[:-1]:
        for part, entries in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[part] += entries or []
    assert streamed == complete


def test_several_choices_interleave_with_their_own_role_and_finish(fake: FakeServer) -> None:
    chunks = stream(fake, {**CHAT, "n": 3, "seed": 7, "stream_options": {"include_usage": True}})
    for index in range(3):
        assert gather(chunks, index)["content"] == "Hello there"
        assert gather(chunks, index)["finish_reason"] == "stop"
    assert chunks[-2]["usage"]["completion_tokens"] == 9
    assert [line["seed"] for line in fake.recorded()] == [7, 8, 9]


def test_cached_tokens_are_reported_and_bypassed_on_request(fake: FakeServer) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "cache me please"}]}
    post(fake, body)
    usage = post(fake, body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1 == usage["prompt_cache_hit_tokens"]
    assert usage["prompt_cache_miss_tokens"] == 1
    for switch in (False, {"read": False}):
        assert post(fake, {**body, "prefix_cache": switch}).json()["usage"]["prompt_cache_hit_tokens"] == 0


def test_default_and_clamped_output_limits(fake: FakeServer) -> None:
    post(fake, CHAT)
    post(fake, {**CHAT, "max_tokens": 100_000})
    post(fake, {**CHAT, "max_tokens": 5, "max_completion_tokens": 6})
    lines = fake.recorded()
    room = 4096 - len(lines[0]["ids"])
    assert [line["max_tokens"] for line in lines] == [room, room, 6]


def test_rendered_prompt_is_what_the_engine_gets(fake: FakeServer) -> None:
    post(fake, CHAT)
    rendered = httpx.post(f"{fake.url}/deepinfer/render", json=CHAT).json()
    assert fake.recorded()[0]["ids"] == rendered["tokens"] == httpx.post(f"{fake.url}/tokenize", json=CHAT).json()["tokens"]
    assert rendered["prompt"] == fake.tokenizer.decode(rendered["tokens"])


def test_plain_completions_of_several_prompts(fake: FakeServer) -> None:
    ids = fake.tokenizer.encode("as ids")
    for prompt, count in (("text", 1), (["a", "b", "c"], 3), (ids, 1), ([ids, ids], 2)):
        body = {"prompt": prompt, "max_tokens": 8, "stop": "ere"}
        answer = httpx.post(f"{fake.url}/v1/completions", json=body).json()
        assert [choice["text"] for choice in answer["choices"]] == ["Hello th"] * count, answer
        text = httpx.post(f"{fake.url}/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}).text
        chunks = events(text)
        pieces = ["".join(c["text"] for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == i) for i in range(count)]
        assert pieces == ["Hello th"] * count
        assert chunks[-2]["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert fake.recorded()[0]["ids"][0] == fake.tokenizer.bos_id


def test_plain_logprobs_line_up_with_the_text(fake: FakeServer) -> None:
    choice = httpx.post(f"{fake.url}/v1/completions", json={"prompt": "x", "logprobs": 1}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "Hello there"
    assert [choice["text"][offset:].startswith(token) for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]


def test_page_for_people_needs_nothing_from_elsewhere(fake: FakeServer) -> None:
    response = httpx.get(f"{fake.url}/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert not re.findall(r'(?:src|href)="(?!data:)|@import|https?://', response.text)


def test_openai_client_sync(fake: FakeServer) -> None:
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="unused")
    assert [model.id for model in client.models.list()] == ["fake"]
    answer = client.chat.completions.create(model="fake", messages=HELLO, reasoning_effort="none")  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "Hello there"
    fake.script(ONE_CALL)
    with client.chat.completions.stream(model="fake", messages=HELLO, tools=TOOLS, extra_body={"thinking": {"type": "disabled"}}) as live:  # type: ignore[arg-type]
        final = live.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"a": "x y"}'
    assert client.completions.create(model="fake", prompt="x", max_tokens=2).choices[0].finish_reason == "length"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="fake", messages=HELLO, temperature=9)  # type: ignore[call-overload]


async def test_openai_client_async_streams_side_by_side(fake: FakeServer) -> None:
    import asyncio

    fake.script("one two three four", delay_s=0.005)
    client = openai.AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="unused")

    async def one() -> tuple[str, int]:
        text, tokens = "", 0
        live = await client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}, extra_body={"thinking": {"type": "disabled"}}
        )  # type: ignore[call-overload]
        async for chunk in live:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, tokens

    results = await asyncio.gather(*(one() for _ in range(8)))
    assert set(results) == {("one two three four", len(fake.tokenizer.encode("one two three four")) + 1)}
    await client.close()
