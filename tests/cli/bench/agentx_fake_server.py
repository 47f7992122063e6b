"""A small OpenAI-compatible server on 127.0.0.1 with two pretended ranks, a pretended prefix cache and faults on demand."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

PAGE, KEEP = 128, 140
TOKENIZER = Path(__file__).resolve().parents[3] / "engine" / "models" / "tiny_tokenizer.json"
WORDS = [" alpha", " beta", " gamma", " delta"]


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. `*_every`: each n-th measured request, counted from `after`; 0 never."""

    after: int = 0
    status_500_every: int = 0
    bare_error_every: int = 0
    event_error_every: int = 0
    half_every: int = 0
    overflow_every: int = 0
    hang_at: int = 0
    die_at: int = 0
    chunk_tokens: int = 1
    usage: bool = True
    cached: bool = True
    prompt_scale: float = 1.0
    close_after: int = 0
    count_lies: int = 0
    warm: bool = False
    probe_half: bool = False
    refuse_roles: bool = False
    answers_as: str = ""
    key: str = ""
    foreign: bool = False
    context: int = 131072


@dataclass(slots=True)
class Rank:
    pages: set[int] = field(default_factory=set)
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    requests: int = 0


class FakeServer:
    """Use as a context manager; `url` is valid inside."""

    def __init__(self, faults: Faults | None = None, *, model: str = "tiny", port: int = 0, token_s: float = 0.001) -> None:
        self.faults, self.model, self.port, self.token_s = faults or Faults(), model, port, token_s
        self.ranks = [Rank(), Rank()]
        self.tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.bodies: list[dict[str, Any]] = []
        self.resets = 0
        self.counter = itertools.count(1)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.ready = threading.Event()
        self.server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self.thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.server = self.loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", self.port, limit=1 << 24))
        self.port = self.server.sockets[0].getsockname()[1]
        self.ready.set()
        self.loop.run_forever()
        self.server.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0.05))
        self.loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *rest = head.decode().split("\r\n")
                method, path, _ = line.split(" ")
                headers = {k.lower(): v for k, _, v in (h.partition(": ") for h in rest if h)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "HEAD":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    continue
                if not await self._answer(method, path.split("?")[0], headers, body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        if self.faults.key and headers.get("authorization") != f"Bearer {self.faults.key}" and not path.endswith("metrics"):
            return await self._plain(writer, 401, {"error": {"message": "no key", "code": "invalid_api_key"}})
        if self.faults.foreign and path not in ("/v1/chat/completions", "/v1/models"):
            return await self._plain(writer, 404, {"detail": "Not Found"})
        if path == "/v1/chat/completions":
            return await self._chat(headers, json.loads(body), writer)
        if path == "/reset_prefix_cache" and method == "POST":
            self.resets += 1
            for rank in self.ranks:
                rank.pages.clear()
            return await self._plain(writer, 200, {})
        if path == "/tokenize":
            count = len(self._encode(json.loads(body))) + self.faults.count_lies
            return await self._plain(writer, 200, {"count": count, "max_model_len": self.faults.context})
        if path == "/v1/models":
            return await self._plain(
                writer, 200, {"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": self.faults.context}]}
            )
        if path == "/metrics":
            return await self._plain(writer, 200, self._prometheus())
        if path == "/deepinfer/metrics":
            return await self._plain(writer, 200, self._snapshot())
        return await self._plain(writer, 200 if path.startswith("/health") else 404, {"status": path})

    async def _plain(self, writer: asyncio.StreamWriter, status: int, body: Any, headers: str = "") -> bool:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/plain" if isinstance(body, str) else "application/json"
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data)
        await writer.drain()
        return True

    def _encode(self, body: dict[str, Any]) -> list[int]:
        text = body.get("prompt") or "".join(f"<{m['role']}>{m['content']}\n" for m in body["messages"])
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _admit(self, rank: Rank, ids: list[int]) -> tuple[int, int]:
        """Prompt and cached token counts; the prompt's pages are known from now on."""
        known, cached, chain = True, 0, 0
        limit = max(0, len(ids) - KEEP) // PAGE * PAGE
        for start in range(0, len(ids) // PAGE * PAGE, PAGE):
            chain = hash((chain, tuple(ids[start : start + PAGE])))
            known = known and chain in rank.pages
            cached += PAGE if known and start + PAGE <= limit else 0
            rank.pages.add(chain)
        if self.faults.warm:
            cached = limit
        rank.prompt += len(ids)
        rank.cached += cached
        rank.requests += 1
        return len(ids), cached

    async def _chat(self, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        self.bodies.append(body)
        wanted = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        measured = "x-correlation-id" in headers and wanted > 1
        number = next(self.counter) - self.faults.after if measured else 0
        fault = _Fault(self.faults, number)
        if self.faults.close_after and number > self.faults.close_after and self.server is not None:
            self.server.close()
            return False
        roles = [message["role"] for message in body["messages"]]
        if self.faults.refuse_roles and ("assistant", "assistant") in itertools.pairwise(roles):
            return await self._plain(writer, 400, {"error": {"message": "roles must alternate"}})
        if fault.hits("status_500_every"):
            return await self._plain(writer, 500, {"error": {"message": "injected failure", "type": "internal"}})
        if fault.hits("overflow_every"):
            return await self._plain(
                writer, 400, {"error": {"message": "maximum context length exceeded", "code": "context_length_exceeded"}}
            )
        place = hash(headers.get("x-session-affinity", "")) % 2
        prompt, cached = self._admit(self.ranks[place], self._encode(body))
        await asyncio.sleep(0.002 + (prompt - cached) / 200_000)
        if not body.get("stream"):
            message = {"index": 0, "message": {"role": "assistant", "content": "alpha"}, "finish_reason": "length"}
            return await self._plain(writer, 200, {"model": self.model, "choices": [message], "usage": self._usage(prompt, cached, wanted)})
        return await self._stream(writer, body, fault, place, (prompt, cached, wanted))

    def _usage(self, prompt: int, cached: int, done: int) -> dict[str, Any]:
        prompt = round(prompt * self.faults.prompt_scale)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
        if self.faults.cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage | {"completion_tokens_details": {"reasoning_tokens": 0}}

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], fault: _Fault, place: int, counts: tuple[int, int, int]
    ) -> bool:
        prompt, cached, wanted = counts
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-DeepInfer-Rank: {place}\r\nConnection: close\r\n\r\n".encode()
        )
        running = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
        total = max(1, wanted // 2) if fault.hits("half_every") or self.faults.probe_half else wanted
        self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for done in range(0, total, self.faults.chunk_tokens):
            if done >= total // 2 and await self._break(writer, fault):
                return False
            size = min(self.faults.chunk_tokens, total - done)
            chunk: dict[str, Any] = {
                "choices": [{"index": 0, "delta": {"content": "".join(WORDS[i % 4] for i in range(size))}, "finish_reason": None}]
            }
            if running and self.faults.usage:
                chunk["usage"] = self._usage(prompt, cached, done + size)
            self._event(writer, chunk)
            await writer.drain()
            await asyncio.sleep(self.token_s * size)
        self.ranks[place].generated += total
        self._event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if self.faults.usage:
            self._event(writer, {"choices": [], "usage": self._usage(prompt, cached, total)})
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        return False

    async def _break(self, writer: asyncio.StreamWriter, fault: _Fault) -> bool:
        """Whether the stream ends here, and how."""
        if fault.hits("bare_error_every") or fault.hits("event_error_every"):
            line = b"event: error\n" if fault.hits("event_error_every") else b""
            writer.write(line + b'data: {"error": {"message": "rank died", "type": "internal"}}\n\n')
            await writer.drain()
            return True
        if fault.at("die_at"):
            writer.transport.abort()
            return True
        if fault.at("hang_at"):
            await asyncio.sleep(3600)
        return False

    def _event(self, writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
        writer.write(
            b"data: "
            + json.dumps(
                {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": self.faults.answers_as or self.model} | chunk
            ).encode()
            + b"\n\n"
        )

    def _prometheus(self) -> str:
        lines = []
        for name, key in (
            ("prompt_tokens", "prompt"),
            ("generation_tokens", "generated"),
            ("prefix_cache_queries", "prompt"),
            ("prefix_cache_hits", "cached"),
        ):
            lines += [f"# HELP vllm:{name}_total x", f"# TYPE vllm:{name}_total counter"]
            lines += [f'vllm:{name}_total{{engine="{i}",model_name="{self.model}"}} {getattr(r, key)}' for i, r in enumerate(self.ranks)]
        return "\n".join(lines) + "\n"

    def _snapshot(self) -> dict[str, Any]:
        ranks = [
            {
                "rank": i,
                "running": 0,
                "waiting": 0,
                "tokens": {"prompt_total": r.prompt, "cached_total": r.cached, "generated_total": r.generated},
                "prefix_cache": {
                    "lookup_tokens_total": r.prompt,
                    "hit_tokens_total": r.cached,
                    "tiers": {"device": {"hit_tokens_total": r.cached}, "host": {"hit_tokens_total": 0}},
                },
            }
            for i, r in enumerate(self.ranks)
        ]
        return {"schema": 1, "boot_id": "fake", "model": self.model, "state": "ready", "ranks": ranks}


@dataclass(frozen=True, slots=True)
class _Fault:
    faults: Faults
    number: int

    def hits(self, name: str) -> bool:
        every = getattr(self.faults, name)
        return bool(every) and self.number > 0 and self.number % every == 0

    def at(self, name: str) -> bool:
        return self.number > 0 and self.number == getattr(self.faults, name)


def tokenizer_dir(folder: Path) -> Path:
    """The embedded model's tokenizer as a directory that the harness accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def with_faults(**changes: Any) -> Faults:
    return replace(Faults(), **changes)
