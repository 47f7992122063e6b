"""A small synchronous client for an OpenAI-compatible server: answers with times, failures with a hint."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from deepinfer_cli.sse import Chunk, StreamError, StreamState, cached_tokens, error_text
from hicache.errors import DixError
from server.errors import ServerUnreachable


class RequestRefused(DixError):
    """The server answered and said no."""

    exit_code = 2

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(f"the server answered {status}: {message}", hint={401: "--set server.api_key_file=FILE"}.get(status, ""))
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished chat request. Times in seconds; `ttft_s` is from sending to the first output."""

    content: str
    reasoning: str
    tokens: tuple[str, ...]
    finish_reason: str | None
    usage: Mapping[str, Any]
    ttft_s: float
    total_s: float

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def output_tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or 0)

    @property
    def cached(self) -> int:
        return cached_tokens(self.usage) or 0

    @property
    def tok_s(self) -> float:
        """Decode speed: tokens after the first over the time after the first."""
        decode_s = self.total_s - self.ttft_s
        return (self.output_tokens - 1) / decode_s if decode_s > 0 and self.output_tokens > 1 else 0.0


class Api:
    """Requests to one base URL."""

    def __init__(self, url: str, key: str = "", timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A local server must be reached directly, whatever proxy the environment names.
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(timeout_s, connect=5.0), trust_env=False)

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, timeout_s: float = 5.0) -> Any:
        """The object that a GET answers. Raises: ServerUnreachable, RequestRefused."""
        return self._json("GET", path, None, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 60.0) -> Any:
        """The object that a POST answers. Raises: ServerUnreachable, RequestRefused."""
        return self._json("POST", path, body, timeout_s)

    def _json(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        self._check(response)
        if not response.content:
            return {}
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            raise RequestRefused(response.status_code, f"{path} is not JSON") from None
        if not _has_form(answer):
            raise RequestRefused(response.status_code, f"{path} is not the object that such a server answers")
        return answer

    def _check(self, response: httpx.Response) -> None:
        if response.status_code < 400:
            return
        try:
            message, code = error_text(json.loads(response.read()))
        except ValueError:
            plain = "" if response.text.lstrip().startswith("<") else " ".join(response.text.split())[:200]
            message, code = plain or response.reason_phrase, ""
        if response.status_code in (502, 503, 504):
            raise ServerUnreachable(f"{self.url} answered {response.status_code}: {message}", hint="dix status, dix logs")
        raise RequestRefused(response.status_code, message, code)

    def _foreign(self, why: str) -> ServerUnreachable:
        """The error for an answer that no server of this API gives: some other program has the port."""
        return ServerUnreachable(
            f"{self.url} is not an OpenAI-compatible server: {why}",
            hint="another program listens there; dix status shows where servers of dix are",
        )

    def first_model(self) -> dict[str, Any]:
        """The first entry of `/v1/models`. Raises: ServerUnreachable, also when something else than such a server answers."""
        try:
            answer = self.get("/v1/models")
        except RequestRefused as error:
            if error.status not in (200, 404, 405, 501):
                raise
            raise self._foreign(str(error)) from error
        listed = answer.get("data") or []
        if not listed:
            raise ServerUnreachable(f"{self.url} serves no model", hint="dix status")
        first = dict(listed[0])
        if not isinstance(first.get("id"), str) or not isinstance(first.get("max_model_len") or 0, int):
            raise self._foreign("/v1/models names no model")
        return first

    def model(self) -> str:
        """The first served model's name. Raises: as `first_model`."""
        return str(self.first_model()["id"])

    def count_tokens(self, body: Mapping[str, Any]) -> int:
        """Prompt tokens of `{"messages": …}` or `{"prompt": …}` by the server's own count."""
        count = self.post("/tokenize", body).get("count")
        if not isinstance(count, int):
            raise RequestRefused(200, "/tokenize gives no count")
        return count

    def stream(self, body: Mapping[str, Any]) -> Iterator[Chunk]:
        """Chunks of a streamed chat. Raises: ServerUnreachable when it breaks off, RequestRefused when it is refused."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        state = StreamState()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=asked) as response:
                self._check(response)
                for line in response.iter_lines():
                    if (chunk := state.push(line)) is not None:
                        yield chunk
        except StreamError as error:
            raise ServerUnreachable(f"the answer broke off: {error}", hint="dix status, dix logs") from error
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        if state.finish_reason is None:
            raise ServerUnreachable("the answer broke off without a reason", hint="dix status, dix logs")

    def chat(self, body: Mapping[str, Any]) -> Answer:
        """A whole streamed chat with its times."""
        collector = Collector()
        for chunk in self.stream(body):
            collector.push(chunk)
        return collector.answer()


class Collector:
    """Puts the chunks of one answer together and keeps the times. Starts its clock when it is made."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_s: float | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tokens: list[str] = []
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}

    def push(self, chunk: Chunk) -> None:
        if self._first_s is None and (chunk.carries_output or chunk.tokens):
            self._first_s = time.perf_counter()
        self._content.append(chunk.content)
        self._reasoning.append(chunk.reasoning)
        self._tokens += chunk.tokens
        self._finish = chunk.finish_reason or self._finish
        self._usage = chunk.usage or self._usage

    def answer(self) -> Answer:
        end_s = time.perf_counter()
        return Answer(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tokens=tuple(self._tokens),
            finish_reason=self._finish,
            usage=self._usage,
            ttft_s=(self._first_s or end_s) - self._started_s,
            total_s=end_s - self._started_s,
        )


def _has_form(answer: Any) -> bool:
    """Whether an answer can be read without asking each time: an object whose lists of models and ranks hold objects."""
    if not isinstance(answer, dict):
        return False
    lists = [answer.get(name) or [] for name in ("data", "ranks")]
    return isinstance(answer.get("totals") or {}, dict) and all(
        isinstance(items, list) and all(isinstance(item, dict) for item in items) for items in lists
    )


def unreachable(url: str, error: Exception) -> ServerUnreachable:
    reason = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "does not answer"
    return ServerUnreachable(f"{url} {reason}", hint="dix status shows what is running; dix start starts a server")
