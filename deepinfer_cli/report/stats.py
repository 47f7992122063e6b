"""The numbers of one run. Terminal, HTML, CSV and Parquet all read this one `Summary`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deepinfer_cli.bench.runs import read_run
from deepinfer_cli.report.intervals import Array
from hicache.errors import ConfigError

STATS = ("mean", "p50", "p90", "p95", "p99", "max")
LATENCIES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms"}
BEYOND = 10  # requests that must lie beyond a percentile before it is printed


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the long form. `value` None means: too few requests to say. low, high: 95 % interval, where there is one."""

    group: str
    metric: str
    stat: str
    value: float | None
    unit: str
    n: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Summary:
    """One run: its `run.json`, every number, the distinct errors, and the tables behind the plots."""

    run: dict[str, Any]
    rows: list[Row]
    errors: list[tuple[str, int]]
    requests: pd.DataFrame
    gaps: pd.DataFrame
    timeline: pd.DataFrame
    folder: Path
    _index: dict[tuple[str, str, str], Row] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._index.update({(r.group, r.metric, r.stat): r for r in self.rows})

    def row(self, metric: str, stat: str = "value", group: str = "all") -> Row | None:
        return self._index.get((group, metric, stat))

    def value(self, metric: str, stat: str = "value", group: str = "all") -> float | None:
        row = self.row(metric, stat, group)
        return row.value if row else None

    def groups(self, kind: str) -> list[str]:
        """`turn 0`, `turn 1` … or `rank 0` … in numeric order."""
        found = {r.group for r in self.rows if r.group.startswith(f"{kind} ")}
        return sorted(found, key=lambda name: int(name.split()[1]))

    @property
    def name(self) -> str:
        return str(self.run["id"])

    @property
    def title(self) -> str:
        """For people: the cell of a sweep with the end of the run's name, else its labels or its name."""
        labels = self.run.get("labels") or {}
        return f"{labels['cell']} · {self.name[-6:]}" if "cell" in labels else self.name

    @property
    def stamp(self) -> str | None:
        stamp = self.run.get("stamp")
        return str(stamp) if stamp else None


def percentile(values: Array, p: float) -> float | None:
    """Linear percentile, or None when fewer than ten values lie beyond it."""
    # A tolerance of one part in a billion: 100 * (1 - 0.9) is 9.999… in binary.
    if len(values) * (1 - p / 100) < BEYOND - 1e-9:
        return None
    return float(np.percentile(values, p))


def distribution(group: str, metric: str, values: Array, unit: str = "ms") -> list[Row]:
    """Mean, percentiles and maximum of one latency."""
    values = values[~np.isnan(values)]
    n = len(values)
    if not n:
        return []
    known: dict[str, float | None] = {"mean": float(values.mean()), "max": float(values.max())}
    known |= {stat: percentile(values, float(stat[1:])) for stat in STATS if stat.startswith("p")}
    return [Row(group, metric, stat, known[stat], unit, n) for stat in STATS]


def summarize(folder: Path) -> Summary:
    """Read a run directory. Raises: ConfigError when it holds no requests table."""
    run = read_run(folder)
    try:
        requests = pd.read_parquet(folder / "requests.parquet")
        gaps = pd.read_parquet(folder / "chunks.parquet")
        timeline = pd.read_parquet(folder / "timeline.parquet")
    except OSError:
        raise ConfigError(f"run {folder.name} has no tables: it ended before it measured anything", hint="dix bench run again") from None
    good = requests[requests["ok"]]
    rows = _latencies("all", good) + distribution("all", "itl", _floats(gaps, "gap_ms"))
    rows += _throughput(good) + _counts(requests) + _hit_rates(good)
    for turn, part in good.groupby("turn"):
        rows += _latencies(f"turn {turn}", part) + _cache_rows(f"turn {turn}", part)
    rows += _ranks(run, good)
    return Summary(run, rows, _errors(requests), requests, gaps, timeline, folder)


def _floats(frame: pd.DataFrame, column: str) -> Array:
    return np.asarray(frame[column].to_numpy(dtype=np.float64, na_value=np.nan) if len(frame) else [], dtype=np.float64)


def _latencies(group: str, good: pd.DataFrame) -> list[Row]:
    return [row for metric, column in LATENCIES.items() for row in distribution(group, metric, _floats(good, column))]


