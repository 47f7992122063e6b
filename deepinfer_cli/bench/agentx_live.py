"""What a run looks like while it runs: a tail on the harness's records and log, and the server's own counters, read by a thread."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.api import Api, RequestRefused
from deepinfer_cli.bench.agentx_traces import TraceSet
from deepinfer_cli.bench.aiperf_records import FAILED, OK, RequestRow, request_rows
from server.errors import ServerUnreachable

RECENT = 2000  # latencies kept for the percentiles on the screen
NOW = 10  # the "now" column: mean of the last few
TIERS = ("device", "host", "peer", "disk")
_PHASE = re.compile(r"Phase (agentic\.warmup|warmup|profiling) \((?:warmup|profiling)\) (started|complete)\b")
PHASES = {"agentic.warmup": "warm-up", "warmup": "warm-up", "profiling": "window"}


class Tail:
    """Whole new lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole if line]


class ServerSampler(threading.Thread):
    """Writes `/deepinfer/metrics` once per interval. A sample that fails is left out: the gap in the time line says so."""

    def __init__(self, api: Api, path: Path, interval_s: float) -> None:
        super().__init__(daemon=True)
        self._api, self._path, self.interval_s = api, path, interval_s
        self._ended = threading.Event()
        self.first: dict[str, Any] | None = None
        self.latest: dict[str, Any] | None = None

    def run(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            while not self._ended.is_set():
                began_s, unix_s = time.monotonic(), time.time()
                with contextlib.suppress(ServerUnreachable, RequestRefused, ValueError):
                    metrics: dict[str, Any] = self._api.get("/deepinfer/metrics")
                    self.first = self.first or metrics
                    self.latest = metrics
                    file.write(json.dumps({"unix_s": round(unix_s, 3), "metrics": metrics}) + "\n")
                    file.flush()
                self._ended.wait(max(0.05, self.interval_s - (time.monotonic() - began_s)))

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=10.0)


@dataclass(slots=True)
class Snapshot:
    """One moment of a run. Times in ms, shares in 0..1, None where there is nothing yet."""

    phase: str = "loading"
    elapsed_s: float = 0.0
    window_s: float = 0.0
    sessions: int = 0
    ok: int = 0
    failed: int = 0
    bad: int = 0
    first_error: str = ""
    ttft_ms: dict[str, float | None] = field(default_factory=dict)
    itl_ms: dict[str, float | None] = field(default_factory=dict)
    output_tok_s: float | None = None
    hit_share: float | None = None
    tiers: dict[str, float] = field(default_factory=dict)
    coverage: float | None = None


class LiveView:
    """Follows one run. Call `look` as often as wanted; it only reads what is new."""

    def __init__(self, harness_dir: Path, log: Path, traces: TraceSet, duration_s: float) -> None:
        self._records, self._log = Tail(harness_dir / "profile_export.jsonl"), Tail(log)
        self._traces, self._duration_s = traces, duration_s
        self._ttft: deque[float] = deque(maxlen=RECENT)
        self._itl: deque[float] = deque(maxlen=RECENT)
        self._roots: set[str] = set()
        self._first_ns = self._last_ns = self._tokens = 0
        self._phase_began_s = time.monotonic()
        self.now = Snapshot(window_s=duration_s)

    @property
    def in_window(self) -> bool:
        return self.now.phase == "window"

    @property
    def has_window(self) -> bool:
        return self.now.phase in ("window", "export")

    @property
    def window_done_s(self) -> float:
        """For the bar."""
        return {"window": min(self.now.elapsed_s, self._duration_s), "export": self._duration_s}.get(self.now.phase, 0.0)

    def look(self, before: Mapping[str, Any] | None = None, after: Mapping[str, Any] | None = None) -> Snapshot:
        """Take in what is new. `before`, `after`: two samples of the server's counters."""
        for line in self._log.lines():
            self._take_log(line)
        fresh = [json.loads(line) for line in self._records.lines()]
        for record in fresh:
            if record["metadata"].get("benchmark_phase") != "warmup":
                self._take(request_rows([record], self._traces)[0], record)
        now = self.now
        now.elapsed_s = time.monotonic() - self._phase_began_s
        now.sessions = len(self._roots)
        now.ttft_ms, now.itl_ms = _spread(self._ttft), _spread(self._itl)
        if self._last_ns > self._first_ns:
            now.output_tok_s = self._tokens / ((self._last_ns - self._first_ns) / 1e9)
            now.coverage = min(1.0, (self._last_ns - self._first_ns) / 1e9 / self._duration_s)
        if before and after:
            now.hit_share, now.tiers = hit_shares(before, after)
        return now

    def _take_log(self, line: str) -> None:
        if match := _PHASE.search(line):
            phase = PHASES[match[1]]
            if match[2] == "complete":
                phase = "export" if phase == "window" else self.now.phase
            if phase != self.now.phase:
                self.now.phase, self._phase_began_s = phase, time.monotonic()

    def _take(self, row: RequestRow, record: Mapping[str, Any]) -> None:
        self._roots.add(row.root_id)
        self._first_ns = min(self._first_ns or row.start_ns, row.start_ns)
        self._last_ns = max(self._last_ns, row.end_ns)
        self._tokens += row.output_tokens or 0
        if row.outcome == OK:
            self.now.ok += 1
            self._ttft.extend([row.ttft_ms] if row.ttft_ms is not None else [])
            gaps = (record["metrics"].get("inter_chunk_latency") or {}).get("value")
            self._itl.extend(gaps if isinstance(gaps, list) else [])
            return
        self.now.bad += 1
        self.now.failed += row.outcome == FAILED
        self.now.first_error = self.now.first_error or f"{row.outcome}: {row.error_code or ''} {row.error_text or ''}".strip()


