"""The numbers of a report, against values computed by hand, and the same numbers in every output."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from deepinfer_cli.bench.runs import SCHEMA
from deepinfer_cli.bench.tables import write_tables
from deepinfer_cli.outputs import write_json
from deepinfer_cli.report import png
from deepinfer_cli.report.stats import percentile, summarize

Dix = Callable[..., Any]
STAMP = "functional check, not performance"


def record(conversation: int, turn: int, start_s: float, ttft_s: float, *, tokens: int = 5, gap_s: float = 0.01, prompt: int = 400,
           cached: int = 0, outcome: str = "ok", rank: int = 0) -> dict[str, Any]:  # fmt: skip
    first, last = start_s + ttft_s, start_s + ttft_s + (tokens - 1) * gap_s
    good = outcome == "ok"
    return {
        "request_id": f"{conversation}-{turn}", "conversation": conversation, "turn": turn, "scheduled_s": start_s, "start_s": start_s,
        "first_s": first if good else None, "last_s": last if good else None, "end_s": last,
        "gaps_s": [gap_s] * (tokens - 1) if good else [],
        "chunks": tokens if good else 0, "prompt_tokens": prompt if good else None, "cached_tokens": cached if good else None,
        "output_tokens": tokens if good else None, "requested_tokens": tokens, "finish_reason": "length" if good else None, "rank": rank,
        "outcome": outcome, "error_code": "", "error_text": "" if good else "rank 0 died",
    }  # fmt: skip


def counters(prompt: int, cached: int, output: int, rank: int = 0) -> dict[str, Any]:
    return {
        "rank": rank, "generation": 1, "tokens": {"prompt_total": prompt, "cached_total": cached, "generated_total": output},
        "prefix_cache": {"lookup_tokens_total": prompt, "hit_tokens_total": cached},
    }  # fmt: skip


def make_run(home: Path, name: str, records: list[dict[str, Any]], *, valid: bool = True, tiny: bool = True, recipe_hash: str = "h",
             labels: dict[str, str] | None = None, after: list[dict[str, Any]] | None = None) -> Path:  # fmt: skip
    folder = home / "state" / "runs" / name
    folder.mkdir(parents=True)
    (folder / "requests.jsonl").write_text("\n".join(json.dumps(r) for r in records) + "\n")
    sample = {"ranks": [counters(0, 0, 0)]}
    (folder / "samples.jsonl").write_text(
        "\n".join(json.dumps({"at_s": t, "metrics": {"ranks": [counters(100 * t, 40 * t, 10 * t)]}}) for t in (0, 1, 2))
    )
    write_tables(folder, name)
    write_json(
        folder / "run.json",
        {
            "schema": SCHEMA, "id": name, "recipe": "smoke", "recipe_hash": recipe_hash, "status": "complete", "valid": valid,
            "reasons": [] if valid else ["too many failed"], "labels": labels or {},
            "started_unix_s": 1.0, "window_s": 2.0, "command": "dix bench run smoke",
            "server": {"url": "http://x", "model": "tiny" if tiny else "big", "ranks": 1}, "harness": {"name": "dix load"}, "notes": [],
            "stamp": STAMP if tiny else None, "counters_before": sample, "counters_after": {"ranks": after or [counters(1600, 512, 20)]},
        },
    )  # fmt: skip
    return folder


def four_requests() -> list[dict[str, Any]]:
    return [
        record(0, 0, 0.0, 0.100),
        record(1, 0, 0.0, 0.300),
        record(0, 1, 1.0, 0.050, cached=256),
        record(1, 1, 1.0, 0.150, cached=256),
    ]


def test_latencies_computed_by_hand(home: Path) -> None:
    summary = summarize(make_run(home, "20260101-000000-smoke-aaaaaa", four_requests()))
    assert summary.value("ttft", "mean") == pytest.approx((100 + 300 + 50 + 150) / 4)
    assert summary.value("ttft", "max") == pytest.approx(300)
    assert summary.value("ttft", "p50") is None  # two requests beyond it, ten are needed
    assert summary.value("tpot", "mean") == pytest.approx(10)  # 4 gaps of 10 ms for 5 tokens
    assert summary.value("itl", "mean") == pytest.approx(10, rel=1e-5)
    assert summary.row("itl", "mean").n == 16  # type: ignore[union-attr]
    # end to end: TTFT + 40 ms each
    assert summary.value("e2e", "mean") == pytest.approx(190)


def test_tpot_counts_tokens_and_itl_counts_chunks(home: Path) -> None:
    several = record(0, 0, 0.0, 0.1, tokens=9, gap_s=0.04)
    several |= {"chunks": 3, "gaps_s": [0.16, 0.16], "last_s": 0.1 + 0.32}
    summary = summarize(make_run(home, "20260101-000000-smoke-aaaaaa", [several]))
    assert summary.value("tpot", "mean") == pytest.approx(320 / 8)
    assert summary.value("itl", "mean") == pytest.approx(160, rel=1e-5)


def test_throughput_computed_by_hand(home: Path) -> None:
    summary = summarize(make_run(home, "20260101-000000-smoke-aaaaaa", four_requests()))
    window_s = 1.0 + 0.150 + 0.040
    assert summary.value("window") == pytest.approx(window_s)
    assert summary.value("output_rate") == pytest.approx(20 / window_s)
    assert summary.value("input_rate") == pytest.approx(1600 / window_s)
    assert summary.value("uncached_input_rate") == pytest.approx((1600 - 512) / window_s)
    assert summary.value("user_rate") == pytest.approx(100)


def test_hit_rates_are_sums_over_sums(home: Path) -> None:
    records = [record(0, 0, 0.0, 0.1, prompt=100), record(0, 1, 1.0, 0.1, prompt=900, cached=768)]
    after = [counters(600, 256, 5, 0), counters(400, 128, 5, 1)]
    summary = summarize(make_run(home, "20260101-000000-smoke-aaaaaa", records, after=after))
    assert summary.value("hit_rate_client") == pytest.approx(768 / 1000)
    assert summary.value("hit_rate_client", group="turn 0") == 0
    assert summary.value("hit_rate_client", group="turn 1") == pytest.approx(768 / 900)
    assert summary.value("hit_rate_server", group="rank 0") == pytest.approx(256 / 600)
    assert summary.value("hit_rate_server", group="rank 1") == pytest.approx(128 / 400)
    assert summary.value("hit_rate_server") == pytest.approx(384 / 1000)


def test_failures_stand_beside_latencies_and_do_not_enter_them(home: Path) -> None:
    records = [*four_requests(), record(2, 0, 0.0, 9.0, outcome="failed"), record(3, 0, 0.0, 9.0, outcome="truncated")]
    summary = summarize(make_run(home, "20260101-000000-smoke-aaaaaa", records))
    assert summary.value("ttft", "max") == pytest.approx(300)
    assert (summary.value("requests", "ok"), summary.value("requests", "failed"), summary.value("requests", "truncated")) == (4, 1, 1)
    assert summary.value("failed_share") == pytest.approx(2 / 6)
    assert dict(summary.errors) == {"failed: rank 0 died": 1, "truncated: rank 0 died": 1}


@pytest.mark.parametrize(
    ("n", "p", "printed"), [(19, 50, False), (20, 50, True), (99, 90, False), (100, 90, True), (999, 99, False), (1000, 99, True)]
)
def test_a_percentile_needs_ten_values_beyond_it(n: int, p: float, printed: bool) -> None:
    values = np.arange(n, dtype=np.float64)
    assert (percentile(values, p) is not None) is printed
    if printed:
        assert percentile(values, p) == pytest.approx(np.percentile(values, p))


def test_terminal_json_csv_and_parquet_hold_the_same_numbers(dix: Dix, home: Path, tmp_path: Path) -> None:
    make_run(home, "20260101-000000-smoke-aaaaaa", four_requests())
    ran = dix("report", "--json", "--csv", tmp_path / "n.csv", "--parquet", tmp_path / "n.parquet")
    assert ran.code == 0
    from_json = {(r["group"], r["metric"], r["stat"]): r["value"] for r in ran.json["runs"][0]["rows"]}
    with (tmp_path / "n.csv").open() as file:
        from_csv = {(r["group"], r["metric"], r["stat"]): float(r["value"]) if r["value"] else None for r in csv.DictReader(file)}
    frame = pd.read_parquet(tmp_path / "n.parquet")
    from_parquet = {
        (g, m, s): None if math.isnan(v) else v
        for g, m, s, v in zip(frame["group"], frame["metric"], frame["stat"], frame["value"], strict=True)
    }
    assert from_json == pytest.approx(from_csv)
    assert from_json == pytest.approx(from_parquet)
    shown = dix("report").out
    assert re.search(r"TTFT ms\s+4\s+150\.0\s+–\s+–\s+–\s+–\s+300\.0", shown)
    assert "57.0%" not in shown
    assert "32.0%" in shown  # 512 of 1,600


def test_the_stamp_is_in_every_output(dix: Dix, home: Path, tmp_path: Path) -> None:
    make_run(home, "20260101-000000-smoke-aaaaaa", four_requests())
    ran = dix("report", "--html", tmp_path / "r.html", "--csv", tmp_path / "n.csv", "--parquet", tmp_path / "n.parquet")
    assert STAMP in ran.out
    assert STAMP in dix("report", "--json").json["runs"][0]["note"]
    assert STAMP in (tmp_path / "r.html").read_text().lower()
    assert STAMP in (tmp_path / "n.csv").read_text()
    assert set(pd.read_parquet(tmp_path / "n.parquet")["note"]) == {STAMP}
    make_run(home, "20260101-000001-smoke-bbbbbb", four_requests(), tiny=False)
    assert STAMP not in dix("report", "bbbbbb").out


class Links(HTMLParser):
    """Everything a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []
        self.svgs = self.details = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href", "srcset")]
        self.svgs += tag == "svg"
        self.details += tag == "details"
        if tag in ("link", "iframe", "img", "object"):  # the page's own script is inline; one with a source is caught above
            self.found.append(tag)


