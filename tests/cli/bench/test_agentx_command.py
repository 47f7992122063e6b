"""The harness's argument vector and environment."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.bench.agentx_traces import TraceSet
from deepinfer_cli.bench.aiperf_command import (
    OFFLINE_TRAPS,
    arguments,
    child_environment,
    command_text,
    launch_line,
    overrides,
    special_environment,
)
from deepinfer_cli.bench.aiperf_harness import PINNED, find_harness
from hicache.errors import MachineError
from tests.cli.bench.agentx_samples import golden_traces, plan

PUBLIC = TraceSet("public", None, "semianalysis_cc_traces_weka_062126")


def flags(**changes: Any) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in arguments(plan(**changes), Path("out"))}


@pytest.mark.parametrize(
    ("changes", "flag", "values"),
    [
        ({}, "--scenario", ["inferencex-agentx-mvp"]),
        ({}, "--url", ["http://127.0.0.1:1"]),
        ({}, "--input-file", [str(golden_traces().folder)]),
        ({}, "--custom-dataset-type", ["weka_trace"]),
        ({}, "--streaming", []),
        ({}, "--use-server-token-count", []),
        ({}, "--per-chunk-usage", []),
        ({}, "--reset-kv-cache", []),
        ({}, "--export-level", ["records"]),
        ({}, "--burst-phase-starts", []),
        ({}, "--agentic-cache-warmup-duration", ["6"]),
        ({}, "--num-dataset-entries", ["393"]),
        ({"raw": True}, "--export-level", ["raw"]),
        ({"concurrency": 32}, "--concurrency", ["32"]),
        ({"duration_s": 1200.0}, "--benchmark-duration", ["1200"]),
        ({"grace_s": 30.0}, "--benchmark-grace-period", ["30"]),
        ({"seed": 44}, "--random-seed", ["44"]),
        ({"start": (0.1, 0.5)}, "--trajectory-start-min-ratio", ["0.1"]),
        ({"start": (0.1, 0.5)}, "--trajectory-start-max-ratio", ["0.5"]),
        ({"max_failed": 0.02}, "--failed-request-threshold", ["0.02"]),
        ({"max_context": 131072}, "--max-context-length", ["131072"]),
        ({"slo": {"ttft": 2.0, "tpot": 0.05}}, "--goodput", ["time_to_first_token:2000 inter_token_latency:50"]),
        ({"metrics_urls": ("http://a/metrics",)}, "--server-metrics", ["http://a/metrics"]),
        ({"extra": {"temperature": 0}}, "--extra-inputs", ['{"temperature":0}']),
        ({"traces": PUBLIC}, "--public-dataset", ["semianalysis_cc_traces_weka_062126"]),
    ],
)
def test_each_setting_reaches_its_flag(changes: dict[str, Any], flag: str, values: list[str]) -> None:
    assert flags(**changes)[flag] == values


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"cache": "asis"}, "--reset-kv-cache"),
        ({"cache": "warm"}, "--reset-kv-cache"),
        ({"duration_s": 900.0}, "--burst-phase-starts"),
        ({"warmup_s": 0.0}, "--agentic-cache-warmup-duration"),
        ({}, "--max-context-length"),
        ({}, "--goodput"),
        ({"traces": PUBLIC}, "--input-file"),
        ({"harness": "fork"}, "--scenario"),
        ({"harness": "fork"}, "--reset-kv-cache"),
        ({"harness": "fork"}, "--per-chunk-usage"),
    ],
)
def test_flags_that_do_not_apply_are_left_out(changes: dict[str, Any], flag: str) -> None:
    assert flag not in flags(**changes)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [({}, 2), ({"duration_s": 900.0}, 1), ({"traces": PUBLIC}, 1), ({"traces": PUBLIC, "duration_s": 3600.0}, 0)],
)
def test_rules_are_overridden_exactly_for_local_traces_and_short_windows(changes: dict[str, Any], reasons: int) -> None:
    assert len(overrides(plan(**changes))) == reasons
    assert ("--unsafe-override" in flags(**changes)) == bool(reasons)


def test_hostile_parent_environment_does_not_reach_the_harness(tmp_path: Path) -> None:
    hostile = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "AIPERF_DATASET_MMAP_CACHE_ENABLED": "true",
        "AIPERF_LOG_LEVEL": "trace",
        "DIX_HOME": "/x",
        "HOME": "/home/user",
        "PATH": "/bin",
        "NO_PROXY": "intranet",
    }
    child = child_environment(hostile, tmp_path, golden_traces())
    assert not set(OFFLINE_TRAPS) & set(child)
    assert "AIPERF_LOG_LEVEL" not in child
    assert "DIX_HOME" not in child
    assert child["AIPERF_DATASET_MMAP_CACHE_ENABLED"] == "false"
    assert child["PATH"] == "/bin"
    assert child["NO_PROXY"].split(",") == ["intranet", "127.0.0.1", "localhost"]


def test_harness_keeps_its_files_in_the_run_and_still_finds_the_users_corpora(tmp_path: Path) -> None:
    special = special_environment({"HOME": "/home/user"}, tmp_path, golden_traces())
    assert Path(special["HOME"]).is_relative_to(tmp_path)
    assert Path(special["AIPERF_DATASET_MMAP_BASE_PATH"]).is_relative_to(tmp_path)
    assert special["HF_HOME"] == "/home/user/.cache/huggingface"
    assert special_environment({"HF_HOME": "/data/hf"}, tmp_path, golden_traces())["HF_HOME"] == "/data/hf"


def test_network_is_only_barred_for_local_traces(tmp_path: Path) -> None:
    assert special_environment({}, tmp_path, golden_traces())["HF_DATASETS_OFFLINE"] == "1"
    assert "HF_DATASETS_OFFLINE" not in special_environment({}, tmp_path, PUBLIC)


def test_process_pool_starts_from_64_traces_on(tmp_path: Path) -> None:
    few = golden_traces()
    many = dataclasses.replace(few, traces=few.traces * 13)
    name = "AIPERF_DATASET_WEKA_PARALLEL_WORKERS"
    assert special_environment({}, tmp_path, few)[name] == "1"
    assert name not in special_environment({}, tmp_path, many)


def test_printed_command_has_one_flag_a_line_and_quotes_what_a_shell_would_split() -> None:
    text = command_text("aiperf", [["profile"], ["--goodput", "a:1 b:2"]], {"HOME": "/a b"})
    lines = [line.strip(" \\") for line in text.splitlines()]
    assert lines == ["env", "-u HF_HUB_OFFLINE", "-u TRANSFORMERS_OFFLINE", "HOME='/a b'", "aiperf", "profile", "--goodput 'a:1 b:2'"]


def test_every_flag_is_one_that_the_installed_harness_knows() -> None:
    import subprocess

    program = find_harness("aiperf", Path("none")).program
    environment = {**os.environ, "COLUMNS": "200"}
    known = subprocess.run([program, "profile", "--help"], capture_output=True, text=True, timeout=120, env=environment).stdout
    full = plan(max_context=1, slo={"ttft": 1.0}, metrics_urls=("http://a",), extra={"a": 1})
    for row in [*arguments(full, Path("out")), *arguments(plan(traces=PUBLIC), Path("out"))]:
        assert row[0] in known, row[0]


def test_installed_harness_is_the_pinned_one() -> None:
    assert find_harness("aiperf", Path("none")).version == PINNED


def test_harness_beside_no_interpreter_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "site" / "bin" / "aiperf"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(program.parent))
    assert find_harness("aiperf", Path("none")).program == program
    assert launch_line(program, [["profile"]], "key")[0] == str(tmp_path / "python")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError, match="not installed"):
        find_harness("aiperf", Path("none"))


def test_missing_fork_names_the_line_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        find_harness("fork", tmp_path)
    assert "pip install agentx-harness==" in caught.value.hint
    assert caught.value.exit_code == 3
