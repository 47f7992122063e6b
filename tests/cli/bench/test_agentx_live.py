"""What is shown while a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_cli.bench.agentx_live import LiveView, Snapshot, Tail, as_event, hit_shares, one_line
from tests.cli.bench.agentx_samples import failed, golden_traces, record


def counters(lookup: int, hit: int, device: int, host: int) -> dict[str, Any]:
    tiers = {"device": {"hit_tokens_total": device}, "host": {"hit_tokens_total": host}}
    return {"ranks": [{"prefix_cache": {"lookup_tokens_total": lookup, "hit_tokens_total": hit, "tiers": tiers}}]}


def view(folder: Path) -> LiveView:
    return LiveView(folder, folder / "log", golden_traces(), 60.0)


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


def test_phases_follow_the_log(tmp_path: Path) -> None:
    live, log = view(tmp_path), tmp_path / "log"
    seen = [live.look().phase]
    for line in (
        "NOTICE Phase agentic.warmup (warmup) started",
        "NOTICE Phase agentic.warmup (warmup) complete | completed=3",
        "NOTICE Phase profiling (profiling) started | target: 60.0s",
        "NOTICE Phase profiling (profiling) sending complete | sent=3",
        "NOTICE Phase profiling (profiling) complete | completed=3",
    ):
        with log.open("a") as file:
            file.write(line + "\n")
        seen.append(live.look().phase)
    assert seen == ["loading", "warm-up", "warm-up", "window", "window", "export"]
    assert live.window_done_s == 60.0


def test_records_are_counted_once_and_warmup_not_at_all(tmp_path: Path) -> None:
    live, path = view(tmp_path), tmp_path / "profile_export.jsonl"
    append(path, record(0, warmup=True), record(0), record(1), failed(2))
    live.look()
    append(path, record(3), record(11, metrics={"usage_completion_tokens": None}))
    now = live.look()
    assert (now.ok, now.bad, now.failed, now.sessions) == (3, 2, 1, 2)
    assert now.first_error.startswith("failed: 500")
    assert now.ttft_ms["p50"] == 20.0
    assert now.itl_ms["p99"] == 1.0
    assert now.coverage is not None
    assert abs(now.coverage - 11.1 / 60) < 1e-6


def test_half_a_record_waits_for_its_other_half(tmp_path: Path) -> None:
    live, path = view(tmp_path), tmp_path / "profile_export.jsonl"
    text = json.dumps(record(0)) + "\n"
    path.write_text(text[:100])
    assert live.look().ok == 0
    path.write_text(text)
    assert live.look().ok == 1


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1), max_size=8),
    st.data(),
)
def test_tail_gives_every_line_once_however_the_file_grows(lines: list[str], data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        tail, got = Tail(path), list[str]()
        rest = "".join(line + "\n" for line in lines).encode()
        while rest:
            cut = data.draw(st.integers(1, len(rest)))
            with path.open("ab") as file:
                file.write(rest[:cut])
            rest = rest[cut:]
            got += tail.lines()
        assert got == lines


def test_hit_rate_and_tiers_are_growths_between_two_samples() -> None:
    share, tiers = hit_shares(counters(1000, 900, 900, 0), counters(2000, 1600, 1400, 200))
    assert share == 0.7
    assert tiers == {"device": 0.5, "host": 0.2}
    assert hit_shares(counters(5, 1, 1, 0), counters(5, 1, 1, 0)) == (None, {})


def test_line_names_what_matters_and_only_what_is_known() -> None:
    assert one_line(Snapshot(phase="loading", elapsed_s=4.0)) == "loading 4 s"
    full = Snapshot(
        phase="window",
        elapsed_s=30.0,
        window_s=60.0,
        sessions=3,
        ok=40,
        bad=2,
        coverage=0.5,
        hit_share=0.8,
        tiers={"device": 0.7, "host": 0.1},
    )
    full.ttft_ms, full.itl_ms, full.output_tok_s = {"p50": 20.0, "p99": 90.0}, {"p50": 1.25}, 256.0
    assert one_line(full) == (
        "30 of 60 s · 3 sessions · 40 ok · 2 not good · TTFT p50 20 p99 90 ms · ITL p50 1.2 ms · 256 tok/s · coverage 50%"
        " · cached 80% (device 70%, host 10%)"
    )


def test_event_is_plain_json() -> None:
    event = json.loads(json.dumps(as_event(Snapshot())))
    assert (event["phase"], event["coverage"]) == ("loading", None)
