"""Stands in for the load harness where a test is about the child, not about the load: `HARNESS profile … --output-artifact-dir DIR …`.

It prints the phase lines, writes the golden sample's artifacts, and ends as the mode says (a file `mode` beside this run's scratch).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[2] / "golden" / "agentx" / "sample-run"


def partial(output: Path) -> None:
    document = json.loads((SAMPLE / "profile_export_aiperf.json").read_bytes())
    document |= {"was_cancelled": True, "is_complete": False, "incomplete_reason": "run_cancelled"}
    (output / "profile_export_aiperf.json").write_text(json.dumps(document))


def main() -> int:
    output = Path(sys.argv[sys.argv.index("--output-artifact-dir") + 1])
    mode = os.environ.get("FAKE_HARNESS", "good")
    output.mkdir(parents=True)
    if mode == "crash":
        print("10:00:00.000 ERROR    tokenizer not loadable (x.py:1)", flush=True)
        return 1
    lines = (SAMPLE / "profile_export.jsonl").read_text().splitlines(keepends=True)
    print("Phase agentic.warmup (warmup) started (x)", "Phase profiling (profiling) started | (x)", sep="\n", flush=True)
    with (output / "profile_export.jsonl").open("w") as file:
        file.writelines(lines[:40])
        file.flush()
        if mode in ("wait", "stubborn"):
            helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            (output / "helper.pid").write_text(str(helper.pid))
            if mode == "stubborn":
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (output / "ready").touch()
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                partial(output)
                return 0
        file.writelines(lines[40:])
    print("Phase profiling (profiling) complete | completed=75, cancelled=0, errors=2 | sessions: x", flush=True)
    for name in ("profile_export_aiperf.json", "server_metrics_export.json"):
        shutil.copyfile(SAMPLE / name, output / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
