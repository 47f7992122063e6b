"""Refusals over TCP: status, body and field of everything that a client can get wrong; the server stays well."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.server.harness import FakeServer, alive, finish, group_pids, start_fake

USER = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def check_error(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if code is not None:
        assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error
    return dict(error)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 393217}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": 1}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 513]}, "stop"),
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
        ({"stop_token_ids": "1"}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"prefix_cache": "no"}, "prefix_cache"),
        ({"prefix_cache": {"read": 0}}, "prefix_cache.read"),
        ({"cache_priority": 101}, "cache_priority"),
        ({"cache_priority": "high"}, "cache_priority"),
        ({"cache_priority": {"seconds": 5}}, "cache_priority.priority"),
        ({"cache_priority": {"priority": 80, "seconds": 0}}, "cache_priority.seconds"),
        ({"cache_priority": {"priority": 35, "seconds": 5}}, "cache_priority.seconds"),
        ({"cache_priority": {"priority": 80, "seconds": 10**400}}, "cache_priority.seconds"),
        ({"temperature": -(10**400)}, "temperature"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias.1"),
        ({"functions": []}, "functions"),
        ({"tools": {}}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, None),
        ({"messages": [{"role": "user", "content": None}]}, None),
        ({"reasoning_effort": True}, "reasoning_effort"),
        ({"task": "fly"}, "task"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_bad_field_is_a_400_that_names_it(fake: FakeServer, extra: dict[str, Any], param: str | None) -> None:
    check_error(httpx.post(f"{fake.url}/v1/chat/completions", json={"messages": USER, **extra}), 400, None, param)


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {"regex": "a+"},
        {"structured_outputs": {}},
        {"cache_salt": "s"},
        {"functions": []},
    ],
)
def test_what_is_not_offered_is_refused_not_ignored(fake: FakeServer, extra: dict[str, Any]) -> None:
    check_error(httpx.post(f"{fake.url}/v1/chat/completions", json={"messages": USER, **extra}), 400, "unsupported_parameter")


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": None, "stop": None, "tools": None, "seed": None, "logit_bias": {}, "logprobs": None},
        {"metadata": {"a": 1}, "store": True, "service_tier": "auto", "verbosity": "low", "modalities": ["text"], "prediction": None},
        {"max_tokens": 4.0, "n": 1.0, "seed": -(2**63)},
        {"unknown_field": [1, 2], "cache_priority": None},
        {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ],
)
def test_neutral_and_ignored_fields_pass(fake: FakeServer, extra: dict[str, Any]) -> None:
    response = httpx.post(f"{fake.url}/v1/chat/completions", json={"messages": USER, **extra})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}", b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", b"[" * 100_000, b'{"a": "\xff"}',
        b'{"a": "\\ud800"}', b'{"a": "\\ud800 x"}', b"\xef\xbb\xbf{}", b'{"a": 1} x', b"\x00",
    ],
)  # fmt: skip
def test_body_that_is_not_strict_json_is_refused(fake: FakeServer, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        check_error(httpx.post(f"{fake.url}{path}", content=body, headers=headers), 400, "invalid_json")


def test_content_type_method_path_and_model(fake: FakeServer) -> None:
    url = fake.url
    body = json.dumps({"messages": USER}).encode()
    check_error(httpx.post(f"{url}/v1/chat/completions", content=body, headers={"content-type": "text/plain"}), 415)
    assert httpx.post(f"{url}/v1/chat/completions", content=body, headers={"content-type": ""}).status_code == 200
    check_error(httpx.get(f"{url}/v1/chat/completions"), 405)
    check_error(httpx.post(f"{url}/v1/models"), 405)
    check_error(httpx.get(f"{url}/nothing"), 404, "not_found")
    assert "POST /v1/chat/completions" in httpx.post(f"{url}/v1/v1/chat/completions").text, "it says what there is"
    check_error(httpx.get(f"{url}/v1/models/"), 404)
    check_error(httpx.get(f"{url}/v1/models/../../etc/passwd"), 404)
    check_error(httpx.get(f"{url}/v1/models/other"), 404, "model_not_found")
    check_error(httpx.post(f"{url}/v1/chat/completions", json={"model": "other", "messages": USER}), 404, "model_not_found")
    check_error(httpx.post(f"{url}/v1/chat/completions", json={"model": 5, "messages": USER}), 400)
    check_error(httpx.get(f"{url}/docs"), 404)
    check_error(httpx.get(f"{url}/openapi.json"), 404)


def test_too_long_prompt_is_refused_with_the_numbers(fake: FakeServer) -> None:
    error = check_error(
        httpx.post(f"{fake.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "word " * 5000}]}),
        400,
        "context_length_exceeded",
    )
    assert "4096" in error["message"]
    check_error(httpx.post(f"{fake.url}/v1/completions", json={"prompt": [5] * 4096}), 400, "context_length_exceeded")


@pytest.mark.parametrize("prompt", [None, [], 5, {}, [[]], ["a"] * 17, [4096], [-1], [[1], "a", 2.5], [True]])
def test_bad_plain_prompts_are_refused(fake: FakeServer, prompt: Any) -> None:
    check_error(httpx.post(f"{fake.url}/v1/completions", json={"prompt": prompt}), 400)


def test_error_messages_do_not_echo_long_input(fake: FakeServer) -> None:
    secret = "s" * 300
    for extra in ({"model": secret}, {"reasoning_effort": secret}, {"messages": [{"role": secret, "content": "x"}]}, {"task": secret}):
        response = httpx.post(f"{fake.url}/v1/chat/completions", json={"messages": USER, **extra})
        assert response.status_code in (400, 404)
        assert "s" * 65 not in response.text


def test_request_id_of_the_client_is_kept_when_it_is_harmless(fake: FakeServer) -> None:
    ask = {"messages": USER}
    kept = httpx.post(f"{fake.url}/v1/chat/completions", json=ask, headers={"X-Request-ID": "abc-1:2.3"})
    assert kept.headers["x-request-id"] == "abc-1:2.3"
    for odd in ("has space", "x" * 129, "ü".encode().decode("latin-1")):
        made = httpx.post(f"{fake.url}/v1/chat/completions", json=ask, headers={"X-Request-ID": odd.encode("latin-1")})  # type: ignore[dict-item]
        assert made.status_code == 200
        assert made.headers["x-request-id"] != odd


def test_scheduling_and_fault_routes_check_their_bodies(fake: FakeServer) -> None:
    url = f"{fake.url}/deepinfer/scheduling"
    assert httpx.post(url, json={"prefill_any_interval": 3}).json()["prefill_any_interval"] == 3
    assert httpx.get(url).json()["prefill_any_interval"] == 3
    for body in ({}, {"prefill_any_interval": 0}, {"prefill_any_interval": "2"}, {"other": 1}):
        check_error(httpx.post(url, json=body), 400)
    check_error(httpx.post(f"{fake.url}/deepinfer/debug/fault", json={"kind": "unheard"}), 400)
    check_error(httpx.post(f"{fake.url}/deepinfer/debug/fault", json={"kind": "flip", "rank": 3}), 400, None, "rank")
    assert httpx.post(f"{fake.url}/reset_prefix_cache").json() == {}


def random_value(random_: random.Random, depth: int = 0) -> Any:
    atoms = [None, True, False, 0, -1, 1, 3, 2**70, 1.5, -0.0, "", "x", "user", "assistant", "tool", "<｜User｜>", "\x00", "é" * 40, [], {}]
    if depth > 3 or random_.random() < 0.6:
        return random_.choice(atoms)
    if random_.random() < 0.5:
        return [random_value(random_, depth + 1) for _ in range(random_.randrange(4))]
    keys = ["role", "content", "type", "text", "function", "name", "arguments", "id", "tool_calls", "tool_call_id", "a"]
    return {random_.choice(keys): random_value(random_, depth + 1) for _ in range(random_.randrange(4))}


def malformed_bodies(count: int, seed: int) -> Iterator[bytes]:
    """Bodies near valid ones: fields replaced by random values, or bytes damaged."""
    fields = ["messages", "model", "temperature", "top_p", "top_k", "n", "stop", "logit_bias", "stream_options", "tools", "tool_choice",
              "response_format", "thinking", "reasoning_effort", "prefix_cache", "task", "chat_template_kwargs", "prompt", "max_tokens",
              "stop_token_ids", "logprobs", "seed", "parallel_tool_calls", "session_id"]  # fmt: skip
    random_ = random.Random(seed)
    for _ in range(count):
        body: dict[str, Any] = {"messages": USER, "prompt": "x", "max_tokens": 2}
        for name in random_.sample(fields, random_.randrange(1, 4)):
            body[name] = random_value(random_)
        data = json.dumps(body).encode()
        if random_.random() < 0.3:
            at = random_.randrange(len(data))
            data = data[:at] + bytes([random_.randrange(256)]) + data[at + random_.randrange(3) :]
        yield data


def fuzz(fake: FakeServer, count: int, seed: int) -> None:
    with httpx.Client(headers={"content-type": "application/json"}) as client:
        for data in malformed_bodies(count, seed):
            path = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")[len(data) % 4]
            response = client.post(f"{fake.url}{path}", content=data)
            assert response.status_code in (200, 400, 404), (path, data, response.text)
            if response.status_code != 200:
                check_error(response, response.status_code)


def test_malformed_bodies_are_refused_and_hurt_nothing(fake: FakeServer) -> None:
    before = group_pids(fake.current())
    fuzz(fake, 400, seed=1)
    assert group_pids(fake.current()) == before
    assert all(alive(pid) for pid in before)


@pytest.mark.slow
def test_ten_thousand_malformed_bodies_cost_no_memory(fake: FakeServer) -> None:
    before = group_pids(fake.current())
    fuzz(fake, 2_000, seed=3)  # caches and pools reach their size
    resident = resident_mib(before)
    fuzz(fake, 10_000, seed=2)
    assert group_pids(fake.current()) == before
    assert all(alive(pid) for pid in before)
    grown = resident_mib(before) - resident
    print(f"resident memory {resident:.0f} MiB, grown by {grown:.1f} MiB")
    assert grown <= 20


def resident_mib(pids: list[int]) -> float:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("first-key\n\nsecond-key\n")
    server = start_fake(api_key_file=str(path), max_body_bytes=1000, docs=True, rank_header=False)
    yield server
    finish(server)


def test_every_route_but_the_open_ones_needs_a_key(keyed: FakeServer) -> None:
    for method, path in (
        ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/nothing"), ("HEAD", "/v1/models"), ("OPTIONS", "/v1/models"),
        ("POST", "/reset_prefix_cache"), ("GET", "/deepinfer/scheduling"), ("GET", "/docs"), ("GET", "/openapi.json"),
        ("POST", "/tokenize"),
    ):  # fmt: skip
        response = httpx.request(method, f"{keyed.url}{path}")
        assert response.status_code == 401, (method, path)
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/deepinfer/metrics"):
        assert httpx.get(f"{keyed.url}{path}").status_code == 200, path


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ([b"Bearer first-key"], 200),
        ([b"bearer second-key"], 200),
        ([b"Bearer wrong"], 401),
        ([b"Bearer"], 401),
        ([b"Basic first-key"], 401),
        ([b"first-key"], 401),
        ([b"Bearer \xff\xfe"], 401),
        ([b""], 401),
        ([b"Bearer first-key", b"Bearer first-key"], 401),
    ],
)
def test_authorization_header(keyed: FakeServer, values: list[bytes], status: int) -> None:
    headers = [(b"authorization", value) for value in values]
    assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == status


def test_body_limit_holds_for_declared_and_chunked_bodies(keyed: FakeServer) -> None:
    headers = {"authorization": "Bearer first-key", "content-type": "application/json"}

    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    check_error(httpx.post(f"{keyed.url}/v1/chat/completions", content=b" " * 1001, headers=headers), 413, "body_too_large")
    check_error(httpx.post(f"{keyed.url}/v1/chat/completions", content=chunks(), headers=headers), 413, "body_too_large")
    assert httpx.get(f"{keyed.url}/openapi.json", headers=headers).status_code == 200


def test_too_large_headers_are_refused(keyed: FakeServer) -> None:
    response = httpx.get(f"{keyed.url}/health", headers={"x-long": "a" * 40_000})
    assert response.status_code in (400, 431)


def test_keys_are_not_visible_to_child_processes_or_files(keyed: FakeServer) -> None:
    for pid in group_pids(keyed.current()):
        for name in ("environ", "cmdline"):
            with open(f"/proc/{pid}/{name}", "rb") as file:
                assert b"first-key" not in file.read()
    assert not [path for path in keyed.directory.rglob("*") if path.is_file() and b"first-key" in path.read_bytes()]


def test_garbage_on_the_socket_does_not_hurt(fake: FakeServer) -> None:
    for data in (
        b"\x16\x03\x01garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: abc\r\n\r\n",
    ):
        with socket.create_connection((fake.state.host, fake.state.port)) as raw:
            raw.sendall(data)
            raw.settimeout(2)
            try:
                raw.recv(4096)
            except (TimeoutError, ConnectionResetError):
                continue
    assert httpx.get(f"{fake.url}/health").status_code == 200
