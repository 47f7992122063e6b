"""What the harness says beside its records: the aggregate, the server's counters it scraped, and facts that only its log has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDS, AGGREGATE, SERVER = "profile_export.jsonl", "profile_export_aiperf.json", "server_metrics_export.json"


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The parts of the aggregate JSON that decide something. Counts are 0 when the harness leaves the key out."""

    version: str
    was_cancelled: bool
    is_complete: bool
    incomplete_reason: str
    submission_valid: bool | None
    submission_reasons: tuple[str, ...]
    num_ok: int
    num_failed: int
    num_overflows: int
    start_delay_p99_ms: float | None
    output_tok_s: float | None
    ideal_hit_share: float | None


def read_aggregate(folder: Path, not_before_s: float = 0.0) -> Aggregate | None:
    """None when there is none, or when the file is older than the run (`not_before_s`, Unix seconds)."""
    path = folder / AGGREGATE
    if not path.exists() or path.stat().st_mtime < not_before_s:
        return None
    document = json.loads(path.read_bytes())
    meta = document.get("metadata") or {}
    ideal = document.get("theoretical_prefix_cache_hit") or {}
    return Aggregate(
        version=str(document.get("aiperf_version", "")),
        was_cancelled=bool(document.get("was_cancelled")),
        is_complete=document.get("is_complete") is not False,
        incomplete_reason=str(document.get("incomplete_reason") or ""),
        submission_valid=meta.get("submission_valid"),
        submission_reasons=tuple(meta.get("submission_invalid_reasons") or ()),
        num_ok=int(_value(document, "request_count") or 0),
        num_failed=int(_value(document, "error_request_count") or 0),
        num_overflows=int(_value(document, "context_overflow_count") or 0),
        start_delay_p99_ms=_value(document, "credit_to_start_latency", "p99"),
        output_tok_s=_value(document, "output_token_throughput"),
        ideal_hit_share=ideal["sum"] / ideal["count"] if ideal.get("count") else None,
    )


def _value(document: Mapping[str, Any], name: str, stat: str = "avg") -> float | None:
    value = (document.get(name) or {}).get(stat)
    return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class RankCounters:
    """One rank's counters over the window, in tokens. `external`: served from below the device."""

    rank: str
    queried: float
    hit: float
    external: float
    prompt: float
    generated: float

    @property
    def hit_share(self) -> float | None:
        return (self.hit + self.external) / self.queried if self.queried else None


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """The scraped counters: endpoints that were asked and that answered, and the growth in the window by rank."""

    configured: int
    successful: int
    ranks: tuple[RankCounters, ...] = ()

    @property
    def hit_share(self) -> float | None:
        queried = sum(r.queried for r in self.ranks)
        return sum(r.hit + r.external for r in self.ranks) / queried if queried else None


def read_server_counters(folder: Path) -> ServerCounters | None:
    """None when the harness reached no endpoint at all and wrote no file."""
    path = folder / SERVER
    if not path.exists():
        return None
    document = json.loads(path.read_bytes())
    summary, metrics = document.get("summary") or {}, document.get("metrics") or {}
    # The harness cuts `_total` off the names of counters.
    names = {"queried": "prefix_cache_queries", "hit": "prefix_cache_hits", "external": "external_prefix_cache_hits"}
    names |= {"prompt": "prompt_tokens", "generated": "generation_tokens"}
    grown = {key: _by_rank(metrics.get(f"vllm:{name}")) for key, name in names.items()}
    found = sorted({rank for growth in grown.values() for rank in growth})
    ranks = tuple(RankCounters(rank, **{key: grown[key].get(rank, 0.0) for key in names}) for rank in found)
    return ServerCounters(len(summary.get("endpoints_configured") or ()), len(summary.get("endpoints_successful") or ()), ranks)


def _by_rank(metric: Mapping[str, Any] | None) -> dict[str, float]:
    out: dict[str, float] = {}
    for series in (metric or {}).get("series", ()):
        rank = str((series.get("labels") or {}).get("engine", "0"))
        out[rank] = out.get(rank, 0.0) + float((series.get("stats") or {}).get("total") or 0.0)
    return out


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What no artifact holds. `sent`, `cancelled`: requests of the window; `None` when the phase never got there."""

    sent: int | None = None
    cancelled: int | None = None
    window_began: bool = False
    last_error: str = ""


_PHASE = re.compile(r"Phase profiling \(profiling\) (started|sending complete|complete)\b(.*)")
_FIELD = re.compile(r"\b(sent|cancelled)=(\d+)")
_BAD = re.compile(r"\b(ERROR|CRITICAL)\b\s+(.*)|^(\w*(?:Error|Exception): .*)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def read_log(lines: Iterable[str]) -> LogFacts:
    """Facts from the harness's output. A request that never ends is in no record: only the phase's own line counts it."""
    sent = cancelled = None
    began, last_error = False, ""
    for raw in lines:
        line = _ANSI.sub("", raw)
        if match := _PHASE.search(line):
            # The line's session part repeats the names for trees.
            found = {key: int(value) for key, value in _FIELD.findall(match[2].split("| sessions")[0])}
            began = True
            sent = found.get("sent", sent)
            cancelled = found.get("cancelled", cancelled) if match[1] == "complete" else cancelled
        elif match := _BAD.search(line.rstrip()):
            last_error = (match[2] or match[3]).strip()
    return LogFacts(sent, cancelled, began, last_error)
