"""A hostile client with a raw socket against a running server. After every attack the server answers as before, with the same processes."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from server import admin
from tests.server.harness import FakeServer, alive, eventually, finish, group_pids, start_fake

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"messages":[{"role":"user","content":"x"}]}'
ASK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
ALLOWED_GROWTH_MIB = 20
MOST_OF_ONE_BACKLOG_MIB = 48  # 24,000 outputs of two alternatives each, at 2 KiB
CLIENT = httpx.Client(timeout=60)  # a new one for every request would cost more than the attacks


@pytest.fixture(scope="module")
def attacked() -> Iterator[FakeServer]:
    server = start_fake()
    yield server
    finish(server)


def resident_mib(pids: list[int]) -> float:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20


def metrics(server: FakeServer) -> dict[str, Any]:
    return dict(CLIENT.get(f"{server.url}/deepinfer/metrics").json())


def normal_answer(server: FakeServer) -> str:
    answer = CLIENT.post(f"{server.url}/v1/chat/completions", json={**ASK, "thinking": {"type": "disabled"}})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


class Memory:
    """What the server's processes hold."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._resident = pids, resident_mib(pids)

    def count_from_now(self) -> None:
        """What the attack has taken so far does not count: an allocator keeps the most that was ever in use at once."""
        self._resident = resident_mib(self._pids)

    @property
    def growth_mib(self) -> float:
        return resident_mib(self._pids) - self._resident


@pytest.fixture(autouse=True)
def memory(attacked: FakeServer) -> Iterator[Memory]:
    """Around every attack: same answer, same processes, no restart, nothing left running, no memory gone."""
    attacked.script("Hello there")
    before, answer = group_pids(attacked.current()), normal_answer(attacked)
    memory, watchdog = Memory(before), metrics(attacked)["watchdog"]
    yield memory
    attacked.script("Hello there")
    assert normal_answer(attacked) == answer
    assert group_pids(attacked.current()) == before
    assert all(alive(pid) for pid in before)
    assert metrics(attacked)["watchdog"] == watchdog
    eventually(lambda: metrics(attacked)["requests"]["active"] == 0, 20)
    assert memory.growth_mib <= ALLOWED_GROWTH_MIB


def raw(server: FakeServer, data: bytes, patience_s: float = 20.0) -> bytes:
    """The first answer to bytes on a connection of its own; empty when the server just closes."""
    with socket.create_connection((server.state.host, server.state.port)) as sock:
        sock.settimeout(patience_s)
        try:
            sock.sendall(data)
            return sock.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            return b""


def status(answer: bytes) -> int:
    return int(answer[9:12]) if answer else 0


@pytest.mark.parametrize(
    "data",
    [
        CHAT + b"content-length: 44\r\ncontent-length: 45\r\n\r\n" + BODY,
        CHAT + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n",
        CHAT + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        CHAT + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        CHAT + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        CHAT + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
        CHAT + b"transfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\nabc",
        CHAT + b"content-length: -5\r\n\r\nabc",
        CHAT + b"content-length: +5\r\n\r\nabcde",
        CHAT + b"content-length: 5, 5\r\n\r\nabcde",
        CHAT + b"content-length: \xb2\r\n\r\nabc",
        b"GET /health HTTP/1.1\nhost: x\n\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\na: b\r\n c: d\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: a\rSet-Cookie: b=c\r\n\r\n",
        b"GET  HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"get /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    ],
)  # fmt: skip
def test_what_two_parsers_could_read_differently_is_refused_and_the_connection_closed(attacked: FakeServer, data: bytes) -> None:
    answer = raw(attacked, data)
    assert status(answer) == 400
    assert b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 20_000 + b"\r\n", 431),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (CHAT + b"content-length: 9223372036854775807\r\n\r\nabc", 413),
        (CHAT + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\n\x1f\x8b\x08", 400),
        (CHAT + b"content-type: application/json; charset=utf-16\r\ncontent-length: 4\r\n\r\n{\x00}\x00", 400),
        (CHAT + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY, 200),
        (b"GET http://evil.example/health HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"TRACE /health HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"GET /%ff%00%0d%0aset-cookie:%20a HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /v1/models/%3Cscript%3E HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET //metrics HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    ],
)
def test_odd_requests_get_the_plain_answer(attacked: FakeServer, data: bytes, expected: int) -> None:
    answer = raw(attacked, data)
    assert status(answer) == expected
    assert b"set-cookie" not in answer.lower()
    assert b"root:" not in answer


def post(server: FakeServer, body: dict[str, Any], path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
    return CLIENT.post(f"{server.url}{path}", json=body, **options)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 10**18}, {"max_tokens": 2**63}, {"max_tokens": 1e30}, {"max_completion_tokens": -1}, {"n": 10**9}, {"seed": 2**64},
        {"seed": 0.5}, {"temperature": 1e308}, {"top_p": -0.0}, {"top_k": 2**40}, {"top_logprobs": 10**6, "logprobs": True},
        {"stop": ["a"] * 1000}, {"stop": "x" * 10**6}, {"logit_bias": {str(i): 1 for i in range(10**5)}}, {"logit_bias": {"1": 1e300}},
        {"logit_bias": {"-1": 1}}, {"logit_bias": {"٣": 1}}, {"stop_token_ids": [2**70]}, {"stop_token_ids": [1] * 10**5},
        {"min_tokens": 10**18}, {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5000)]},
        {"tools": [{"type": "function", "function": {"name": "a b<script>"}}]}, {"messages": [{"role": "user", "content": "x"}] * 10_001},
        {"messages": [{"role": "<｜User｜>", "content": "x"}]}, {"session_id": "x" * 10**6}, {"model": "../../etc/passwd"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
    ],
)  # fmt: skip
def test_parameter_bombs_are_refused_by_name(attacked: FakeServer, fields: dict[str, Any]) -> None:
    answer = post(attacked, {**ASK, **fields})
    assert answer.status_code in (400, 404), answer.text
    assert len(answer.content) < 1000


