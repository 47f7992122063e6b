"""`dix doctor`: what works here, what is slower than it could be, and what will not work."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_cli.doctor import environment_snapshot, examine
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import command
from deepinfer_cli.ui import Column


def _doctor(
    call: Invocation, ops: Annotated[bool, typer.Option("--ops", help="Also list which kernel each operation uses.")] = False
) -> int:
    """Check this machine and this installation.

      dix doctor
      dix doctor --json            what a bug report needs

    Exit code 1 when something will not work.
    Next: dix serve tiny
    """
    findings = examine(call.paths, call.settings.engine.build_dir)
    table = kernel_table(call.settings.engine.ops, call.settings.engine.build_dir) if ops else []
    failed = any(f.verdict == "fail" for f in findings)
    if call.json:
        body = {"findings": [dataclasses.asdict(f) for f in findings], "environment": environment_snapshot()}
        heads = ("op", "backend", "why", "compiled")
        call.ui.document("dix.doctor/1", {**body, "ops": [dict(zip(heads, row, strict=True)) for row in table] if ops else None})
        return ExitCode.NO if failed else ExitCode.OK
    columns = [Column("", right=False), Column("", right=False), Column("", right=False, role="accent")]
    call.ui.table(columns, [(f.verdict, f.text, f"→ {f.fix}" if f.fix else "") for f in findings])
    if ops:
        call.ui.print()
        columns = [Column("op", right=False, role="accent"), *(Column(head, right=False) for head in ("backend", "why", "compiled"))]
        call.ui.table(columns, table)
    return ExitCode.NO if failed else ExitCode.OK


def kernel_table(choice: str, build_dir: str) -> list[tuple[str, str, str, str]]:
    """Operation, the implementation that would run here, why it is that one, and whether it is compiled already."""
    import torch

    # The models name every operation they use; importing them registers those.
    importlib.import_module("engine.models.draft")
    from engine.ops.registry import explain

    found = explain(choice, "cuda" if torch.cuda.is_available() else "cpu")
    compiled = {"reference": "not needed", "triton": "at first use"}
    if any(entry.backend == "cuda" for entry in found):
        from engine.ops.cuda.library import is_built

        ready = is_built(torch.cuda.current_device(), Path(build_dir) if build_dir else None)
        compiled["cuda"] = "yes" if ready else "at first use, about 30 s"
    return [(entry.op, entry.backend, entry.why, compiled[entry.backend]) for entry in found]


doctor = command(_doctor)
