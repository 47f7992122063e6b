"""Recorded sessions in the Weka trace format: reading, strict checking, and the facts that a run needs to know about them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.cache_rule import KEEP, PAGE
from hicache.errors import ConfigError

TRACE_KEYS = frozenset({"id", "models", "block_size", "hash_id_scope", "tool_tokens", "system_tokens", "requests", "totals"})
REQUIRED_KEYS = ("id", "models", "block_size", "hash_id_scope", "requests")
_REQUEST_KEYS = "t type model in out input_length output_length hash_ids api_time think_time input_types output_types stop ttft"
_HELPER_KEYS = "t type agent_id subagent_type duration_ms total_tokens tool_use_count status requests models tool_tokens system_tokens"
REQUEST_KEYS, HELPER_KEYS = frozenset(_REQUEST_KEYS.split()), frozenset(_HELPER_KEYS.split())


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded request. `outer`: row in the trace; `inner`: row in the helper, or -1."""

    outer: int
    inner: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded session."""

    id: str
    block_size: int
    declared_tokens: int
    num_helpers: int
    requests: tuple[Recorded, ...]

    @property
    def peak_tokens(self) -> int:
        """Largest prompt plus output."""
        return max((r.prompt_tokens + r.output_tokens for r in self.requests), default=0)

    @property
    def span_s(self) -> float:
        return max((r.at_s for r in self.requests), default=0.0)


@dataclass(frozen=True, slots=True)
class TraceSet:
    """What is replayed: a local directory, or a public corpus that only the harness reads (`traces` is empty then)."""

    name: str
    folder: Path | None
    public: str = ""
    traces: tuple[Trace, ...] = ()
    digest: str = ""
    _index: dict[tuple[str, int, int], Recorded] = field(default_factory=dict, repr=False, compare=False)

    def recorded(self, trace: str, outer: int, inner: int = -1) -> Recorded | None:
        """The recorded request that a harness record came from."""
        if not self._index:
            self._index.update({(t.id, r.outer, r.inner): r for t in self.traces for r in t.requests})
        return self._index.get((trace, outer, inner))

    def declared_tokens(self, trace: str) -> int:
        return next((t.declared_tokens for t in self.traces if t.id == trace), 0)

    def too_long(self, max_context: int) -> int:
        """How many traces the harness drops for a context of that many tokens."""
        return sum(t.peak_tokens > max_context for t in self.traces)


def read_traces(name: str, folder: Path) -> TraceSet:
    """Every `*.json` of the directory, in name order as the harness reads them.

    Raises: ConfigError for an empty directory, a file that is not a trace, or two traces with one id.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"{folder} holds no *.json trace", hint="--traces bundled, small, long, or a directory of trace files")
    digest = hashlib.sha256()
    traces: list[Trace] = []
    for path in files:
        data = path.read_bytes()
        digest.update(path.name.encode() + b"\0" + data)
        traces.append(_parse(path, data))
    ids = [t.id for t in traces]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise ConfigError(f"{folder}: two traces have the id {twice[0]!r}", hint="ids name the sessions; give every file its own")
    return TraceSet(name, folder.absolute(), "", tuple(traces), digest.hexdigest()[:16])


def _parse(path: Path, data: bytes) -> Trace:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint="one trace object per file") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a trace object", hint="one trace object per file")
    _check_keys(path, "the trace", document, TRACE_KEYS, REQUIRED_KEYS)
    if document["hash_id_scope"] != "local" or not isinstance(document["block_size"], int) or document["block_size"] < 1:
        raise ConfigError(
            f"{path}: block_size {document['block_size']!r}, scope {document['hash_id_scope']!r}", hint="block_size > 0, scope local"
        )
    requests = tuple(_requests(path, document["requests"]))
    return Trace(
        id=str(document["id"]),
        block_size=document["block_size"],
        declared_tokens=int(document.get("tool_tokens", 0)) + int(document.get("system_tokens", 0)),
        num_helpers=sum(row["type"] == "subagent" for row in document["requests"]),
        requests=requests,
    )


def _requests(path: Path, rows: Any) -> Iterator[Recorded]:
    for outer, row in enumerate(rows):
        where = f"requests[{outer}]"
        if row.get("type") != "subagent":
            yield _request(path, where, row, outer, -1)
            continue
        _check_keys(path, where, row, HELPER_KEYS, ("t", "agent_id", "requests"))
        for inner, request in enumerate(row["requests"]):
            yield _request(path, f"{where}.requests[{inner}]", request, outer, inner)


def _request(path: Path, where: str, row: Mapping[str, Any], outer: int, inner: int) -> Recorded:
    _check_keys(path, where, row, REQUEST_KEYS, ("t", "type", "model"))
    if row["type"] not in ("n", "s"):
        raise ConfigError(f"{path}: {where} has type {row['type']!r}", hint="n, s or subagent; helpers cannot nest")
    if row["type"] == "n" and "ttft" in row:
        raise ConfigError(f"{path}: {where} has a ttft but was not streamed", hint="type s, or leave ttft out")
    prompt, output = row.get("in", row.get("input_length", 0)), row.get("out", row.get("output_length", 0))
    return Recorded(outer, inner, float(row["t"]), int(prompt), int(output), tuple(row.get("hash_ids", ())))


def _check_keys(path: Path, where: str, row: Mapping[str, Any], known: frozenset[str], required: tuple[str, ...]) -> None:
    if unknown := sorted(set(row) - known):
        raise ConfigError(f"{path}: {where} has the unknown key {unknown[0]!r}", hint=f"known: {', '.join(sorted(known))}")
    if missing := [key for key in required if key not in row]:
        raise ConfigError(f"{path}: {where} lacks {missing[0]!r}", hint=f"required: {', '.join(required)}")


def ideal_hits(trace: Trace, *, page: int = PAGE, keep: int = KEEP) -> tuple[int, int]:
    """Cached and prompt tokens of one session with unlimited memory: (hits, tokens).

    A page counts when the blocks up to its end were sent before. `keep` last tokens are never reused; 0 counts every full page.
    """
    per_page = page // trace.block_size
    # A page is known by its blocks and by which page came before it.
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    hits = tokens = 0
    for request in sorted(trace.requests, key=lambda r: r.at_s):
        limit = max(0, request.prompt_tokens - keep) // page
        tokens += request.prompt_tokens
        before, seen = 0, True
        for index in range(len(request.blocks) // per_page):
            key = (before, request.blocks[index * per_page : (index + 1) * per_page])
            seen = seen and key in numbers
            hits += page if seen and index < limit else 0
            before = numbers.setdefault(key, len(numbers) + 1)
    return hits, tokens


def ideal_hit_share(traces: TraceSet, *, page: int = PAGE, keep: int = KEEP) -> float | None:
    """Best possible share of cached prompt tokens over all sessions at our cache's granularity; None for a corpus we did not read."""
    counted = [ideal_hits(trace, page=page, keep=keep) for trace in traces.traces]
    total = sum(tokens for _, tokens in counted)
    return sum(hits for hits, _ in counted) / total if total else None
