"""One run on a GPU machine: `python -m tests.gpu.check OUT_DIR [PART ...]` builds and checks what needs a GPU.

Needs torch, safetensors, tokenizers and pytest only. Every part runs even when an earlier one fails; the exit status
tells whether all passed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "model"


def golden_vectors(mode: str) -> Callable[[], dict[str, Any]]:
    """The reference vectors through the paged engine on the GPU, whole prompts and chunks of 64."""

    def check() -> dict[str, Any]:
        from engine.verify import VerifyMode, verify_dir

        report = verify_dir(GOLDEN, [VerifyMode(mode)], chunk_sizes=(64, 0))
        errors = [p.max_error for run in report.runs for p in run.prompts]
        problems = [f"{p.prompt_id}: {text}" for run in report.runs for p in run.prompts for text in p.problems]
        return {"passed": report.passed, "max_error": max(errors), "problems": sorted(set(problems))}

    return check


def native_copies(out: Path) -> Callable[[], dict[str, Any]]:
    """The tests marked `gpu`: page copies, ordering on the stream, prefix cache with device blocks."""

    def check() -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-m", "gpu", "-q"]
        done = subprocess.run([*command, "-rA", "tests/csrc", "tests/engine"], cwd=ROOT, capture_output=True, text=True, check=False)
        (out / "pytest.log").write_text(done.stdout + done.stderr)
        return {"passed": done.returncode == 0, "closing": done.stdout.strip().splitlines()[-1:]}

    return check


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    parts = {"gpu tests": native_copies(out)}
    parts |= {f"golden {mode}": golden_vectors(mode) for mode in ("fp32", "fp32-qdq", "bf16", "fp8")}
    wanted = sys.argv[2:]
    parts = {name: check for name, check in parts.items() if not wanted or any(part in name for part in wanted)}
    results: dict[str, dict[str, Any]] = {}
    for name, check in parts.items():
        began = time.monotonic()
        try:
            results[name] = check()
        except Exception:  # the next part still runs; the report carries the whole trace
            results[name] = {"passed": False, "error": traceback.format_exc()}
        results[name]["seconds"] = round(time.monotonic() - began, 1)
        print(name, json.dumps(results[name], default=str), flush=True)
        (out / "results.json").write_text(json.dumps(results, indent=1, default=str))
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
