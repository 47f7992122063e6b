"""The load generator: a process of its own that drives any OpenAI-compatible server and writes one line per request.

`python -m deepinfer_cli.bench.load JOB.json` reads a job, appends records to its file and prints progress as JSON Lines on stdout.
Drawing happens in the parent, so it never shares this event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from deepinfer_cli.bench.prompts import Conversation
from deepinfer_cli.bench.recipe import Load, Recipe, parse_recipe
from deepinfer_cli.bench.records import Outcome, RequestRecord
from deepinfer_cli.sse import StreamError, StreamState, cached_tokens, error_text

PROGRESS_INTERVAL_S = 0.25
RANK_HEADER = "x-deepinfer-rank"
TIMING_HEADER = "x-deepinfer-timing"  # asks our server to say where the time went


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the generator needs. own_fields: the server understands our request fields beyond the common API.

    bypass: how a request goes around the prefix cache, see `preflight.Server.bypass`. salt: keeps this run apart from earlier ones.
    """

    url: str
    model: str
    recipe: Recipe
    conversations: list[Conversation]
    records: Path
    own_fields: bool
    timeout_s: float
    key: str = ""
    ignore_eos: bool = False
    bypass: str = "field"
    salt: str = ""

    def to_json(self) -> dict[str, Any]:
        """Without the key, which travels through the environment of the child only."""
        plain = dataclasses.asdict(self) | {"records": str(self.records)}
        plain.pop("key")
        return plain

    @staticmethod
    def from_json(body: dict[str, Any], key: str) -> Job:
        recipe = parse_recipe({k: _drop_none(v) for k, v in body["recipe"].items()}, "job")
        conversations = [Conversation(**c) for c in body["conversations"]]
        plain = {name: body[name] for name in ("url", "model", "own_fields", "timeout_s", "ignore_eos", "bypass", "salt")}
        return Job(**plain, recipe=recipe, conversations=conversations, records=Path(body["records"]), key=key)


