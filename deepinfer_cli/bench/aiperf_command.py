"""From a resolved AgentX plan to the harness's argument vector and environment. Pure functions; nothing is started here."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_cli.bench.agentx_traces import TraceSet

SCENARIO = "inferencex-agentx-mvp"
OFFICIAL_S = 3600.0  # the public dashboard's window
FAST_S = 1200.0
LEAST_S = 900.0  # the scenario's least window; below it nothing is comparable
ENTRIES = 393  # sessions of the public corpus
# Building the data set in a process pool costs more than it saves below this many traces.
POOL_TRACES = 64
# With either set, the harness takes a tokenizer's directory for a hub id and dies.
OFFLINE_TRAPS = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# A server's key travels in the child's environment: arguments are visible to every user of the machine.
KEY_VARIABLE = "_DIX_HARNESS_KEY"
_WITH_KEY = f"""
import os, runpy, sys
sys.argv = [*sys.argv[1:], "--api-key", os.environ.pop("{KEY_VARIABLE}")]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class AgentxPlan:
    """One run, fully resolved. Times in seconds; `start`: share of the trace at which a lane may enter, from and to."""

    url: str
    model: str
    tokenizer: Path
    traces: TraceSet
    concurrency: int = 8
    duration_s: float = OFFICIAL_S
    grace_s: float = 30.0
    seed: int = 42
    start: tuple[float, float] = (0.25, 0.75)
    warmup_s: float = 60.0
    cache: str = "cold"
    max_failed: float = 0.10
    max_context: int = 0
    slo: Mapping[str, float] = field(default_factory=dict)
    metrics_urls: tuple[str, ...] = ()
    raw: bool = False
    extra: Mapping[str, object] = field(default_factory=dict)
    harness: str = "aiperf"

    @property
    def short(self) -> bool:
        return self.duration_s < LEAST_S


def overrides(plan: AgentxPlan) -> list[str]:
    """Why the scenario's rules are overridden; empty when they are not."""
    reasons = [f"traces {plan.traces.name} are local"] if not plan.traces.public else []
    if plan.short:
        reasons.append(f"the window is {plan.duration_s:g} s, the scenario wants {LEAST_S:g} s")
    return reasons


def arguments(plan: AgentxPlan, output: Path) -> list[list[str]]:
    """The harness's arguments, one flag with its values per entry, without the program."""
    fork = plan.harness == "fork"
    rows = [["profile"]]
    if not fork:
        rows.append(["--scenario", SCENARIO])
    if overrides(plan):
        rows.append(["--unsafe-override"])
    rows += _source(plan) + _endpoint(plan) + _load(plan)
    rows += [["--output-artifact-dir", str(output)], ["--ui", "none"], ["--no-gpu-telemetry"], ["--slice-duration", "1"]]
    rows += [["--export-level", "raw" if plan.raw else "records"], ["--export-http-trace"], ["--stats-interval", "10"]]
    rows += _metrics(plan)
    if not fork:
        rows += [["--per-chunk-usage"], ["--wait-for-model-timeout", "60"]]
        rows += [["--reset-kv-cache"]] if plan.cache == "cold" else []
    return rows


def _source(plan: AgentxPlan) -> list[list[str]]:
    if plan.traces.public:
        return [["--public-dataset", plan.traces.public]]
    return [["--input-file", str(plan.traces.folder)], ["--custom-dataset-type", "weka_trace"]]


def _endpoint(plan: AgentxPlan) -> list[list[str]]:
    rows = [
        ["--model", plan.model],
        ["--url", plan.url],
        ["--endpoint-type", "chat"],
        ["--endpoint", "/v1/chat/completions"],
        ["--streaming"],
    ]
    rows += [["--use-server-token-count"], ["--tokenizer", str(plan.tokenizer)], ["--request-timeout-seconds", "3600"]]
    if plan.extra:
        rows.append(["--extra-inputs", json.dumps(dict(plan.extra), separators=(",", ":"))])
    return rows


