"""What HTTP does for the prefix cache: tenants, anchors, explanations and faults, against the scripted engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.tenants import Tenants, key_id
from tests.server.harness import FakeServer, eventually, finish, start_fake

USER = [{"role": "user", "content": "hello"}]
EXPLAIN = {"X-DeepInfer-Cache-Explain": "1"}


@pytest.fixture(scope="module")
def salted() -> Iterator[FakeServer]:
    server = start_fake(isolation="field")
    yield server
    finish(server)


def ask(server: FakeServer, messages: object = USER, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages, **body}, headers=headers, timeout=20)


def test_salts_differ_by_key_and_field_and_are_never_the_clients_own() -> None:
    field, keyed = Tenants("field", b"s" * 32), Tenants("api_key", b"s" * 32)
    salts = [field.salt(key, own) for key in ("", key_id(b"a"), key_id(b"b")) for own in ("", "x", "y")]
    assert len(set(salts)) == len(salts)
    assert "x" not in salts
    assert keyed.salt(key_id(b"a"), "x") == keyed.salt(key_id(b"a"), "y") != keyed.salt(key_id(b"b"), "x")
    assert Tenants("field", b"t" * 32).salt("", "x") != field.salt("", "x")
    assert Tenants().salt(key_id(b"a"), "x") == ""


def test_clients_salt_reaches_the_engine_only_as_a_derived_one(salted: FakeServer) -> None:
    for salt in ("one", "two", "one", None):
        assert ask(salted, **({} if salt is None else {"cache_salt": salt})).status_code == 200
    seen = [line["salt"] for line in salted.recorded()][-4:]
    assert seen[0] == seen[2] != seen[1]
    assert len({*seen}) == 3
    assert all(len(salt) == 64 for salt in seen)


def test_requests_of_one_key_share_a_scope_that_is_no_ones_field_and_only_where_fields_count() -> None:
    field = Tenants("field", b"s" * 32)
    assert field.scope(key_id(b"a")) == field.salt(key_id(b"a"), "") != field.scope(key_id(b"b"))
    assert field.scope(key_id(b"a")) != field.salt(key_id(b"a"), "x")
    assert (Tenants("api_key", b"s" * 32).scope(key_id(b"a")), Tenants().scope(key_id(b"a"))) == ("", "")


@pytest.mark.parametrize(
    ("value", "reached"),
    [
        (None, [35, math.inf]),
        (80, [80, math.inf]),
        (0, [0, math.inf]),
        ({"priority": 90}, [90, math.inf]),
        ({"priority": 90, "seconds": 12.5}, [90, 12.5]),
    ],
)
def test_priority_reaches_the_engine(salted: FakeServer, value: object, reached: list[float]) -> None:
    assert ask(salted, cache_priority=value).status_code == 200
    assert salted.recorded()[-1]["priority"] == reached


def test_explanation_asks_within_the_scope_of_the_request(salted: FakeServer) -> None:
    record = ask(salted, headers=EXPLAIN, cache_salt="one").json()["cache_explain"]
    assert record["scope"] == salted.recorded()[-1]["scope"] != record["salt"]
    answer = httpx.post(f"{salted.url}/deepinfer/cache/explain", json={"messages": USER, "cache_salt": "one"}, timeout=20).json()
    assert answer["ranks"][0]["scope"] == record["scope"]


def test_anchor_is_the_text_in_front_of_the_first_user_turn(salted: FakeServer) -> None:
    ask(salted, [{"role": "system", "content": "Be brief. " * 20}, *USER])
    ask(salted, USER, thinking={"type": "disabled"})
    with_system, without = salted.recorded()[-2:]
    user_id = salted.tokenizer.encode("<｜User｜>")[0]
    assert with_system["ids"][with_system["anchor"]] == user_id
    assert with_system["anchor"] > 20
    assert without["anchor"] <= 1


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "enabled"}}, False),  # its reasoning is left out of the next prompt
        ({"thinking": {"type": "enabled"}, "tools": TOOLS}, True),
        ({"thinking": {"type": "enabled"}, "tools": TOOLS, "tool_choice": "none"}, False),
        ({"thinking": {"type": "disabled"}, "n": 2}, False),  # one of them is continued at most
    ],
)
def test_answers_are_stored_where_the_next_prompt_holds_them(salted: FakeServer, body: dict[str, Any], stored: bool) -> None:
    assert ask(salted, **body).status_code == 200
    assert salted.recorded()[-1]["store_answer"] is stored


def test_answer_of_a_plain_completion_is_not_stored(salted: FakeServer) -> None:
    assert httpx.post(f"{salted.url}/v1/completions", json={"prompt": "once"}, timeout=20).status_code == 200
    assert salted.recorded()[-1]["store_answer"] is False


def test_explanation_shows_both_texts_and_the_turn_where_prompts_part(salted: FakeServer) -> None:
    ask(salted, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "first question"}])
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "another question"}]
    record = ask(salted, other, EXPLAIN).json()["cache_explain"]
    difference = record["first_difference"]
    assert difference["stored_text"].startswith("first")
    assert difference["asked_text"].startswith("another")
    assert difference["place"] == {"turn": 2, "opened_by": "<｜User｜>"}
    assert "cache_explain" not in ask(salted, other).json()


def test_stream_brings_the_explanation_with_its_first_chunk(salted: FakeServer) -> None:
    lines = ask(salted, headers=EXPLAIN, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "prompt_tokens" in chunks[0]["cache_explain"]
    assert all("cache_explain" not in chunk for chunk in chunks[1:])


def test_plain_completions_are_explained_too(salted: FakeServer) -> None:
    answer = httpx.post(f"{salted.url}/v1/completions", json={"prompt": "hello"}, headers=EXPLAIN, timeout=20).json()
    assert answer["cache_explain"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_explain_route_answers_for_every_rank_and_names_the_tool(salted: FakeServer) -> None:
    def tool(name: str, text: str) -> dict[str, object]:
        return {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object", "properties": {}}}}

    before = len(salted.recorded())
    ask(salted, USER, tools=[tool("first", "same"), tool("second", "old words")])
    body = {"messages": USER, "tools": [tool("first", "same"), tool("second", "new words")]}
    answer = httpx.post(f"{salted.url}/deepinfer/cache/explain", json=body, timeout=20).json()
    assert [rank["rank"] for rank in answer["ranks"]] == [0]
    assert answer["ranks"][0]["first_difference"]["place"]["tool"] == "second"
    assert len(salted.recorded()) == before + 1


def test_miss_reasons_and_frames_are_in_the_exposition(salted: FakeServer) -> None:
    def lines() -> list[str]:
        text = httpx.get(f"{salted.url}/metrics", timeout=20).text
        names = ("hicache_miss_total{", "hicache_frames{", "hicache_evicted_frames_total{", "hicache_restore_seconds_")
        return [line.partition(":")[2] for line in text.splitlines() if any(f":{name}" in line for name in names)]

    ask(salted)
    before = [line for line in lines() if "evicted" in line or "le=" in line]
    ask(salted)
    eventually(lambda: not set(before) & set(lines()))  # every one of them grows with the requests
    found = "\n".join(lines())
    assert 'state="free"} 9.0' in found
    assert 'reason="no_page"' in found
    assert 'kind="page"' in found
    assert 'reason="lru"}' in found
    for sample in ('bucket{engine="0",le="0.001"', 'bucket{engine="0",le="+Inf"', "count{", "sum{"):
        assert f"hicache_restore_seconds_{sample}" in found


def test_faults_arguments_reach_the_engine(salted: FakeServer) -> None:
    body = {"kind": "flip", "target": "state", "page": -2, "byte": 7, "count": 3, "seconds": 0.5}
    answer = httpx.post(f"{salted.url}/deepinfer/debug/fault", json=body, timeout=20).json()
    assert answer == {"ranks": [{"flipped": 1, "target": "state", "page": -2, "byte": 7, "count": 3, "seconds": 0.5}]}
    assert httpx.post(f"{salted.url}/deepinfer/debug/fault", json={"kind": "flip", "count": 0}, timeout=20).status_code == 400


def test_pin_answers_what_every_rank_keeps_of_conversations_ids_and_prompts(salted: FakeServer) -> None:
    ask(salted, [{"role": "user", "content": "pin me"}], cache_salt="one")
    ids = salted.recorded()[-1]["ids"]

    def pin(**body: object) -> httpx.Response:
        return httpx.post(f"{salted.url}/hicache/pin", json=body, timeout=20)

    by_talk = pin(messages=[{"role": "user", "content": "pin me"}], cache_salt="one", ttl_s=60).json()
    assert by_talk == {"prompt_tokens": len(ids), "ranks": [{"rank": 0, "pinned_tokens": len(ids), "restorable_tokens": len(ids)}]}
    assert pin(token_ids=ids).json() == by_talk
    assert pin(token_ids=ids, ttl_s=0).json()["ranks"][0]["pinned_tokens"] == 0
    assert pin(prompt="pin me").status_code == 200
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "x", "ttl_s": -1}, "ttl_s"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": 3}, "token_ids"),
    ):
        refused = pin(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