def _drop_none(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class Generator:
    """Runs a job. Times come from one monotonic clock that starts at zero."""

    def __init__(self, job: Job, client: httpx.AsyncClient, out: TextIO, progress: TextIO) -> None:
        self._job, self._client, self._out, self._progress = job, client, out, progress
        self._zero_s = time.perf_counter()
        self._in_flight = self._done = self._failed = self._tokens = 0
        self._ttft_s: list[float] = []

    def now_s(self) -> float:
        return time.perf_counter() - self._zero_s

    async def run(self) -> None:
        """Every conversation to its end. A cancelled run still writes what was in flight."""
        ticker = asyncio.create_task(self._tick())
        try:
            async with asyncio.timeout(self._job.recipe.limits.max_duration_s):
                await self._schedule()
        except TimeoutError:
            self._say("limit", text=f"stopped after {self._job.recipe.limits.max_duration_s:.0f} s")
        finally:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker
            self._report()

    async def _schedule(self) -> None:
        load = self._job.recipe.load
        if load.arrival == "closed":
            waiting = iter(self._job.conversations)
            await asyncio.gather(*(self._worker(waiting) for _ in range(load.concurrency)))
            return
        starts = arrival_times(load, len(self._job.conversations), self._job.recipe.prompt.seed)
        await asyncio.gather(*(self._converse(c, at) for c, at in zip(self._job.conversations, starts, strict=True)))

    async def _worker(self, waiting: Any) -> None:
        pause_s = 0.0
        for conversation in waiting:
            await self._converse(conversation, self.now_s() + pause_s)
            pause_s = self._job.recipe.load.think_time_s

    async def _converse(self, conversation: Conversation, at_s: float) -> None:
        messages: list[dict[str, str]] = [{"role": "system", "content": conversation.system}] if conversation.system else []
        for turn, text in enumerate(conversation.turns):
            if (wait_s := at_s - self.now_s()) > 0:
                await asyncio.sleep(wait_s)
            messages.append({"role": "user", "content": text})
            record = RequestRecord(f"{conversation.index}-{turn}", conversation.index, turn, at_s, self.now_s())
            record.requested_tokens = self._job.recipe.output.tokens
            answer = await self._ask(record, messages)
            if record.outcome != Outcome.OK:
                return  # later turns would speak about an answer that never came
            messages.append({"role": "assistant", "content": answer})
            at_s = self.now_s() + self._job.recipe.load.think_time_s

    async def _ask(self, record: RequestRecord, messages: list[dict[str, str]]) -> str:
        self._in_flight += 1
        content: list[str] = []
        state = StreamState()
        try:
            async for text in self._stream(record, messages, state):
                content.append(text)
            record.outcome, record.error_text = judge(record, state, self._job.recipe.output.ignore_eos and self._exact)
        except StreamError as error:
            record.error_code, record.error_text = error.code or "stream_error", str(error)
        except Refused as error:
            record.error_code, record.error_text = error.code, str(error)
        except httpx.TimeoutException:
            record.error_code, record.error_text = "timeout", f"no byte for {self._job.timeout_s:.0f} s"
        except httpx.HTTPError as error:
            record.error_code, record.error_text = "connection", f"{type(error).__name__}: {error}".rstrip(": ")
        except asyncio.CancelledError:
            record.outcome = Outcome.CANCELLED
            raise
        finally:
            self._finish(record, state)
        return "".join(content)

    async def _stream(self, record: RequestRecord, messages: list[dict[str, str]], state: StreamState) -> AsyncIterator[str]:
        last_s: float | None = None
        body, headers = self._body(record, messages), {TIMING_HEADER: "1"} if self._job.own_fields else {}
        async with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                raise _refused(response.status_code, await response.aread())
            rank = response.headers.get(RANK_HEADER, "")
            record.rank = int(rank) if rank.isdigit() else None
            async for line in response.aiter_lines():
                chunk = state.push(line)
                if chunk is None or not chunk.carries_output:
                    continue
                now_s = self.now_s()
                if last_s is None:
                    record.first_s = now_s
                else:
                    record.gaps_s.append(round(now_s - last_s, 6))
                record.chunks += 1
                record.last_s = last_s = now_s
                yield chunk.content

    def _body(self, record: RequestRecord, messages: list[dict[str, str]]) -> dict[str, Any]:
        recipe = self._job.recipe
        body: dict[str, Any] = {
            "model": self._job.model,
            "messages": self._apart(record, messages),
            "max_tokens": recipe.output.tokens,
            "temperature": recipe.output.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._job.own_fields:
            body |= {
                "session_id": f"bench-{recipe.prompt.seed}-{record.conversation}",
                "thinking": {"type": "enabled" if recipe.output.thinking else "disabled"},
                "prefix_cache": not recipe.cache.bypass,
            }
        elif self._job.bypass == "cache_salt" and self._job.salt:
            body["cache_salt"] = self._mark(record)
        if self._exact:
            body["ignore_eos"] = recipe.output.ignore_eos
        return body

    @property
    def _exact(self) -> bool:
        return self._job.own_fields or self._job.ignore_eos

    def _mark(self, record: RequestRecord) -> str:
        """What no other run has; past the cache, what no other request has."""
        return f"{self._job.salt}-{record.request_id}" if self._job.recipe.cache.bypass else self._job.salt

    def _apart(self, record: RequestRecord, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The messages, their first words made our own where the server offers no other way."""
        if self._job.bypass == "cache_salt" or not self._job.salt:
            return messages
        first = messages[0]
        return [{**first, "content": f"[{self._mark(record)}] {first['content']}"}, *messages[1:]]

    def _finish(self, record: RequestRecord, state: StreamState) -> None:
        self._in_flight -= 1
        record.end_s = self.now_s()
        record.finish_reason = state.finish_reason
        if state.usage:
            record.prompt_tokens = state.usage.get("prompt_tokens")
            record.output_tokens = state.usage.get("completion_tokens")
            record.cached_tokens = cached_tokens(state.usage)
        record.server = dict(state.extension)
        if record.rank is None:
            record.rank = record.server.get("rank")
        self._done += 1
        self._failed += record.outcome != Outcome.OK
        self._tokens += record.output_tokens or 0
        if record.first_s is not None:
            self._ttft_s.append(record.first_s - record.start_s)
        self._out.write(json.dumps(dataclasses.asdict(record)) + "\n")
        self._out.flush()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            self._report()

    def _report(self) -> None:
        ttft_s = sorted(self._ttft_s)
        middle = ttft_s[len(ttft_s) // 2] if ttft_s else None
        self._say(
            "progress", done=self._done, failed=self._failed, in_flight=self._in_flight, output_tokens=self._tokens, ttft_p50_s=middle
        )

    def _say(self, event: str, **fields: Any) -> None:
        self._progress.write(json.dumps({"event": event, "at_s": round(self.now_s(), 3), **fields}) + "\n")
        self._progress.flush()


class Refused(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code or str(status)


def _refused(status: int, body: bytes) -> Refused:
    try:
        message, code = error_text(json.loads(body))
    except ValueError:
        message, code = body[:200].decode("utf-8", "replace"), ""
    return Refused(status, f"HTTP {status}: {message}", code)


def judge(record: RequestRecord, state: StreamState, exact_length: bool) -> tuple[str, str]:
    """Whether a stream that ended without an exception was a good answer, and why not."""
    if state.finish_reason is None:
        return Outcome.TRUNCATED, "the stream ended without a finish reason"
    if not state.done:
        return Outcome.TRUNCATED, "the stream ended without [DONE]"
    if not record.chunks:
        return Outcome.FAILED, "the answer is empty"
    tokens = state.usage.get("completion_tokens")
    if exact_length and tokens is not None and tokens < record.requested_tokens:
        return Outcome.TRUNCATED, f"{tokens} of {record.requested_tokens} tokens"
    return Outcome.OK, ""


def arrival_times(load: Load, count: int, seed: int) -> list[float]:
    """Start times in seconds for an open loop: evenly spaced, with exponential gaps from a seed, or those of a trace."""
    if load.arrival == "trace":
        return list(load.times_s)
    rng = random.Random(f"arrivals {seed}")
    at_s, out = 0.0, []
    for _ in range(count):
        out.append(at_s)
        at_s += rng.expovariate(load.rate) if load.arrival == "poisson" else 1.0 / load.rate
    return out


async def drive(job: Job, progress: TextIO, ready: Callable[[], Awaitable[None]] | None = None) -> None:
    """Run a job in this event loop."""
    headers = {"Authorization": f"Bearer {job.key}"} if job.key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(job.timeout_s, connect=10.0)
    with job.records.open("a", encoding="utf-8") as out:
        async with httpx.AsyncClient(base_url=job.url, headers=headers, timeout=timeout, limits=limits, trust_env=False) as client:
            if ready is not None:
                await ready()
            await Generator(job, client, out, progress).run()


def run(path: str) -> int:
    """Entry point of the child process. The key, if any, comes on standard input."""
    job = Job.from_json(json.loads(Path(path).read_text(encoding="utf-8")), sys.stdin.readline().strip())
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(drive(job, sys.stdout))
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
