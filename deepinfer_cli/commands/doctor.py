"""`dix doctor`: what works here, what is slower than it could be, and what will not work."""

from __future__ import annotations

import dataclasses
import importlib
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
    table = kernel_table(call.settings.engine.ops) if ops else []
    failed = any(f.verdict == "fail" for f in findings)
    if call.json:
        body = {"findings": [dataclasses.asdict(f) for f in findings], "environment": environment_snapshot()}
        call.ui.document("dix.doctor/1", {**body, "ops": [{"op": op, "backend": backend} for op, backend in table] if ops else None})
        return ExitCode.NO if failed else ExitCode.OK
    columns = [Column("", right=False), Column("", right=False), Column("", right=False, role="accent")]
    call.ui.table(columns, [(f.verdict, f.text, f"→ {f.fix}" if f.fix else "") for f in findings])
    if ops:
        call.ui.print()
        call.ui.table([Column("op", right=False, role="accent"), Column("backend", right=False)], table)
    return ExitCode.NO if failed else ExitCode.OK


def kernel_table(choice: str) -> list[tuple[str, str]]:
    """Operation -> the implementation that would run here."""
    import torch

    # The model names every operation it uses; importing it registers them.
    importlib.import_module("engine.models.deepseek_v41")
    from engine.ops.registry import select

    return sorted(select(choice, "cuda" if torch.cuda.is_available() else "cpu").items())


doctor = command(_doctor)