def test_the_page_is_self_contained_and_shows_data_under_each_figure(dix: Dix, home: Path, tmp_path: Path) -> None:
    make_run(home, "20260101-000000-smoke-aaaaaa", four_requests())
    dix("report", "--html", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    page = Links()
    page.feed(text)
    assert page.found == []
    assert "url(" not in text
    assert "@import" not in text
    assert page.svgs == page.details >= 5
    assert "prefers-color-scheme:dark" in text
    assert len(text) < 6 * 2**20


def test_errors_and_labels_are_escaped_in_the_page(dix: Dix, home: Path, tmp_path: Path) -> None:
    evil = record(9, 0, 0.0, 1.0, outcome="failed") | {"error_text": "<script>alert(1)</script>"}
    make_run(home, "20260101-000000-smoke-aaaaaa", [*four_requests(), evil])
    dix("report", "--html", tmp_path / "r.html")
    assert "<script>alert" not in (tmp_path / "r.html").read_text()


def test_a_run_without_a_good_request_still_reports(dix: Dix, home: Path, tmp_path: Path) -> None:
    make_run(home, "20260101-000000-smoke-aaaaaa", [record(0, 0, 0.0, 1.0, outcome="failed")], valid=False)
    ran = dix("report", "--html", tmp_path / "r.html")
    assert ran.code == 5
    assert "0 of 1 requests ok" in ran.out
    assert (tmp_path / "r.html").is_file()


def test_png_figures_are_written(dix: Dix, home: Path, tmp_path: Path) -> None:
    make_run(home, "20260101-000000-smoke-aaaaaa", four_requests())
    assert dix("report", "--png", tmp_path / "png").code == 0
    names = {path.name for path in (tmp_path / "png").iterdir()}
    assert {"ttft.png", "tpot.png", "hit_rate.png", "timeline.png", "frontier.png"} <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "png").iterdir())


