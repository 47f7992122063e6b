"""One run on a GPU machine: `python -m tests.gpu.check OUT_DIR [PART ...]` builds and checks what needs a GPU.

Needs torch, safetensors, tokenizers and pytest only. Every part runs even when an earlier one fails; the exit status
tells whether all passed. Golden vectors are small steps, whose time is the host's: their modes run in processes side by side.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "model"


def golden_vectors(mode: str) -> dict[str, Any]:
    """The reference vectors through the paged engine on the GPU, whole prompts and chunks of 64."""
    from engine.verify import VerifyMode, verify_dir

    report = verify_dir(GOLDEN, [VerifyMode(mode)], chunk_sizes=(64, 0))
    errors = [p.max_error for run in report.runs for p in run.prompts]
    problems = [f"{p.prompt_id}: {text}" for run in report.runs for p in run.prompts for text in p.problems]
    return {"passed": report.passed, "max_error": max(errors), "problems": sorted(set(problems))}


def native_copies(out: Path) -> dict[str, Any]:
    """The tests marked `gpu`: page copies, ordering on the stream, prefix cache with device blocks."""
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-m", "gpu", "-q"]
    done = subprocess.run([*command, "-rA", "tests/csrc", "tests/engine"], cwd=ROOT, capture_output=True, text=True, check=False)
    (out / "pytest.log").write_text(done.stdout + done.stderr)
    return {"passed": done.returncode == 0, "closing": done.stdout.strip().splitlines()[-1:]}


def timed(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        result = check()
    except Exception:  # the other parts still run; the report carries the whole trace
        result = {"passed": False, "error": traceback.format_exc()}
    return result | {"seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    parts = {f"golden {mode}": partial(golden_vectors, mode) for mode in ("fp32", "fp32-qdq", "bf16", "fp8")}
    parts |= {"gpu tests": partial(native_copies, out)}
    wanted = sys.argv[2:]
    parts = {name: check for name, check in parts.items() if not wanted or any(part in name for part in wanted)}
    results: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(max(1, len(parts)), multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(timed, check): name for name, check in parts.items()}
        for done in as_completed(running):
            name, result = running[done], done.result()
            results[name] = result
            print(name, json.dumps(result, default=str), flush=True)
            (out / "results.json").write_text(json.dumps(results, indent=1, default=str))
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
