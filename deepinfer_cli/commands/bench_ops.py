"""`dix bench kernels` and `dix bench layers`: operations and whole layers of the released shapes against this machine's ceilings."""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any

import typer

from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import command
from engine.errors import MachineError
from hicache.errors import ConfigError

Only = Annotated[list[str] | None, typer.Argument(metavar="CASE", help="Cases whose name contains this; all without any.")]
Device = Annotated[str, typer.Option("--device", metavar="auto|cuda|cpu", help="cpu: small shapes, a functional check.")]
Listing = Annotated[bool, typer.Option("--list", help="List the cases and what is asked of them; measure nothing.")]


def _kernels(call: Invocation, only: Only = None, device: Device = "auto", listing: Listing = False) -> int:
    """Measure single operations against the ceilings of this machine.

      dix bench kernels                         every operation at the released shapes, on a GPU
      dix bench kernels k.experts k.attn        some of them
      dix bench kernels --device cpu            small shapes: does every operation run and agree with its reference?

    Ceilings (copy, matrix product, pinned copies) are measured first, in the same process. A * marks a time that includes launches.
    Exit code 1 when a result is wrong or an operation failed.
    Next: dix bench layers
    """
    return carry_out(call, "kernels", only or [], device, listing)


def _layers(call: Invocation, only: Only = None, device: Device = "auto", listing: Listing = False) -> int:
    """Measure whole layers of the released shapes, with random weights, against their byte floor.

      dix bench layers                          decode at batch 1, 8, 64, 256 and prefill, on one GPU
      dix bench layers l.decode batch=64        some of them
      dix bench layers --device cpu             small shapes: a functional check

    Exit code 1 when a result is wrong or a layer failed.
    Next: dix bench engine
    """
    return carry_out(call, "layers", only or [], device, listing)


def carry_out(call: Invocation, group: str, only: list[str], device: str, listing: bool) -> int:
    from deepinfer_cli.opbench.case import Setting, choose
    from deepinfer_cli.opbench.registry import all_cases

    cases = choose(all_cases(group), only)
    if listing:
        return show_list(call, cases)
    from deepinfer_cli.bench.runs import new_run
    from deepinfer_cli.opbench.ceilings import measure_ceilings
    from deepinfer_cli.opbench.records import FAILED, WRONG, run_cases
    from deepinfer_cli.opbench.table import HEADS, ceilings_line, rows

    setting = Setting(device := resolve_device(device), small=device == "cpu")
    with call.ui.progress(group, len(cases) + 1) as bar:
        ceilings = measure_ceilings(device, setting.small)
        done = itertools.count(1)
        records = run_cases(cases, setting, ceilings, lambda record: bar.update(next(done), record["id"]))
    folder = new_run(call.paths.runs, group)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    if call.json:
        call.ui.document("dix.ops/1", {"group": group, "records": records})
    else:
        from deepinfer_cli.ui import Column

        call.ui.print(ceilings_line(records[0]))
        call.ui.table([Column(head, right=i > 0) for i, head in enumerate(HEADS)], rows(records))
        if "note" in records[0]:
            call.ui.print(records[0]["note"], "warning")
    call.ui.note(f"kept in {folder}", "quiet")
    return ExitCode.NO if any(record.get("level") in (WRONG, FAILED) for record in records) else ExitCode.OK


def resolve_device(device: str) -> str:
    """Raises: MachineError when a GPU is needed and there is none."""
    if device not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"--device is {device!r}", hint="one of auto, cuda, cpu")
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        raise MachineError(
            "torch sees no GPU, and the released shapes need one", hint="--device cpu checks the same operations at small shapes"
        )
    return "cpu" if device == "cpu" else "cuda"


def show_list(call: Invocation, cases: list[Any]) -> int:
    if call.json:
        body = [{"id": c.id, "params": dict(c.params), "of": c.target.of, "must": c.target.must, "aim": c.target.aim} for c in cases]
        call.ui.document("dix.cases/1", {"cases": body})
        return ExitCode.OK
    from deepinfer_cli.ui import Column

    columns = [Column("case", right=False, role="accent"), Column("of", right=False), Column("must"), Column("aim")]
    call.ui.table(columns, [(c.name, c.target.of, c.target.must, c.target.aim) for c in cases])
    return ExitCode.OK


kernels = command(_kernels)
layers = command(_layers)
