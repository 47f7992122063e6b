"""Structured output and forced calls as the official client sees them, on two ranks of the embedded model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests.e2e.conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
QUIET: dict[str, Any] = {"thinking": {"type": "disabled"}}
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "What about Oslo?"}], "max_tokens": 400}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}},
]
THINK_END_ID = "8"


class Trip(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]
    nights: Literal[1, 2, 3]
    direct: bool


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def check_trip(text: str | None) -> None:
    value = json.loads(text or "")
    assert value.keys() == {"city", "days"}
    assert value["city"] in ("Oslo", "Rome")
    assert value["days"] in range(1, 10)


def check_call(name: str, arguments: str) -> None:
    if name == "weather":
        check_trip(arguments)
    else:
        assert (name, json.loads(arguments)) == ("ping", {})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_followed(client: openai.OpenAI, temperature: float, stream: bool) -> None:
    response: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    options: Any = {**ASK, "response_format": response, "temperature": temperature, "extra_body": QUIET}
    if stream:
        chunks = list(client.chat.completions.create(**options, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        choice = client.chat.completions.create(**options).choices[0]
        assert choice.finish_reason == "stop"
        text = choice.message.content or ""
    check_trip(text)


def test_the_clients_parse_helper_returns_the_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**ASK, response_format=Trip, extra_body=QUIET)
    assert isinstance(answer.choices[0].message.parsed, Trip)


def test_behind_reasoning_the_answer_follows_the_schema(client: openai.OpenAI) -> None:
    response: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    message = client.chat.completions.create(**ASK, response_format=response, logit_bias={THINK_END_ID: 20}, seed=3).choices[0].message
    check_trip(message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_forced_choice_gives_a_valid_call(client: openai.OpenAI, choice: Any, thinking: bool) -> None:
    extra: Any = {"logit_bias": {THINK_END_ID: 20}} if thinking else {"extra_body": QUIET}
    answer = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice, **extra).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    calls = answer.message.tool_calls or []
    assert calls
    for call in calls:
        check_call(call.function.name, call.function.arguments)
        assert choice == "required" or call.function.name == "weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_choice_streams_one_valid_call(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {**ASK, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "extra_body": QUIET}
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    (call,) = final.message.tool_calls or []
    check_call(call.function.name, call.function.arguments)


def test_regex_and_grammar_are_followed(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**ASK, extra_body={**QUIET, "ebnf": 'root ::= "yes" | "no"'})
    assert chat.choices[0].message.content in ("yes", "no")
    plain = client.completions.create(model="tiny", prompt="Number:", max_tokens=20, extra_body={"regex": "[0-9]{4}"})
    assert plain.choices[0].text.isdigit()
    assert len(plain.choices[0].text) == 4


EXPLOSIVE = "root ::= " + " | ".join(f"r{i}" for i in range(3000)) + "\n"
EXPLOSIVE += "\n".join(f'r{i} ::= "a" r{(i + 1) % 3000} | [^]{{0,9999}} "{i}"' for i in range(3000))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "("}, "regex"),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"ebnf": EXPLOSIVE}, "ebnf"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format.json_schema.schema.not"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"anyOf": [{}]}}}]}, "tools"),
    ],
)
def test_bad_grammars_are_400_while_other_answers_go_on(client: openai.OpenAI, server: Server, fields: dict[str, Any], param: str) -> None:
    pids = [server.rank_pid(0), server.rank_pid(1)]
    body = {"messages": ASK["messages"], **QUIET, **fields}
    with ThreadPoolExecutor(1) as pool:
        bad = pool.submit(httpx.post, f"{server.url}/v1/chat/completions", json=body, timeout=60)
        good = client.chat.completions.create(**ASK | {"max_tokens": 8}, extra_body=QUIET)
        reply = bad.result()
    assert good.choices[0].finish_reason in ("length", "stop")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_schema", param)
    assert [server.rank_pid(0), server.rank_pid(1)] == pids
    assert httpx.get(f"{server.url}/health").status_code == 200
