"""Reasoning comes back by tool-call id: for the same visible turn, the same tenant, and only when asked for."""

from __future__ import annotations

import json
import tracemalloc
from array import array
from typing import Any

import httpx
import pytest

from server.turn_memory import Turn, TurnMemory, with_reasoning
from tests.server.harness import finish, start_fake


def message(**changes: Any) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("a", "b")]
    return {"role": "assistant", "content": "text", "tool_calls": calls, **changes}


CALLS = (("f", "{}"), ("f", "{}"))


def memory() -> TurnMemory:
    made = TurnMemory(10**6)
    made.remember(Turn("s", ("a", "b"), "text", "because", CALLS))
    return made


def completed(made: TurnMemory, messages: Any, salt: str) -> Any:
    return with_reasoning(messages, made.among(messages, salt))


def test_dropped_reasoning_of_the_same_turn_is_put_back_without_touching_the_request() -> None:
    sent = [{"role": "user", "content": "x"}, message()]
    found = completed(memory(), sent, "s")
    assert found[1] == {**message(), "reasoning_content": "because"}
    assert sent[1] == message()


@pytest.mark.parametrize(
    "changes",
    [
        {"content": "other"},
        {"content": None},
        {"reasoning_content": "mine"},
        {"reasoning": "mine"},
        {"tool_calls": message()["tool_calls"][:1]},
        {"tool_calls": None},
        {"tool_calls": "ab"},
        {"tool_calls": [{"id": 3}]},
        {"tool_calls": [{"id": "a"}, {"id": "b"}]},
        {"tool_calls": [{"id": "a", "function": 3}, {"id": "b", "function": {"name": "f"}}]},
        {"tool_calls": [{**call, "function": {"name": "g", "arguments": "{}"}} for call in message()["tool_calls"]]},
        {"tool_calls": [{**call, "function": {"name": "f", "arguments": '{"x": 1}'}} for call in message()["tool_calls"]]},
        {"role": "user"},
    ],
)
def test_any_other_turn_stays_as_the_client_sent_it(changes: dict[str, Any]) -> None:
    assert completed(memory(), [message(**changes)], "s") == [message(**changes)]


def test_arguments_are_compared_as_json_values() -> None:
    turn = Turn("s", ("a",), "", "r", (("f", '{"x": {"a": 1, "b": "\\u00e9"}, "y": [1, 2.0]}'),))

    def says(arguments: Any) -> bool:
        return turn.says({"content": None, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]})

    assert says('{"y":[1,2.0],"x":{"b":"é","a":1}}')
    assert says({"y": [1, 2.0], "x": {"b": "é", "a": 1}})
    assert not says('{"y":[2.0,1],"x":{"b":"é","a":1}}')
    assert not says('{"y":[1,2],"x":{"b":"é","a":1}}')
    assert not says('{"y":[1,2.0],"x":{"b":"é","a":true}}')
    assert not says('{"y":[1,2.0],"x":{"b":"é","a":1}')
    assert not says(None)
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"x": deep}
    assert not says(deep)


def test_other_tenant_and_malformed_bodies_get_nothing() -> None:
    assert completed(memory(), [message()], "t") == [message()]
    for body in (None, "x", [3, None]):
        assert completed(memory(), body, "s") == body


def test_memory_is_bounded_and_keeps_what_was_asked_for() -> None:
    turn = Turn("", ("0",), "", "0123456789")
    made = TurnMemory(2 * turn.num_bytes)
    for number in range(9):
        made.remember(Turn("", (str(number),), "", "0123456789"))
    assert len(made) == 2
    for _ in range(9):
        made.remember(Turn("", ("8",), "", "9876543210"))
    assert len(made) == 2
    made.remember(Turn("", (), "", "no call"))
    made.remember(Turn("", ("x",), "", ""))
    assert len(made) == 2
    assert made.among([{"tool_calls": [{"id": "7"}]}], "").keys() == {"7"}
    made.remember(Turn("", ("9",), "", "", token_ids=array("I", range(100))))
    assert made.among([{"tool_calls": [{"id": name}]} for name in "789"], "").keys() == {"9"}, "ids count as well"
    made.remember(Turn("", ("10",), "", "x" * 10**4))
    assert len(made) == 1


def test_bytes_that_are_told_are_about_those_that_are_taken() -> None:
    made = TurnMemory(10**8)
    tracemalloc.start()
    for number in range(2000):
        call_id = f"call_{number:024}"
        calls = (("weather", json.dumps({"city": "Oslo", "days": number})),)
        made.remember(Turn("", (call_id,), f"Let me see {number}", f"Because {number}", calls, "<header>", array("I", range(40))))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(made) == 2000
    told = sum(turn.num_bytes for turn in made.among([{"tool_calls": [{"id": f"call_{n:024}"}]} for n in range(2000)], "").values())
    assert 0.5 * taken < told < 2 * taken


@pytest.mark.parametrize("wanted", [True, False])
def test_prompt_of_the_next_turn_extends_the_answer_although_the_client_dropped_its_reasoning(wanted: bool) -> None:
    server = start_fake(reattach_reasoning=wanted)
    try:
        dialect_call = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
        sampled = server.script(f"I think it over</think>\n\n{dialect_call}")
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        talk: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        body = {"messages": talk, "tools": [tool], "thinking": {"type": "enabled"}}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20).json()["choices"][0]["message"]
        assert answer["reasoning_content"] == "I think it over"
        before = server.recorded()[-1]["ids"]
        answer.pop("reasoning_content")
        talk += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "42"}]
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20).raise_for_status()
        extends = server.recorded()[-1]["ids"][: len(before) + len(sampled)] == [*before, *sampled]
        assert extends == wanted
    finally:
        finish(server)
