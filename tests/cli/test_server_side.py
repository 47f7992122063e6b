"""The server's own account beside the client's: parts of TTFT, per-rank cache counts with their differences, speculation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from deepinfer_cli.bench.runs import read_run
from deepinfer_cli.outputs import write_json
from deepinfer_cli.report.explain import MEANINGS
from deepinfer_cli.report.server_side import PARTS, mean_split_of_ttft, split_of_ttft
from deepinfer_cli.report.stats import summarize
from deepinfer_cli.report.tables import by_rank, speculation, ttft_split
from tests.cli.runs_simulator import simulated_requests, write_run

Dix = Callable[..., Any]
NAME = "20260101-000000-simulated-aaaaaa"


def counters(cached: int, drafted: int, accepted: int) -> dict[str, Any]:
    tokens = {"prompt_total": 1000 * cached, "cached_total": cached, "generated_total": 0}
    spec = {"drafts_total": drafted // 2, "draft_tokens_total": drafted, "accepted_tokens_total": accepted}
    spec |= {"verified_by_place_total": {"1": drafted}, "accepted_by_place_total": {"1": accepted}}
    return {"ranks": [{"rank": rank, "generation": 1, "tokens": tokens, "prefix_cache": {}, "spec": spec} for rank in (0, 1)]}


@pytest.fixture
def folder(home: Path) -> Path:
    requests = simulated_requests(NAME, 3)
    out = write_run(home / "state" / "runs", NAME, requests, gaps_each=3)
    told = int(requests.loc[requests["rank"] == 0, "cached_tokens"].sum())
    body = read_run(out) | {"counters_before": counters(100, 10, 2), "counters_after": counters(100 + told - 7, 110, 82)}
    write_json(out / "run.json", body)
    return out


def test_the_parts_add_up_to_the_time_to_first_token(folder: Path) -> None:
    good = summarize(folder).good
    parts = split_of_ttft(good)
    assert set(parts) == {metric for metric, *_ in PARTS}
    assert sum(parts.values()).to_numpy() == pytest.approx(good["ttft_ms"].to_numpy())


def test_runs_of_servers_that_tell_nothing_have_no_parts(folder: Path) -> None:
    silent = summarize(folder).good.assign(server_ttft_ms=float("nan"))
    assert split_of_ttft(silent) == {}
    assert split_of_ttft(pd.DataFrame({"ttft_ms": [1.0]})) == {}


def first_tokens(count: int, each_ms: float) -> dict[str, Any]:
    seconds = count * each_ms / 1e3
    parts = {"queue": seconds, "restore": seconds / 10, "prefill": 2 * seconds, "ttft": 4 * seconds}
    return {
        "boot_id": "one",
        "first_tokens": {"requests_total": count, **{f"{name}_seconds_total": value for name, value in parts.items()}},
    }


def test_without_an_account_per_request_the_counters_give_the_means(folder: Path) -> None:
    body = read_run(folder)
    run = {"counters_before": first_tokens(10, 1.0), "counters_after": first_tokens(30, 11.0)}
    split, count = mean_split_of_ttft(run, client_ttft_ms=70.0)
    assert count == 20
    # (30 * 11 - 10 * 1) / 20 = 16 ms of queue each
    assert split == pytest.approx({"ttft_queue": 16, "ttft_restore": 1.6, "ttft_prefill": 32, "ttft_front": 14.4, "ttft_client": 6})
    assert mean_split_of_ttft(run | {"counters_after": first_tokens(30, 11.0) | {"boot_id": "two"}}, 70.0) == ({}, 0)
    requests = pd.read_parquet(folder / "requests.parquet").assign(server_ttft_ms=float("nan"))
    requests.to_parquet(folder / "requests.parquet")
    for name, document in run.items():
        body[name] = body[name] | document
    write_json(folder / "run.json", body)
    assert [row[0] for row in ttft_split(summarize(folder)).rows] == [name for _, _, name, _ in PARTS]


def test_the_report_shows_parts_differences_and_speculation(folder: Path, dix: Dix, tmp_path: Path) -> None:
    summary = summarize(folder)
    assert [row[0] for row in ttft_split(summary).rows] == [name for _, _, name, _ in PARTS]
    grid = by_rank(summary)
    assert grid.rows[0][grid.heads.index("Difference")] == "+7"
    (row,) = speculation(summary).rows
    assert row[:4] == ["200", "160", "80.0%", "2.60"]
    ran = dix("report", "last", "--html", tmp_path / "p.html")
    assert ran.code == 0
    for text in ("Where the time to first token went", "Speculation", "Difference"):
        assert text in ran.out
        assert text in (tmp_path / "p.html").read_text()


def test_every_number_is_explained_and_unknown_ones_are_named(dix: Dix) -> None:
    for meaning in MEANINGS:
        ran = dix("report", "--explain", meaning.name)
        assert ran.code == 0
        assert meaning.formula in ran.out
    assert dix("report", "--explain", "tpot", "--json").json["metrics"][0]["name"] == "TPOT"
    ran = dix("report", "--explain", "latency")
    assert ran.code == 2
    assert "TTFT" in ran.err
