"""A small OpenAI-compatible server for tests: one word is one token, the answer is a function of the prompt, faults on demand."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE, KEEP = 128, 140
WORDS = ("red", "green", "blue", "black", "white", "amber", "violet", "grey")


class FakeServer(ThreadingHTTPServer):
    """`fault` applies to every chat request: error, hang, truncated, refuse, short, empty. cache: works, off, wrong (other tokens on a
    hit), approximate (wrong by replays), damaged (each hit counts a checksum error), miscounted, stubborn (forgets nothing), shared (by
    all tenants), mortal (lost with its process), full (no frames for a state at a last page end), answers (a state at the end of every
    answer). `tenants` False refuses cache_salt. `ours` False leaves out everything beyond the common API.
    """

    daemon_threads = True

    def __init__(
        self,
        *,
        fault: str = "",
        cache: str = "works",
        ours: bool = True,
        only_turn: int | None = None,
        rank_header: bool = False,
        faulty: bool = False,
        tenants: bool = True,
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.cache, self.ours, self.only_turn, self.rank_header = fault, cache, ours, only_turn, rank_header
        self.states: list[tuple[list[str], set[int]]] = []
        self.requests: list[dict[str, Any]] = []
        self.hits = self.looked = self.prompts = self.generated = self.damaged = self.resets = 0
        self.faulty, self.tenants, self.armed = faulty, tenants, ""
        self.generation, self.recovered, self.reported = 1, 0, 0.0
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def port(self) -> int:
        return int(self.server_address[1])


def words_of(body: dict[str, Any]) -> list[str]:
    if "prompt" in body:
        return str(body["prompt"]).split()
    return [word for message in body["messages"] for word in (f"<{message['role']}>", *message["content"].split())] + ["<assistant>"]


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json({"object": "list", "data": [{"id": "fake", "object": "model"}]})
        elif self.path == "/health/ready" and self.server.ours:
            self._json({"status": "ok"})
        elif self.path == "/deepinfer/metrics" and self.server.ours:
            self._json(self._metrics())
        else:
            self._json({"error": {"message": "not found", "type": "invalid_request_error", "code": "not_found"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if self.path == "/tokenize" and self.server.ours:
            self._json({"count": len(words_of(body)), "tokens": [zlib.crc32(word.encode()) for word in words_of(body)]})
        elif self.path == "/reset_prefix_cache" and self.server.ours:
            if self.server.cache != "stubborn":
                self.server.states.clear()
            self.server.resets += 1
            self._json({})
        elif self.path == "/deepinfer/debug/fault" and self.server.faulty:
            self._break_rank(body["kind"])
            self._json({"ranks": [{}]})
        elif self.path == "/deepinfer/cache/explain" and self.server.ours:
            self._json(explained(len(words_of(body))))
        elif self.path == "/v1/chat/completions":
            self._chat(body)
        else:
            self._json({"error": {"message": "not found", "code": "not_found"}}, 404)

    def _json(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _break_rank(self, kind: str) -> None:
        s = self.server
        if kind != "exit":
            s.armed = kind
            return
        s.generation += 1
        if s.cache == "mortal":
            del s.states[1:]  # one page survives, so this is a loss and not a private arena
        s.recovered = len(s.states)

    def _metrics(self) -> dict[str, Any]:
        """A rank's report is as old as the request for it before."""
        s = self.server
        reported, s.reported = s.reported, time.time()
        cache: dict[str, Any] = {
            "lookups_total": 1,
            "lookup_tokens_total": s.looked,
            "hit_tokens_total": s.hits,
            "checksum_errors_total": s.damaged,
        }
        if s.cache == "full":
            cache |= {"store_skipped_total": {"no_state_frames": len(s.states)}, "frames": {"free": 2}, "arena_bytes": 2**27}
        if s.cache == "approximate":
            cache["state_hits_total"] = {"bounded_replay": s.hits // PAGE}
        cache |= {"miss_total": {"short": 3, "no_page": 0}, "recovered": {"pages": s.recovered}}
        tokens = {"prompt_total": s.prompts, "cached_total": s.hits, "generated_total": s.generated}
        kv = {"tokens_total": 1000, "tokens_used": 250}
        rank: dict[str, Any] = {
            "rank": 0,
            "generation": s.generation,
            "report_time": reported,
            "running": 1,
            "waiting": 2,
            "kv": kv,
            "steps_total": 5,
        }
        rank |= {"tokens": tokens, "prefix_cache": cache}
        totals = {"tokens": tokens, "prefix_cache": cache}
        return {"schema": 1, "time": s.reported - 1e-3, "state": "ready", "ranks": [rank], "totals": totals}

    def _cached(self, prompt: list[str], body: dict[str, Any]) -> int:
        s = self.server
        if s.cache == "off" or body.get("prefix_cache") is False:
            return 0
        cap = max(0, (len(prompt) - KEEP) // PAGE * PAGE)
        if s.cache != "shared":
            prompt = [f"{body.get('cache_salt', '')}:{word}" for word in prompt]
        with s.lock:
            best = max((p for stored, at in s.states for p in at if p <= cap and stored[:p] == prompt[:p]), default=0)
            states = {(len(prompt) - KEEP) // PAGE * PAGE, (len(prompt) - 1) // PAGE * PAGE}
            matched = max((pages_in_common(stored, prompt) for stored, _ in s.states), default=0)
            states |= {matched} if matched - best > 2 * PAGE else set()  # where it leaves a known path
            if s.cache == "full":
                states.discard((len(prompt) - 1) // PAGE * PAGE)
            s.states.append((prompt, {p for p in states if p > 0}))
            s.looked += len(prompt)
            s.hits += best + (s.cache == "miscounted")
            s.damaged += s.cache == "damaged" and best > 0
            if best and s.armed:
                if s.armed != "delay" and s.cache != "blind":
                    s.hits -= best
                    s.damaged, best = s.damaged + 1, 0
                elif s.armed == "delay":
                    time.sleep(0.05)
                s.armed = ""
        return best

    def _chat(self, body: dict[str, Any]) -> None:
        s = self.server
        prompt = words_of(body)
        s.requests.append(body)
        turn = sum(m["role"] == "user" for m in body["messages"]) - 1
        fault = s.fault if s.only_turn in (None, turn) and len(prompt) > 10 else ""
        if fault == "refuse":
            self._json({"error": {"message": "the queue is full", "type": "rate_limit_error", "code": "queue_full"}}, 429)
            return
        if "cache_salt" in body and not s.tenants:
            self._json({"error": {"message": "cache_salt is not supported", "code": "unsupported_parameter"}}, 400)
            return
        cached = self._cached(prompt, body)
        count = int(body.get("max_tokens") or 16)
        seed = zlib.crc32(" ".join(prompt).encode()) + (1 if s.cache in ("wrong", "approximate") and cached else 0)
        answer = [WORDS[(seed >> i % 24) % len(WORDS)] + " " for i in range(count)]
        if s.cache == "answers" and body.get("prefix_cache") is not False:
            whole = [f"{body.get('cache_salt', '')}:{word}" for word in [*prompt, *(word.strip() for word in answer)]]
            s.states.append((whole, {(len(whole) - 1) // PAGE * PAGE}))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        if s.rank_header:
            self.send_header("X-DeepInfer-Rank", "0")
        self.end_headers()
        self.close_connection = True
        self._stream(answer, len(prompt), cached, fault, bool(body.get("logprobs")))

    def _event(self, body: Any, name: str = "") -> None:
        self.wfile.write((f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()

    def _stream(self, answer: list[str], prompt_tokens: int, cached: int, fault: str, logprobs: bool) -> None:
        self.wfile.write(b": keep-alive\n\n")
        self._event(choice({"role": "assistant", "content": ""}))
        answer = [] if fault == "empty" else answer[: len(answer) // 2] if fault == "short" else answer
        for i, word in enumerate(answer):
            if i == len(answer) // 2 and fault in ("error", "hang", "truncated"):
                self._break(fault)
                return
            self._event(choice({"content": word}, tokens=[word] if logprobs else None))
            time.sleep(0.001)
        self._event(choice({}, finish="length"))
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        self._event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(answer), **details}})
        self.wfile.write(b"data: [DONE]\n\n")
        with self.server.lock:
            self.server.prompts += prompt_tokens
            self.server.generated += len(answer)

    def _break(self, fault: str) -> None:
        if fault == "error":
            self._event({"error": {"message": "rank 0 died", "code": "rank_failed"}}, "error")
        elif fault == "hang":
            self.server.released.wait(30)


def pages_in_common(a: list[str], b: list[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) // PAGE * PAGE


def explained(prompt_tokens: int) -> dict[str, Any]:
    place = {"turn": 1, "opened_by": "<s>", "tool": "search"}
    difference = {"index": 300, "stored": [1], "asked": [2], "stored_text": "old words", "asked_text": "new words", "place": place}
    states = [{"position": 256, "reason": "anchor"}]
    facts = {"matched_tokens": 256, "states": states, "restore_tokens": 256, "miss": "", "first_difference": difference}
    facts["replay"] = {"mode": "bounded", "end": 384, "tokens": 128}
    return {"prompt_tokens": prompt_tokens, "ranks": [{"rank": 0, "prompt_tokens": prompt_tokens, **facts}]}


def choice(delta: dict[str, Any], *, finish: str | None = None, tokens: list[str] | None = None) -> dict[str, Any]:
    item: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
    if tokens is not None:
        item["logprobs"] = {"content": [{"token": token, "logprob": -0.5} for token in tokens]}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [item]}


@contextmanager
def serving(**options: Any) -> Iterator[FakeServer]:
    server = FakeServer(**options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
