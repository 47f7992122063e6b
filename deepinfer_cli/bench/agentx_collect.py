"""What a run left behind, read into the tables that reports use. The harness's own files stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.bench.agentx_live import hit_shares
from deepinfer_cli.bench.agentx_traces import TraceSet
from deepinfer_cli.bench.aiperf_outputs import RECORDS, Aggregate, LogFacts, ServerCounters, read_aggregate, read_log, read_server_counters
from deepinfer_cli.bench.aiperf_records import WINDOW, RequestRow, chunk_gaps, read_records, request_rows, to_frame
from deepinfer_cli.bench.runs import read_lines

HARNESS_DIR, HARNESS_LOG, SAMPLES = "harness", "harness.log", "samples.jsonl"
NEAR_S = 2.0  # twice the age that the server's counters may have


@dataclass(frozen=True, slots=True)
class Collected:
    """Everything that the harness and the sampler wrote. `counters_*`: our server's own, at the window's ends."""

    rows: list[RequestRow]
    records_path: Path
    aggregate: Aggregate | None
    counters: ServerCounters | None
    log: LogFacts
    samples: list[dict[str, Any]]
    window_s: float
    counters_before: Mapping[str, Any] | None
    counters_after: Mapping[str, Any] | None

    @property
    def scraped_hit_share(self) -> float | None:
        """By the harness's own scrape, whose window starts up to a second of the warm-up too early."""
        return self.counters.hit_share if self.counters else None

    @property
    def server_hit_share(self) -> float | None:
        """Share of prompt tokens from the cache by the server's counters: aligned with the window where the server is ours."""
        if self.counters_before is None or self.counters_after is None:
            return self.scraped_hit_share
        return hit_shares(self.counters_before, self.counters_after)[0]


def collect(folder: Path, traces: TraceSet, not_before_s: float) -> Collected:
    """Works with whatever exists: an interrupted run has records and perhaps no aggregate."""
    harness_dir, log = folder / HARNESS_DIR, folder / HARNESS_LOG
    path = harness_dir / RECORDS
    rows = request_rows(read_records(path), traces, folder.name)
    window = [row for row in rows if row.phase == WINDOW]
    begin = min((row.start_ns for row in window), default=0) / 1e9
    end = max((row.end_ns for row in window), default=0) / 1e9
    warmup_tokens = sum(row.prompt_tokens or 0 for row in rows if row.phase != WINDOW)
    samples = read_lines(folder / SAMPLES)
    log_lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return Collected(
        rows=rows,
        records_path=path,
        aggregate=read_aggregate(harness_dir, not_before_s),
        counters=read_server_counters(harness_dir),
        log=read_log(log_lines),
        samples=[{"at_s": round(sample["unix_s"] - begin, 3), "metrics": sample["metrics"]} for sample in samples] if window else [],
        window_s=end - begin,
        counters_before=counters_at_start(samples, begin, warmup_tokens) if window else None,
        # Nothing is sent after the window, so the last sample is the one that holds all of it.
        counters_after=samples[-1]["metrics"] if samples and window else None,
    )


def counters_at_start(samples: list[dict[str, Any]], begin_s: float, warmup_tokens: int) -> Mapping[str, Any] | None:
    """The sample that holds the warm-up and nothing of the window.

    Samples lag behind by up to a second, so the one nearest in time may miss the last warm-up requests or hold the first of the window.
    The number of prompt tokens that the server has seen says better where it belongs.
    """
    if not samples:
        return None
    near = [s for s in samples if abs(s["unix_s"] - begin_s) <= NEAR_S] or [min(samples, key=lambda s: abs(s["unix_s"] - begin_s))]
    wanted = _prompt_tokens(samples[0]["metrics"]) + warmup_tokens
    chosen: Mapping[str, Any] = min(near, key=lambda s: abs(_prompt_tokens(s["metrics"]) - wanted))["metrics"]
    return chosen


def _prompt_tokens(metrics: Mapping[str, Any]) -> int:
    return sum(int((rank.get("tokens") or {}).get("prompt_total", 0)) for rank in metrics.get("ranks") or [])


def write_tables(folder: Path, collected: Collected) -> None:
    """`requests.parquet` (the window), `warmup.parquet` (same columns), `chunks.parquet`, `timeline.parquet`."""
    from deepinfer_cli.bench.tables import timeline_table, write_parquet

    frame = to_frame(collected.rows)
    in_window = frame["phase"] == WINDOW
    write_parquet(frame[in_window].reset_index(drop=True), folder / "requests.parquet")
    write_parquet(frame[~in_window].reset_index(drop=True), folder / "warmup.parquet")
    good = set(frame.loc[in_window & frame["ok"], "request_id"])
    gaps = chunk_gaps(read_records(collected.records_path))
    write_parquet(gaps[gaps["request_id"].isin(good)].reset_index(drop=True), folder / "chunks.parquet")
    write_parquet(timeline_table(collected.samples), folder / "timeline.parquet")
