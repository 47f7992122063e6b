"""Options that change what clients see: reasoning alias, origins, foreign metric names, lenient tool history, time for headers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.config import ServerConfig
from server.errors import ConfigError
from server.prometheus import Rate
from server.start_checks import check_exposure, read_keys
from tests.server.harness import FakeServer, finish, start_fake

USER = [{"role": "user", "content": "x"}]
PAGE = "https://pages.example"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("key\n")
    server = start_fake(
        reasoning_alias=True, allow_origin=PAGE, metrics_compat="sglang", lenient_tool_history=True, header_timeout_s=0.5,
        api_key_file=str(keys), docs=True,
    )  # fmt: skip
    server.script("a thought</think>an answer")
    yield server
    finish(server)


@pytest.fixture
def client(opened: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=opened.url, headers={"authorization": "Bearer key"}) as client:
        yield client


def test_reasoning_has_both_names_streamed_and_whole(client: httpx.Client) -> None:
    message = client.post("/v1/chat/completions", json={"messages": USER}).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "a thought"
    lines = client.post("/v1/chat/completions", json={"messages": USER, "stream": True}).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "a thought"
    assert not [delta for delta in deltas if "reasoning" in delta and "content" in delta]


def test_listed_origin_may_call_from_a_browser_and_others_may_not(client: httpx.Client, opened: FakeServer) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = httpx.options(f"{opened.url}/v1/chat/completions", headers={"origin": PAGE, **ask})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-credentials" not in preflight.headers
    other = httpx.options(f"{opened.url}/v1/chat/completions", headers={"origin": "https://other.example", **ask})
    assert "access-control-allow-origin" not in other.headers
    answer = client.post("/v1/chat/completions", json={"messages": USER}, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    refused = httpx.post(f"{opened.url}/v1/chat/completions", json={"messages": USER}, headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_metric_names_of_the_chosen_server_only(client: httpx.Client) -> None:
    text = client.get("/metrics").text
    names = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert {"sglang:num_running_reqs", "sglang:token_usage", "sglang:cache_hit_rate", "sglang:gen_throughput"} <= names
    assert {"sglang:num_queue_reqs", "sglang:cached_tokens_total", "deepinfer:num_requests_running"} <= names
    assert "deepinfer:event_loop_lag_seconds_count" in names
    assert not [name for name in names if name.startswith("vllm:")]


def test_rate_is_growth_per_second_and_survives_close_scrapes() -> None:
    rate = Rate()
    assert rate.per_second(100, 10.0) == 0.0
    assert rate.per_second(300, 12.0) == 100.0
    assert rate.per_second(999, 12.5) == 100.0
    assert rate.per_second(310, 14.0) == 5.0


def test_unanswered_tool_calls_pass_when_the_server_is_lenient(client: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, *USER]
    assert client.post("/v1/chat/completions", json={"messages": history}).status_code == 200


def test_headers_that_dribble_in_are_cut_off_with_a_408(opened: FakeServer) -> None:
    with socket.create_connection((opened.state.host, opened.state.port)) as raw:
        raw.settimeout(5)
        began_s = time.monotonic()
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        answer = raw.recv(65536)
        assert 0.3 < time.monotonic() - began_s < 3
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "header_timeout"
        assert raw.recv(10) == b""


def test_headers_without_end_are_a_431_and_not_http_is_a_400(opened: FakeServer) -> None:
    for data, status in (
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 10_000, b"431"),
        (b"GET /health HTTP/1.1\r\nlong: " + b"b" * 40_000 + b"\r\n\r\n", b"431"),
        (b"\x16\x03\x01 hello\r\n\r\n", b"400"),
    ):
        with socket.create_connection((opened.state.host, opened.state.port)) as raw:
            raw.settimeout(5)
            raw.sendall(data)
            answer = raw.recv(65536)
            assert answer.startswith(b"HTTP/1.1 " + status), answer
            assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


def test_document_describes_exactly_the_routes_that_exist(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            answer = client.request(method, path.replace("{name}", "fake"), content=b"", headers={"content-type": "application/json"})
            assert answer.status_code not in (404, 405), (method, path)
            assert str(answer.status_code) in methods[method]["responses"], (method, path, answer.status_code)
    assert "/deepinfer/debug/fault" in document["paths"]


def test_required_key_and_unknown_metric_names_are_refused_at_start(tmp_path: Path) -> None:
    events: list[dict[str, object]] = []
    check_exposure(ServerConfig(host="0.0.0.0"), [], events.append)
    assert events[0]["event"] == "warning"
    with pytest.raises(ConfigError, match="no API key"):
        check_exposure(ServerConfig(host="0.0.0.0", require_key=True), [], events.append)
    check_exposure(ServerConfig(host="0.0.0.0", require_key=True), ["key"], events.append)
    with pytest.raises(ConfigError, match="metrics_compat"):
        ServerConfig(metrics_compat="vllm,other")
    assert read_keys("") == []


def test_the_page_of_the_interface_needs_no_other_host(client: httpx.Client) -> None:
    answer = client.get("/docs")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "script-src" not in answer.headers["content-security-policy"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not [word for word in ("<script", "http://", "https://") if word in answer.text]
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        assert f"<code>{path}</code>" in answer.text, (path, methods)