def test_png_axes_are_read_without_powers_of_ten_or_half_requests(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, list[str]] = {}

    def keep(figure: Any, axes: Any, path: Path, **_: Any) -> Path:
        figure.canvas.draw()
        kept[path.name] = [text.get_text() for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels(which="both")]
        return path

    make_run(home, "20260101-000000-smoke-aaaaaa", four_requests())
    monkeypatch.setattr(png, "_save", keep)
    png.write_png([summarize(home / "state" / "runs" / "20260101-000000-smoke-aaaaaa")], tmp_path)
    assert not [text for texts in kept.values() for text in texts if "$" in text]
    assert kept["ttft.png"][-1].endswith("%")
    assert not [text for text in kept["timeline.png"][-3:] + kept["hit_rate.png"][:3] if "." in text]


def test_runs_are_found_by_last_id_label_recipe_and_path(dix: Dix, home: Path) -> None:
    first = make_run(home, "20260101-000000-smoke-aaaaaa", four_requests(), labels={"build": "base"})
    make_run(home, "20260101-000001-smoke-bbbbbb", four_requests())
    for name in ("aaaaaa", "base", str(first), first.name):
        assert dix("report", name, "--json").json["runs"][0]["run"]["id"] == first.name
    for name in ("last", "smoke"):
        assert dix("report", name, "--json").json["runs"][0]["run"]["id"].endswith("bbbbbb")
    assert dix("report", "nothing").code == 2