def _throughput(good: pd.DataFrame) -> list[Row]:
    """Tokens of good requests over the time from the first start to the last end."""
    if good.empty:
        return []
    window_s = float(good["end_s"].max() - good["start_s"].min())
    n = len(good)
    output, prompt = float(good["output_tokens"].sum()), float(good["prompt_tokens"].sum())
    uncached = prompt - float(good["cached_tokens"].fillna(0).sum())
    out = [Row("all", "window", "value", window_s, "s", n)]
    if window_s > 0:
        out += [
            Row("all", "output_rate", "value", output / window_s, "tok/s", n),
            Row("all", "input_rate", "value", prompt / window_s, "tok/s", n),
            Row("all", "uncached_input_rate", "value", uncached / window_s, "tok/s", n),
            Row("all", "request_rate", "value", n / window_s, "1/s", n),
        ]
    tpot = _floats(good, "tpot_ms")
    if (tpot > 0).any():
        out.append(Row("all", "user_rate", "value", float(1e3 / np.nanmedian(tpot)), "tok/s per user", n))
    out += [Row("all", "output_tokens", "sum", output, "tokens", n), Row("all", "prompt_tokens", "sum", prompt, "tokens", n)]
    return out


def _counts(requests: pd.DataFrame) -> list[Row]:
    n = len(requests)
    out = [
        Row("all", "requests", str(kind), float((requests["outcome"] == kind).sum()), "requests", n)
        for kind in ("ok", "failed", "truncated", "cancelled")
    ]
    out.append(Row("all", "failed_share", "value", float((~requests["ok"]).mean()) if n else None, "share", n))
    return out


def _hit_rates(good: pd.DataFrame) -> list[Row]:
    return _cache_rows("all", good)


def _cache_rows(group: str, part: pd.DataFrame) -> list[Row]:
    """Sum over sum, not the mean of ratios. Without numbers from the server there is no rate."""
    known = part[part["cached_tokens"].notna() & part["prompt_tokens"].notna()]
    if known.empty:
        return [Row(group, "hit_rate_client", "value", None, "share", 0)]
    prompt, cached = float(known["prompt_tokens"].sum()), float(known["cached_tokens"].sum())
    middle = float(known["prompt_tokens"].astype("float64").median())
    return [
        Row(group, "hit_rate_client", "value", cached / prompt if prompt else None, "share", len(known)),
        Row(group, "cached_tokens", "sum", cached, "tokens", len(known)),
        Row(group, "prompt_tokens", "median", middle, "tokens", len(known)),
    ]


def _ranks(run: Mapping[str, Any], good: pd.DataFrame) -> list[Row]:
    """The server's own counters, per rank and summed, over the run; requests per rank where answers name one."""
    before, after = run.get("counters_before"), run.get("counters_after")
    if not before or not after:
        return []
    out: list[Row] = []
    total_looked = total_hit = total_cached = 0.0
    old = {rank["rank"]: rank for rank in before.get("ranks") or []}
    for rank in after.get("ranks") or []:
        group, then = f"rank {rank['rank']}", old.get(rank["rank"], {})
        # A rank that was replaced counts from zero again.
        then = then if then.get("generation") == rank.get("generation") else {}
        part = good[good["rank"] == rank["rank"]]
        looked, hit = (_growth(rank, then, "prefix_cache", name) for name in ("lookup_tokens_total", "hit_tokens_total"))
        prompt, cached, output = (_growth(rank, then, "tokens", name) for name in ("prompt_total", "cached_total", "generated_total"))
        total_looked, total_hit, total_cached = total_looked + looked, total_hit + hit, total_cached + cached
        n = len(part)
        out += [
            Row(group, "prompt_tokens", "sum", prompt, "tokens", n),
            Row(group, "cached_tokens", "sum", cached, "tokens", n),
            Row(group, "output_tokens", "sum", output, "tokens", n),
            Row(group, "hit_rate_server", "value", hit / looked if looked else None, "share", n),
        ]
        out += distribution(group, "ttft", _floats(part, "ttft_ms"))
    out.append(Row("all", "hit_rate_server", "value", total_hit / total_looked if total_looked else None, "share", len(good)))
    out.append(Row("all", "cached_tokens_server", "sum", total_cached, "tokens", len(good)))
    return out


def _growth(now: Mapping[str, Any], then: Mapping[str, Any], group: str, name: str) -> float:
    return float((now.get(group) or {}).get(name, 0)) - float((then.get(group) or {}).get(name, 0))


def _errors(requests: pd.DataFrame) -> list[tuple[str, int]]:
    bad = requests[~requests["ok"]]
    counts = (bad["outcome"] + ": " + bad["error_text"].where(bad["error_text"] != "", bad["error_code"])).value_counts()
    return [(str(text).removesuffix(": "), int(count)) for text, count in counts.items()]
