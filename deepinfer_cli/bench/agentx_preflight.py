"""A few seconds of questions before an hour of load: does the server answer, count, cache and reset as the run assumes?"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deepinfer_cli.api import Api, RequestRefused, unreachable
from deepinfer_cli.bench.agentx_traces import TraceSet
from deepinfer_cli.sse import StreamError, StreamState, cached_tokens, error_text
from hicache.errors import DixError
from server.errors import ServerUnreachable

PROBE_TOKENS = 8
SAMPLE_WORDS = 300  # about 1,000 tokens: several pages of the cache
LOCAL_DRIFT_TOKENS = 64  # role headers and markers of one message
MAX_DRIFT = 0.03
SPARE_CORES = 4


class PreflightFailed(DixError):
    """The server answers, but a run against it could not be valid."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class Probe:
    """One streamed answer: what was counted, what the headers said, and which model says that it answered."""

    usage: Mapping[str, Any]
    rank: str | None
    model: str

    @property
    def cached(self) -> int | None:
        return cached_tokens(self.usage)

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)


@dataclass(slots=True)
class Preflight:
    """What was learned. `max_context`: the server's context length, 0 when it does not say."""

    url: str
    model: str
    ours: bool = False
    ranks: int = 0
    max_context: int = 0
    dropped: int = 0
    has_metrics: bool = False
    can_reset: bool = False
    caches: bool | None = None
    answering_model: str = ""
    notes: list[str] = field(default_factory=list)


def reach(api: Api) -> Preflight:
    """Ready, and which model. Raises: ServerUnreachable (exit code 4)."""
    try:
        api.get("/health/ready")
    except RequestRefused as refused:
        if refused.status not in (200, 404):  # another program's page, or a server without that route
            raise ServerUnreachable(f"{api.url} is not ready: {refused}", hint="dix status, dix logs") from refused
    model = api.first_model()
    found = Preflight(api.url, str(model["id"]), max_context=int(model.get("max_model_len") or 0))
    metrics = _try(api, "/deepinfer/metrics")
    found.ours, found.ranks = metrics is not None, len((metrics or {}).get("ranks") or [])
    return found


def _try(api: Api, path: str) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = api.get(path)
    except (RequestRefused, ValueError):
        return None
    return answer


def check(api: Api, key: str, found: Preflight, tokenizer: Path, traces: TraceSet, cache: str, folder: Path) -> None:
    """All further questions. Raises: PreflightFailed with the fix, ServerUnreachable."""
    text = sample_text(uuid.uuid4().hex)
    with connect_wire(api, key) as wire:
        first = probe(wire, found.model, [{"role": "user", "content": text}])
        _check_answer(found, first)
        _check_counts(api, found, first, text, tokenizer)
        _check_roles(wire, found)
        _check_cache(wire, found, first, text)
        found.has_metrics = wire.get("/metrics").status_code == 200
    _check_lengths(found, traces)
    _check_reset(api, found, cache)
    _check_machine(found, folder)


def sample_text(salt: str) -> str:
    """About a thousand tokens that no cache has seen before."""
    words = ("def", "return", "value", "index", "config", "error", "path", "result", "line", "token")
    return f"[{salt}] " + " ".join(f"{words[i % len(words)]}_{i * 7919 % 1000}" for i in range(SAMPLE_WORDS))