def _spread(values: deque[float]) -> dict[str, float | None]:
    import numpy as np

    if not values:
        return {"now": None, "p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.percentile(np.fromiter(values, dtype=float), [50, 90, 99])
    latest = list(values)[-NOW:]
    return {"now": sum(latest) / len(latest), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def hit_shares(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float | None, dict[str, float]]:
    """Share of prompt tokens served by the cache between two samples, in all and by tier."""
    looked = _grown(before, after, "lookup_tokens_total")
    if looked <= 0:
        return None, {}
    tiers = {tier: _grown(before, after, "tiers", tier, "hit_tokens_total") / looked for tier in TIERS}
    return _grown(before, after, "hit_tokens_total") / looked, {tier: share for tier, share in tiers.items() if share > 0}


def _grown(before: Mapping[str, Any], after: Mapping[str, Any], *path: str) -> float:
    return _summed(after, path) - _summed(before, path)


def _summed(metrics: Mapping[str, Any], path: tuple[str, ...]) -> float:
    total = 0.0
    for rank in metrics.get("ranks") or []:
        node: Any = rank.get("prefix_cache") or {}
        for name in path:
            node = node.get(name) if isinstance(node, Mapping) else None
        total += float(node or 0.0)
    return total


def one_line(now: Snapshot) -> str:
    """The snapshot for a bar or a plain line."""
    parts = [f"{now.phase} {now.elapsed_s:.0f} s"]
    if now.phase == "window":
        parts = [f"{now.elapsed_s:.0f} of {now.window_s:.0f} s", f"{now.sessions} sessions", f"{now.ok:,} ok"]
        parts += [f"{now.bad} not good"] if now.bad else []
        parts += [f"TTFT p50 {now.ttft_ms['p50']:,.0f} p99 {now.ttft_ms['p99']:,.0f} ms"] if now.ttft_ms.get("p50") is not None else []
        parts += [f"ITL p50 {now.itl_ms['p50']:,.1f} ms"] if now.itl_ms.get("p50") is not None else []
        parts += [f"{now.output_tok_s:,.0f} tok/s"] if now.output_tok_s else []
        parts += [f"coverage {now.coverage:.0%}"] if now.coverage is not None else []
    if now.hit_share is not None:
        tiers = ", ".join(f"{name} {share:.0%}" for name, share in now.tiers.items())
        parts.append(f"cached {now.hit_share:.0%}" + (f" ({tiers})" if tiers else ""))
    return " · ".join(parts)


def as_event(now: Snapshot) -> dict[str, Any]:
    """For `progress.jsonl` and `--json`."""
    return {"at_unix_s": round(time.time(), 3), **asdict(now)}