def test_ten_thousand_unknown_fields_are_counted_and_not_kept(attacked: FakeServer) -> None:
    for begin in range(0, 10_000, 1000):
        assert post(attacked, {**ASK, **{f"field{begin + i}": i for i in range(1000)}}).status_code == 200
    text = CLIENT.get(f"{attacked.url}/metrics").text
    assert "field9" not in text


def test_client_text_reaches_no_label_header_or_log(attacked: FakeServer) -> None:
    mark = 'evil"} 1\nfake_metric{a="b'
    for fields in ({"model": mark}, {"user": mark}, {"session_id": mark}, {mark: 1}):
        answer = post(attacked, {**ASK, **fields}, headers={"x-session-id": "evil-session", "user-agent": "evil-agent"})
        assert "fake_metric" not in str(answer.headers)
    exposition = CLIENT.get(f"{attacked.url}/metrics").text
    assert "evil" not in exposition
    assert "fake_metric" not in exposition
    logs = "".join(path.read_text(errors="replace") for path in attacked.directory.rglob("front.log"))
    assert not [line for line in logs.splitlines() if not line.startswith("{")]
    assert "fake_metric" not in logs, "a field's name is told if it is one"


def test_text_that_leaves_no_stand_in_ends(attacked: FakeServer) -> None:
    text = "".join(map(chr, range(0xE000, 0xF900))) + "｜</think>"
    assert post(attacked, {**ASK, "messages": [{"role": "user", "content": text}]}, path="/tokenize").status_code == 200


def test_a_reader_that_comes_back_to_a_large_backlog_does_not_stop_the_loop(attacked: FakeServer, memory: Memory) -> None:
    """Thousands of waiting outputs are framed a few at a time, also when their reader reads again or leaves.

    How much of it waits at once depends on the machine, below the bounds of `tests/server/test_slow_readers.py`. It has to be given back:
    further ones take no more.
    """
    leave_a_backlog(attacked)
    assert memory.growth_mib <= MOST_OF_ONE_BACKLOG_MIB
    memory.count_from_now()
    leave_a_backlog(attacked)


def leave_a_backlog(server: FakeServer) -> None:
    """A client that asks for 24,000 tokens, reads next to nothing of them, and leaves when all of them wait for it."""
    server.script("word " * 3000)
    body = json.dumps({**ASK, "max_tokens": 3900, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((server.state.host, server.state.port))
        sock.sendall(CHAT + b"content-length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: metrics(server)["ranks"][0]["running"] > 0, 20)
        eventually(lambda: metrics(server)["ranks"][0]["running"] == 0, 60)
    eventually(lambda: metrics(server)["requests"]["streams_open"] == 0, 20)


PAGE = "http://pages.example"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"origin": "own"}, 200),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:1"}, 200),
        ({"host": "workstation"}, 200),
        ({"host": "pages.localhost"}, 200),
        ({"origin": PAGE}, 403),
        ({"origin": "null"}, 403),
        ({"host": "pages.example:8888", "origin": "http://pages.example:8888"}, 403),
        ({"host": "pages.example"}, 403),
        ({"host": "127.0.0.1.pages.example"}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/reset_prefix_cache"])
def test_pages_of_other_sites_cannot_use_a_server_without_keys(
    attacked: FakeServer, headers: dict[str, str], expected: int, path: str
) -> None:
    """A page may send a body without content type anywhere, and a name that is made to lead here makes it read the answer."""
    own = {name: attacked.url if value == "own" else value for name, value in headers.items()}
    answer = CLIENT.post(f"{attacked.url}{path}", content=json.dumps(ASK), headers=own)
    assert answer.status_code == expected, answer.text
    if expected == 403:
        assert answer.json()["error"]["code"] == "foreign_origin"
        assert "access-control-allow-origin" not in answer.headers


def test_the_page_puts_no_text_of_a_model_into_markup() -> None:
    """What a model writes, a document may have told it to write: the page shows it as text nodes only, and loads nothing."""
    page = (Path(admin.__file__).parent / "page.html").read_text(encoding="utf-8")
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc", "javascript:"):
        assert sink not in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
