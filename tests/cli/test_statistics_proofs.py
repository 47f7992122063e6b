"""What a comparison may claim, shown on a simulator of runs: equal sides are not told apart, a real regression is found; and its size."""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from deepinfer_cli.report.compare import MEASURES, Result, Verdict, compare
from deepinfer_cli.report.stats import STATS, Row, Summary, distribution
from tests.cli.runs_simulator import simulated_numbers, simulated_requests, write_run

RUNS, REPETITIONS = 5, 40
BUDGET_BYTES = 1.5 * 2**30


@functools.cache
def summary_of(seed: int, ttft_factor: float) -> Summary:
    """The compared numbers of one run, without files and without its requests."""
    found = simulated_numbers(seed, 1200, ttft_factor)
    n, window_s = len(found["start_s"]), float(found["end_s"].max() - found["start_s"].min())
    rows = [row for metric in ("ttft", "tpot", "e2e") for row in distribution("all", metric, found[f"{metric}_ms"])]
    rows.append(Row("all", "output_rate", "value", float(found["output_tokens"].sum()) / window_s, "tok/s", n))
    hit = float(found["cached_tokens"].sum()) / float(found["prompt_tokens"].sum())
    rows.append(Row("all", "hit_rate_client", "value", hit, "share", n))
    nothing = pd.DataFrame()
    return Summary({"id": str(seed), "valid": True, "server": {}}, rows, [], nothing, nothing, nothing, nothing, Path())


def group(first_seed: int, ttft_factor: float = 1.0) -> list[Summary]:
    return [summary_of(seed, ttft_factor) for seed in range(first_seed, first_seed + RUNS)]


def verdicts(result: Result) -> dict[str, Verdict]:
    return {line.label: line.verdict for line in result.lines}


@pytest.fixture(scope="module")
def equal_sides() -> list[dict[str, Verdict]]:
    return [verdicts(compare(group(1000 * i), group(1000 * i + 500))) for i in range(REPETITIONS)]


def test_equal_sides_are_not_told_apart_in_95_percent_of_repetitions(equal_sides: list[dict[str, Verdict]]) -> None:
    """Every metric of a repetition at once: same or cannot tell."""
    assert all(len(found) == len(MEASURES) for found in equal_sides)
    quiet = [all(verdict in (Verdict.SAME, Verdict.UNKNOWN) for verdict in found.values()) for found in equal_sides]
    assert sum(quiet) / REPETITIONS >= 0.95


def test_a_regression_of_ten_percent_is_found_in_90_percent_of_repetitions() -> None:
    """With all the other metrics compared beside it."""
    found = [verdicts(compare(group(1000 * i), group(1000 * i + 500, ttft_factor=1.1))) for i in range(REPETITIONS)]
    seen = [any(one[label] is Verdict.WORSE for label in ("TTFT mean ms", "TTFT p50 ms", "TTFT p90 ms")) for one in found]
    assert sum(seen) / REPETITIONS >= 0.9
    assert not any(one[label] is Verdict.BETTER for one in found for label in one if label.startswith("TTFT"))


def test_percentiles_of_one_pass_equal_those_of_many() -> None:
    values = simulated_numbers(1)["ttft_ms"]
    rows = {row.stat: row.value for row in distribution("all", "ttft", values)}
    assert list(rows) == list(STATS)
    assert rows["p90"] == pytest.approx(float(pd.Series(values).quantile(0.9)))
    assert rows["p99"] is None  # four requests beyond it


@pytest.mark.slow
def test_a_million_requests_are_reported_within_budget(tmp_path: Path) -> None:
    """Ten seconds of processor time and 1.5 GiB; the wall clock of a shared machine says nothing. The page stays small."""
    name = "20260101-000000-simulated-aaaaaa"
    write_run(tmp_path / "home" / "state" / "runs", name, simulated_requests(name, 1, 10**6), gaps_each=10)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-P", "-m", "deepinfer_cli", "report", "last", "--html", str(tmp_path / "page.html")]
    environ = {**os.environ, "DIX_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "1,000,000" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 10
    assert after.ru_maxrss * 1024 <= BUDGET_BYTES
    assert (tmp_path / "page.html").stat().st_size <= 6e6