def _load(plan: AgentxPlan) -> list[list[str]]:
    rows = [
        ["--concurrency", str(plan.concurrency)],
        ["--benchmark-duration", f"{plan.duration_s:g}"],
        ["--benchmark-grace-period", f"{plan.grace_s:g}"],
        ["--random-seed", str(plan.seed)],
        ["--trajectory-start-min-ratio", f"{plan.start[0]:g}"],
        ["--trajectory-start-max-ratio", f"{plan.start[1]:g}"],
        ["--agentic-warmup-grace-period", "1800"],
        ["--failed-request-threshold", f"{plan.max_failed:g}"],
        ["--num-dataset-entries", str(ENTRIES)],
    ]
    if plan.warmup_s > 0:
        rows.append(["--agentic-cache-warmup-duration", f"{plan.warmup_s:g}"])
    if plan.short:
        # Otherwise the warm-up is as long as the longest pause in the traces.
        rows.append(["--burst-phase-starts"])
    if plan.max_context:
        rows.append(["--max-context-length", str(plan.max_context)])
    if plan.slo:
        names = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
        rows.append(["--goodput", " ".join(f"{names[key]}:{value * 1000:g}" for key, value in plan.slo.items())])
    return rows


def _metrics(plan: AgentxPlan) -> list[list[str]]:
    rows = [["--server-metrics-formats", "json", "parquet"]]
    return rows + ([["--server-metrics", *plan.metrics_urls]] if plan.metrics_urls else [])


def child_environment(environ: Mapping[str, str], run_dir: Path, traces: TraceSet) -> dict[str, str]:
    """The harness's environment: what the parent has, less what misleads it, with its files kept inside the run."""
    kept = {k: v for k, v in environ.items() if k not in OFFLINE_TRAPS and not k.startswith(("AIPERF_", "DIX_", "DEEPINFER_"))}
    return kept | special_environment(environ, run_dir, traces)


def special_environment(environ: Mapping[str, str], run_dir: Path, traces: TraceSet) -> dict[str, str]:
    """Only what is set on purpose."""
    home = environ.get("HOME") or str(Path.home())
    named = {
        # Cached data sets are keyed by the tokenizer's name, not its content.
        "AIPERF_DATASET_MMAP_CACHE_ENABLED": "false",
        "AIPERF_DATASET_MMAP_BASE_PATH": str(scratch_dir(run_dir) / "mmap"),
        "AIPERF_DATASET_CONFIGURATION_TIMEOUT": "1800",
        "AIPERF_SERVICE_PROFILE_CONFIGURE_TIMEOUT": "1800",
        "AIPERF_HTTP_TCP_USER_TIMEOUT": "900000",
        "AIPERF_UI_REALTIME_METRICS_ENABLED": "true",
        "AIPERF_HTTP_X_DYNAMO_SESSION_ID_FROM_CORRELATION_ID": "true",
        "HOME": str(scratch_dir(run_dir) / "home"),
        "HF_HOME": environ.get("HF_HOME") or str(Path(home) / ".cache" / "huggingface"),
        "NO_PROXY": ",".join(filter(None, [environ.get("NO_PROXY", ""), "127.0.0.1,localhost"])),
    }
    if not traces.public:
        named["HF_DATASETS_OFFLINE"] = "1"
        if len(traces.traces) < POOL_TRACES:
            named["AIPERF_DATASET_WEKA_PARALLEL_WORKERS"] = "1"
    return named


def launch_line(program: Path, rows: list[list[str]], key: str) -> list[str]:
    """The child's whole argument vector. With a key, a line of Python adds it inside the process."""
    flat = [str(program), *(word for row in rows for word in row)]
    beside = program.with_name("python")
    return [str(beside if beside.exists() else sys.executable), "-c", _WITH_KEY, *flat] if key else flat


def scratch_dir(run_dir: Path) -> Path:
    """Files that are worthless after the run; removed then."""
    return run_dir / "scratch"


def command_text(program: str, rows: list[list[str]], environment: Mapping[str, str], unset: tuple[str, ...] = OFFLINE_TRAPS) -> str:
    """Environment and command as a shell would take them, one flag a line."""
    import shlex

    lines = ["env", *(f"-u {name}" for name in unset), *(f"{key}={shlex.quote(value)}" for key, value in environment.items())]
    lines += [program, *(shlex.join(row) for row in rows)]
    return " \\\n  ".join(lines)
