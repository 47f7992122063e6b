"""The real harness against a small server with faults: every one must end in the right reason, whatever the harness says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from deepinfer_cli.main import main
from deepinfer_cli.report.stats import summarize
from tests.cli.bench.agentx_fake_server import FakeServer, Faults, tokenizer_dir, with_faults

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(240)]


def measure(
    home: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults, duration: str = "8s", *more: str
) -> tuple[int, dict[str, Any], Path]:
    """Exit code, `run.json` and the run's directory of one small run."""
    monkeypatch.setenv("DIX_HOME", str(home))
    monkeypatch.chdir(home)
    with FakeServer(faults) as server:
        arguments = ["--url", server.url, "--tokenizer", str(tokenizer_dir(home / "tok")), "--traces", "bundled", "--concurrency", "3"]
        code = main(["bench", "agentx", *arguments, "--duration", duration, "--warmup-duration", "1s", "--grace", "5s", "-q", *more])
    (folder,) = (home / "state" / "runs").iterdir()
    return code, json.loads((folder / "run.json").read_text()), folder


def test_good_server_gives_a_valid_run_with_equal_hit_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began_s = time.monotonic()
    code, run, folder = measure(tmp_path, monkeypatch, with_faults(), "20s")
    assert time.monotonic() - began_s < 150
    assert (code, run["valid"], run["comparable"], run["verdict"]["official"]) == (0, True, False, False)
    assert run["hit_share"]["client"] == pytest.approx(run["hit_share"]["server"], abs=0.01)
    assert run["hit_share"]["client"] >= 0.9 * run["ideal_hit_share"]
    requests = pd.read_parquet(folder / "requests.parquet")
    assert set(requests["rank"]) == {0, 1}
    assert requests["requested_tokens"].notna().all()
    assert not (folder / "scratch").exists()
    assert any(json.loads(line)["phase"] == "window" for line in (folder / "progress.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        pytest.param(with_faults(status_500_every=3), "failed", id="answers 500"),
        pytest.param(with_faults(close_after=10), "failed", id="refuses connections"),
        pytest.param(with_faults(hang_at=8), "hung", id="hangs in the middle"),
        pytest.param(with_faults(half_every=5), "short_answers", id="half-length answers"),
        pytest.param(with_faults(bare_error_every=8), "short_answers", id="error without the event line"),
        pytest.param(with_faults(event_error_every=5), "failed", id="error with the event line"),
        pytest.param(with_faults(overflow_every=9), "context_overflow", id="context overflows"),
        pytest.param(with_faults(warm=True), "not_cold", id="warm although cold was asked for"),
    ],
)
def test_faulty_server_ends_invalid_with_its_reason_although_the_harness_ends_with_0(
    faults: Faults, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, run, _ = measure(tmp_path, monkeypatch, faults)
    assert (code, run["valid"], run["harness_exit_code"]) == (5, False, 0)
    assert reason in [found["code"] for found in run["verdict"]["reasons"]]


def test_chunks_of_several_tokens_do_not_flatter_tpot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, folder = measure(tmp_path, monkeypatch, with_faults(chunk_tokens=8))
    requests = pd.read_parquet(folder / "requests.parquet")
    assert code == 0
    assert requests["tokens_per_chunk"].median() > 5
    # The server takes 1 ms a token; the first chunk's tokens come at once.
    assert 0.8 < requests["tpot_ms"].median() < 2.0


def test_foreign_server_without_metrics_and_reset_gives_a_valid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, run, _ = measure(tmp_path, monkeypatch, with_faults(foreign=True))
    assert (code, run["server"]["ours"], run["hit_share"]["server"]) == (0, False, None)
    assert [found["code"] for found in run["verdict"]["warnings"]] == ["no_server_metrics"]


def test_server_with_a_key_is_measured_and_the_key_is_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-a-secret-of-this-test"
    (tmp_path / "key").write_text(secret + "\n")
    code, run, folder = measure(tmp_path, monkeypatch, with_faults(key=secret), "8s", "--set", f"server.api_key_file={tmp_path / 'key'}")
    assert (code, run["counts"]["failed"]) == (0, 0)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_embedded_model_on_two_ranks_is_measured_within_150_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIX_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    dix = [sys.executable, "-m", "deepinfer_cli"]
    subprocess.run(
        [*dix, "start", "tiny", "--dp", "2", "--port", "0", "--name", "measured", "--rank-header", "-q"], check=True, timeout=120
    )
    try:
        began_s = time.monotonic()
        code = main(["bench", "agentx", "--duration", "20s", "--concurrency", "3", "-q"])
        assert time.monotonic() - began_s < 150
    finally:
        subprocess.run([*dix, "stop", "measured", "-q"], check=True, timeout=60)
    (folder,) = (tmp_path / "state" / "runs").iterdir()
    run = json.loads((folder / "run.json").read_text())
    # A loaded machine may be too slow for a valid run; it must then say so and nothing else.
    assert {reason["code"] for reason in run["verdict"]["reasons"]} <= {"client_slow"}
    assert code == (0 if run["valid"] else 5)
    assert "functional check" in run["stamp"]
    assert run["hit_share"]["client"] == pytest.approx(run["hit_share"]["server"], abs=0.01)
    summary = summarize(folder)
    assert summary.value("hit_rate_server") == pytest.approx(summary.value("hit_rate_client"), abs=0.01)
    assert set(summary.groups("rank")) == {"rank 0", "rank 1"}
