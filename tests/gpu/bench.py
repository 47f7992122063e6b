"""Kernel and layer cases on a GPU machine without the command line's packages: `python -m tests.gpu.bench OUT GROUP [PATTERN ...]`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer_cli.opbench.case import Setting, choose
from deepinfer_cli.opbench.ceilings import measure_ceilings
from deepinfer_cli.opbench.records import run_cases
from deepinfer_cli.opbench.registry import all_cases
from deepinfer_cli.opbench.table import plain_text


def main() -> int:
    out, group, *patterns = Path(sys.argv[1]), *sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (out / f"{group}.jsonl").open("w", encoding="utf-8") as file:

        def keep(record: dict[str, Any]) -> None:
            # Line by line: what was measured before a time limit strikes is kept.
            file.write(json.dumps(record) + "\n")
            file.flush()

        ceilings = measure_ceilings("cuda")
        records = run_cases(choose(all_cases(group), patterns), Setting("cuda"), ceilings, keep)
    print(plain_text(records))
    print(f"{len(records)} cases in {time.monotonic() - began:.0f} s")
    return 1 if any(record.get("level") in ("wrong", "failed") for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