def connect_wire(api: Api, key: str) -> httpx.Client:
    """For what the plain client does not show: headers of streams, and routes that answer no JSON."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=api.url, headers=headers, timeout=httpx.Timeout(120.0, connect=5.0), trust_env=False)


def refusal(response: httpx.Response) -> RequestRefused:
    try:
        message, code = error_text(json.loads(response.read()))
    except ValueError:
        message, code = response.text[:200], ""
    return RequestRefused(response.status_code, message, code)


def probe(wire: httpx.Client, model: str, messages: list[dict[str, str]]) -> Probe:
    """One streamed request as the harness sends them. Raises: ServerUnreachable, PreflightFailed."""
    body = {"model": model, "messages": messages, "stream": True, "max_completion_tokens": PROBE_TOKENS, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    state, answering = StreamState(), ""
    try:
        with wire.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code >= 400:
                raise refusal(response)
            for line in response.iter_lines():
                if state.push(line) is not None and not answering:
                    answering = str(json.loads(line.removeprefix("data:")).get("model") or "")
            rank = response.headers.get("x-deepinfer-rank")
    except StreamError as error:
        raise PreflightFailed(f"the first answer broke off: {error}", hint="dix logs") from error
    except httpx.HTTPError as error:
        raise unreachable(str(wire.base_url), error) from error
    return Probe(state.usage, rank, answering)


def _check_answer(found: Preflight, first: Probe) -> None:
    if not first.usage:
        raise PreflightFailed(
            "the server reports no usage in streams", hint="answer stream_options.include_usage; nothing can be counted without"
        )
    counted = int(first.usage.get("completion_tokens") or 0)
    if counted != PROBE_TOKENS:
        hint = "the server must honour ignore_eos and max_completion_tokens"
        raise PreflightFailed(f"asked for {PROBE_TOKENS} tokens with ignore_eos, got {counted}", hint=hint)
    if first.model not in ("", found.model):
        raise PreflightFailed(f"asked for {found.model!r}, {first.model!r} answered", hint="dix status shows which model is served")
    found.answering_model = first.model
    if first.cached is None:
        found.notes.append("the server reports no cached tokens: no client-side hit rate")
    if found.ours and first.rank is None:
        found.notes.append("no X-DeepInfer-Rank header: no latencies per rank (serve with --rank-header)")


def _check_counts(api: Api, found: Preflight, first: Probe, text: str, tokenizer: Path) -> None:
    """The harness builds prompts with this tokenizer; with another one every length would be wrong."""
    from tokenizers import Tokenizer

    ours = len(Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text, add_special_tokens=False).ids)
    try:
        theirs, slack = api.count_tokens({"model": found.model, "prompt": text}), 1
    except (RequestRefused, KeyError):
        theirs, slack = first.prompt_tokens, LOCAL_DRIFT_TOKENS + int(MAX_DRIFT * ours)
    if abs(theirs - ours) > slack:
        hint = "--tokenizer DIR with the served model's tokenizer.json"
        raise PreflightFailed(f"a text has {ours:,} tokens by {tokenizer} and {theirs:,} by the server", hint=hint)


def _check_roles(wire: httpx.Client, found: Preflight) -> None:
    turns = [("system", "Be short."), ("user", "Look."), ("assistant", "I look."), ("assistant", "I found it."), ("user", "Go on.")]
    try:
        probe(wire, found.model, [{"role": role, "content": content} for role, content in turns])
    except RequestRefused as refused:
        raise PreflightFailed(f"two assistant messages in a row are refused: {refused}", hint="recorded sessions contain them") from refused


def _check_cache(wire: httpx.Client, found: Preflight, first: Probe, text: str) -> None:
    again = probe(wire, found.model, [{"role": "user", "content": text}])
    if first.cached is not None and again.cached is not None:
        found.caches = again.cached > first.cached
        if not found.caches:
            found.notes.append("the same prompt twice hit nothing: the prefix cache is off, or too small")


def _check_lengths(found: Preflight, traces: TraceSet) -> None:
    if not found.max_context or not traces.traces:
        return
    found.dropped = traces.too_long(found.max_context)
    if found.dropped == len(traces.traces):
        shortest = min(t.peak_tokens for t in traces.traces)
        hint = f"serve with --max-model-len {shortest} or more, or choose other traces"
        raise PreflightFailed(f"no trace fits the server's context of {found.max_context:,} tokens", hint=hint)
    if found.dropped:
        found.notes.append(
            f"{found.dropped} of {len(traces.traces)} traces are longer than the context of {found.max_context:,} tokens and are left out"
        )


def _check_reset(api: Api, found: Preflight, cache: str) -> None:
    if found.ours and not found.has_metrics:
        raise PreflightFailed("/metrics does not answer", hint="dix logs")
    if cache != "cold":
        return
    try:
        # The probes are forgotten as well; the harness resets once more before its warm-up.
        api.post("/reset_prefix_cache", {})
        found.can_reset = True
    except RequestRefused as refused:
        if found.ours:
            raise PreflightFailed(f"the prefix cache cannot be reset: {refused}", hint="--cache asis") from refused
        found.notes.append("the server cannot reset its prefix cache: measured as it is")


def _check_machine(found: Preflight, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < 1e9:
        raise PreflightFailed(f"{free / 1e9:.1f} GB are free at {folder}, 1 GB is the least", hint="free some space, or set DIX_HOME")
    cores = len(os.sched_getaffinity(0))
    if "127.0.0.1" in found.url and found.ranks and cores < found.ranks + SPARE_CORES:
        found.notes.append(f"server and load generator share {cores} cores, {found.ranks + SPARE_CORES} would keep them apart")
