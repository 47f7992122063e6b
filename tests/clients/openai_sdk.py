"""The OpenAI SDK against a running server: sync, async, streaming helpers, tool helper, structured parse. Usage: openai_sdk.py URL"""

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

NO_THINKING = {"thinking": {"type": "disabled"}}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 24}
EOS = "1"
# The SDK's helpers take an answer that ends by length for a failure, so these end by EOS after twelve tokens.
ENDING = {**ASK, "logit_bias": {EOS: 100}, "extra_body": {**NO_THINKING, "min_tokens": 12}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Point(BaseModel):
    """A structured answer that a few tokens can hold."""

    big: bool
    odd: bool


def plain(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, extra_body=NO_THINKING)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    stream = client.chat.completions.create(**ASK, extra_body=NO_THINKING, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    again = client.completions.create(model="tiny", prompt="one two", max_tokens=4, logprobs=2, temperature=0)
    assert len(again.choices[0].logprobs.tokens) == again.usage.completion_tokens
    assert client.models.list().data[0].id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"


def reasoning(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, reasoning_effort="low")
    assert isinstance(answer.choices[0].message.reasoning_content, str)
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**ENDING) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    whole = client.chat.completions.create(**ENDING)
    assert final.choices[0].message.content == whole.choices[0].message.content


def tool_helper(client: openai.OpenAI) -> None:
    ask = {**ASK, "max_tokens": 200, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "extra_body": NO_THINKING}
    with client.chat.completions.stream(**ask) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "weather"
    assert call.function.parsed_arguments["city"] in ("Paris", "Oslo")
    assert call.function.arguments in "".join(pieces)
    history = [*ASK["messages"], message.model_dump(include={"role", "content", "tool_calls"})]
    history += [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in message.tool_calls]
    after = client.chat.completions.create(**{**ASK, "messages": history}, tools=[WEATHER], extra_body=NO_THINKING)
    assert after.usage.prompt_tokens > 20


def structured(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(**{**ASK, "max_tokens": 400}, response_format=Point, extra_body=NO_THINKING)
    assert isinstance(parsed.choices[0].message.parsed, Point), parsed
    free = client.chat.completions.create(
        **{**ASK, "max_tokens": 64, "temperature": 1.0, "seed": 3}, response_format={"type": "json_object"}, extra_body=NO_THINKING
    )
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)


def failures(client: openai.OpenAI) -> None:
    for call, kind in (
        (lambda: client.chat.completions.create(**{**ASK, "temperature": 3}), openai.BadRequestError),
        (lambda: client.chat.completions.create(**{**ASK, "model": "other"}), openai.NotFoundError),
    ):
        caught = None
        try:
            call()
        except kind as error:
            caught = error
        assert caught is not None, kind
        assert caught.body["message"]
        assert caught.request_id


async def many(client: openai.AsyncOpenAI) -> None:
    async def one(seed: int) -> str:
        text = ""
        async for chunk in await client.chat.completions.create(**{**ASK, "seed": seed}, extra_body=NO_THINKING, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    texts = await asyncio.gather(*(one(seed) for seed in range(8)))
    assert len(set(texts)) == 1, "greedy answers do not depend on the seed"
    async with client.chat.completions.stream(**ENDING) as stream:
        assert (await stream.get_final_completion()).choices[0].finish_reason == "stop"
    await client.close()


if __name__ == "__main__":
    url = f"{sys.argv[1]}/v1"
    sync_client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for check in (plain, reasoning, stream_helper, tool_helper, structured, failures):
        check(sync_client)
        print("ok", check.__name__, flush=True)
    asyncio.run(many(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)))
    print("ok many")
