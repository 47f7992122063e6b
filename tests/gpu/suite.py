"""Everything that a GPU can show, in at most eight minutes: `python -m tests.gpu.suite OUT`.

Tests, golden vectors, kernels, layers, whole engines. Every part is a process with a limit of its own and runs even when one before it
fails. Leaves `OUT/hopper.md`, a page like `docs/hopper.md` of this one run, and the records as JSON lines.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepinfer_cli.opbench.page import page

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 470
PYTEST = ["-m", "pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q", "--tb=short", "-rfE"]
SERVER_MODULES = ("fastapi", "uvicorn", "httptools", "pydantic", "zmq", "msgspec", "xgrammar")
# Seconds in which a part that ran into its limit may say how far it came.
GRACE_S = 15


def parts(out: Path) -> dict[str, tuple[list[str], int]]:
    """Name -> arguments of a Python process, and its limit in seconds. The dearest last: a limit then costs the least."""
    gpu_tests = [
        "tests/engine/test_recorded_gpu.py",
        "tests/engine/test_cuda_graph.py",
        "tests/engine/test_prefix_cache_gpu.py",
        "tests/engine/test_overlap_gpu.py",
    ]
    # Most of their time is spent on a processor, compiling and launching: several processes share the GPU.
    many = ["-n", "8", "--maxfail=12"]
    return {
        "kernels against references": ([*PYTEST, *many, "tests/ops"], 120),
        "gpu tests": ([*PYTEST, "-m", "gpu", *gpu_tests], 60),
        "recorded steps with collectives": ([*PYTEST, "-m", "gpu", "tests/engine/test_recorded_experts_gpu.py"], 60),
        "ranks on one GPU": (["-m", "tests.gpu.shared_gpu", str(out / "shared")], 60),
        "batch invariance": ([*PYTEST, "-n", "3", "-m", "gpu", "tests/engine/test_batch_invariance.py"], 60),
        "golden vectors": (["-m", "tests.gpu.check", str(out), "golden"], 110),
        "where golden vectors part": (["-m", "tests.gpu.trace_rounding"], 30),
        "whole engines": (["-m", "tests.gpu.serve", str(out)], 60),
        "over HTTP": (["-m", "tests.gpu.http_serve", str(out)], 60),
        "first token of a hit": (["-m", "tests.gpu.hit_ttft", str(out)], 80),
        "kernels": (["-m", "tests.gpu.bench", str(out), "kernels"], 90),
        "layers": (["-m", "tests.gpu.bench", str(out), "layers"], 200),
    }


def run(name: str, arguments: list[str], limit_s: float, out: Path) -> dict[str, Any]:
    """One part; what it printed goes to a file, its last line into the report."""
    began = time.monotonic()
    log = out / f"{name.replace(' ', '-')}.log"
    with log.open("w") as file:
        part = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = part.wait(limit_s)
        except subprocess.TimeoutExpired:
            # As from a keyboard: pytest then still says what failed.
            part.send_signal(signal.SIGINT)
            try:
                part.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                part.kill()
                part.wait()
            code = 124
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    detail = "stopped at its limit" if code == 124 else (lines[-1][:160] if lines else "")
    return {"passed": code == 0, "seconds": time.monotonic() - began, "detail": detail}


def records(out: Path) -> list[dict[str, Any]]:
    found = []
    for group in ("kernels", "layers"):
        file = out / f"{group}.jsonl"
        if file.exists():
            found += [json.loads(line) for line in file.read_text().splitlines()]
    return found


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    began, checks = time.monotonic(), {}
    for name, (arguments, limit_s) in parts(out).items():
        if name == "where golden vectors part" and checks["golden vectors"]["passed"]:
            continue
        if name == "over HTTP" and (missing := [module for module in SERVER_MODULES if find_spec(module) is None]):
            checks[name] = {"passed": False, "seconds": 0.0, "detail": f"not run, this machine lacks {', '.join(missing)}"}
            continue
        left = LIMIT_S - (time.monotonic() - began)
        if left < 5:
            checks[name] = {"passed": False, "seconds": 0.0, "detail": "no time was left"}
            continue
        checks[name] = run(name, arguments, min(limit_s, left), out)
        print(name, json.dumps(checks[name]), flush=True)
        (out / "hopper.md").write_text(page(records(out), checks, "Hopper: one H200, one run"))
    for name, check in checks.items():
        print(f"{'ok' if check['passed'] else 'FAILED':7s}{check['seconds']:6.0f} s  {name}: {check['detail']}")
    print(f"{time.monotonic() - began:.0f} s in all, see {out / 'hopper.md'}")
    return 0 if all(check["passed"] for check in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