def test_a_torn_record_is_left_out(home: Path) -> None:
    folder = home / "state" / "runs" / "20260101-000000-smoke-aaaaaa"
    folder.mkdir(parents=True)
    (folder / "requests.jsonl").write_text(json.dumps(record(0, 0, 0.0, 0.1)) + '\n{"request_id": "to')
    assert len(write_tables(folder, "x")) == 1


def test_the_last_run_is_the_last_that_has_ended(dix: Dix, home: Path) -> None:
    """While another run is measured, in this home or in another window, the one before it can be read."""
    make_run(home, "20260101-000000-smoke-aaaaaa", four_requests())
    folder = make_run(home, "20260102-000000-smoke-bbbbbb", four_requests())
    run = json.loads((folder / "run.json").read_text())
    write_json(folder / "run.json", run | {"status": "running", "window_s": None})
    for table in folder.glob("*.parquet"):
        table.unlink()
    assert dix("report", "last", "--json").json["runs"][0]["run"]["id"] == "20260101-000000-smoke-aaaaaa"
    ran = dix("report", "20260102")
    assert ran.code == 2
    assert "still runs" in ran.err


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_report_says_everything_at_any_width(dix: Dix, home: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    for run in ("20260101-000000-smoke-aaaaaa", "20260102-000000-smoke-bbbbbb"):
        make_run(home, run, four_requests())
    monkeypatch.setenv("COLUMNS", "500")
    wide = dix("report", "smoke").out
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = dix("report", "smoke").out
    assert max(len(line.split("  ")) for line in narrow.splitlines()) > 1, "tables are there"
    assert sorted(set(narrow.split())) == sorted(set(wide.split()))


def test_a_run_without_a_finished_request_explains_no_table_that_is_not_there(dix: Dix, home: Path) -> None:
    make_run(home, "20260101-000000-smoke-aaaaaa", [record(0, 0, 0.0, 0.1, outcome="failed")], valid=False)
    ran = dix("report")
    assert ran.code == 5
    assert "percentile" not in ran.out + ran.err
