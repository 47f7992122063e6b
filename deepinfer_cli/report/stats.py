"""The numbers of one run. Terminal, HTML, CSV and Parquet all read this one `Summary`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from deepinfer_cli.bench.runs import read_run
from deepinfer_cli.report.intervals import Array
from deepinfer_cli.report.server_side import Growth, growths, mean_split_of_ttft, speculation, split_of_ttft
from hicache.errors import ConfigError

STATS = ("mean", "p50", "p90", "p95", "p99", "max")
LATENCIES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms"}
NAMES_OF_REQUESTS = frozenset({"run", "request_id", "session_id", "root_id", "parent_id", "finish_reason"})
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
    """One run: its `run.json`, every number, the distinct errors, and the tables behind the plots. good: the requests that count."""

    run: dict[str, Any]
    rows: list[Row]
    errors: list[tuple[str, int]]
    requests: pd.DataFrame
    good: pd.DataFrame
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
    return float(np.percentile(values, p)) if enough_beyond(len(values), p) else None


def enough_beyond(n: int, p: float) -> bool:
    # A tolerance of one part in a billion: 100 * (1 - 0.9) is 9.999… in binary.
    return n * (1 - p / 100) >= BEYOND - 1e-9


def distribution(group: str, metric: str, values: NDArray[np.floating[Any]], unit: str = "ms") -> list[Row]:
    """Mean, percentiles and maximum of one latency."""
    values = values[~np.isnan(values)]
    n = len(values)
    if not n:
        return []
    known: dict[str, float | None] = {"mean": float(values.mean(dtype=np.float64)), "max": float(values.max())}
    wanted = [stat for stat in STATS if stat.startswith("p") and enough_beyond(n, float(stat[1:]))]
    if wanted:
        found = np.percentile(values, [float(stat[1:]) for stat in wanted])
        known |= {stat: float(value) for stat, value in zip(wanted, found, strict=True)}
    return [Row(group, metric, stat, known.get(stat), unit, n) for stat in STATS]


def summarize(folder: Path) -> Summary:
    """Read a run directory. Raises: ConfigError when it holds no requests table."""
    run = read_run(folder)
    try:
        requests = read_requests(folder / "requests.parquet")
        gaps = pd.read_parquet(folder / "chunks.parquet", columns=["gap_ms"])
        timeline = pd.read_parquet(folder / "timeline.parquet")
    except OSError:
        raise ConfigError(
            f"run {folder.name} has no tables: it still runs, or ended before it measured anything", hint="dix bench run again"
        ) from None
    itl = gaps["gap_ms"].to_numpy() if len(gaps) else np.empty(0)
    good = requests if requests["ok"].all() else requests[requests["ok"]]
    rows = _latencies("all", good) + distribution("all", "itl", itl.astype(np.float32))
    rows += _throughput(good) + _counts(requests) + _cache_rows("all", good)
    split = split_of_ttft(good)
    for metric, values in split.items():
        rows += distribution("all", metric, values.to_numpy(dtype=np.float64))
    if not split:
        client = float(good["ttft_ms"].mean()) if good["ttft_ms"].notna().any() else None
        means, count = mean_split_of_ttft(run, client)
        rows += [Row("all", metric, "mean", value, "ms", count) for metric, value in means.items()]
    for turn, part in good.groupby("turn"):
        rows += _latencies(f"turn {turn}", part) + _cache_rows(f"turn {turn}", part)
        rows += [
            Row(f"turn {turn}", metric, "mean", float(values.mean()), "ms", len(values)) for metric, values in split_of_ttft(part).items()
        ]
    found = growths(run)
    rows += _ranks(found, good)
    rows += [Row("all", "speculation", name, value, "", len(found)) for name, value in speculation(found).items()]
    return Summary(run, rows, _errors(requests), requests, good, gaps, timeline, folder)


def read_requests(path: Path) -> pd.DataFrame:
    """One row per request, without its names: a million of them weigh more than all the numbers. Words are categories."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    columns = [name for name in schema.names if name not in NAMES_OF_REQUESTS]
    words = [name for name in columns if pa.types.is_string(schema.field(name).type) or pa.types.is_large_string(schema.field(name).type)]
    table = pq.read_table(path, columns=columns, read_dictionary=words)
    frame: pd.DataFrame = table.to_pandas(split_blocks=True, self_destruct=True, ignore_metadata=True, types_mapper=_nullable(pa))
    return frame


def _nullable(pa: Any) -> Any:
    """Integers that may be missing stay integers."""
    return {pa.int64(): pd.Int64Dtype()}.get


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


def _ranks(found: list[Growth], good: pd.DataFrame) -> list[Row]:
    """The server's own counters, per rank and summed, over the run; requests per rank where answers name one."""
    if not found:
        return []
    out: list[Row] = []
    total_looked = total_hit = total_cached = 0.0
    for growth in found:
        group = f"rank {growth.rank}"
        part = good[good["rank"] == growth.rank]
        looked, hit = (growth.of("prefix_cache", name) for name in ("lookup_tokens_total", "hit_tokens_total"))
        prompt, cached, output = (growth.of("tokens", name) for name in ("prompt_total", "cached_total", "generated_total"))
        total_looked, total_hit, total_cached = total_looked + looked, total_hit + hit, total_cached + cached
        n = len(part)
        client = float(part["cached_tokens"].sum()) if n and part["cached_tokens"].notna().any() else None
        out += [
            Row(group, "prompt_tokens", "sum", prompt, "tokens", n),
            Row(group, "cached_tokens", "sum", cached, "tokens", n),
            Row(group, "cached_tokens_client", "sum", client, "tokens", n),
            Row(group, "output_tokens", "sum", output, "tokens", n),
            Row(group, "hit_rate_server", "value", hit / looked if looked else None, "share", n),
        ]
        out += distribution(group, "ttft", _floats(part, "ttft_ms"))
    out.append(Row("all", "hit_rate_server", "value", total_hit / total_looked if total_looked else None, "share", len(good)))
    out.append(Row("all", "cached_tokens_server", "sum", total_cached, "tokens", len(good)))
    return out


def _errors(requests: pd.DataFrame) -> list[tuple[str, int]]:
    bad = requests.loc[~requests["ok"], ["outcome", "error_code", "error_text"]].astype(str)
    counts = (bad["outcome"] + ": " + bad["error_text"].where(bad["error_text"] != "", bad["error_code"])).value_counts()
    return [(str(text).removesuffix(": "), int(count)) for text, count in counts.items()]
