"""`dix bench engine`: prefill and decode of the engine in this process, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.models import STAMP, is_tiny, resolve_model
from deepinfer_cli.options import command
from deepinfer_cli.outputs import check_output, write_text
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from engine.engine import Engine

NULL = "null"
NULL_STAMP = "no model: the engine's own cost only"
NULL_SEQS = 256


def _engine(
    call: Invocation,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="tiny, null, a directory, or a hub id.  [default: tiny]")
    ] = None,
    prefill: Annotated[str, typer.Option("--prefill", metavar="N,N,…", help="Prompt lengths in tokens; empty for none.")] = "128,512,2048",
    decode: Annotated[str, typer.Option("--decode", metavar="N,N,…", help="Sequences in a decode step; empty for none.")] = "1,4,16",
    context: Annotated[str, typer.Option("--context", metavar="N,N,…", help="Tokens of every decoding sequence.")] = "256",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Measured decode steps.")] = 32,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Measured prompts of each length.")] = 3,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one page with plots.")] = None,
) -> int:
    """Measure prefill and decode of the engine without a server.

      dix bench engine
      dix bench engine --model null --decode 1,64,256       the engine's own cost
      dix bench engine --prefill 1024,16384 --decode 1,8,64 --context 1024,8192 --html engine.html

    Settings of the engine apply (--set engine.spec=false). The points are kept in the runs directory as JSON Lines.
    """
    from deepinfer_cli.bench.engine_sweep import Bench, page, run_sweep
    from deepinfer_cli.bench.runs import new_run

    prompts, batches, contexts = (
        parse_sizes(text, flag) for text, flag in ((prefill, "--prefill"), (decode, "--decode"), (context, "--context"))
    )
    if not prompts and not (batches and contexts):
        raise ConfigError("nothing is measured", hint="--prefill 512, or --decode 1,8 --context 256")
    if html is not None:
        check_output(html)
    engine, name = open_engine(call, model)
    stamp = NULL_STAMP if name == NULL else STAMP if is_tiny(name) else None
    try:
        points = run_sweep(Bench(engine), prompts, batches, contexts, steps, repeats)
    finally:
        engine.close()
    folder = new_run(call.paths.runs, f"engine-{name}")
    lines = [{**point.plain(), "model": name, "note": stamp} for point in points]
    (folder / "points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if html is not None:
        write_text(html, page(points, f"dix bench engine · {name}", stamp))
    show(call, points, lines, name, stamp)
    call.ui.note(f"kept in {folder}" + (f" · wrote {html}" if html is not None else ""), "quiet")
    return ExitCode.OK


def parse_sizes(text: str, flag: str) -> list[int]:
    try:
        sizes = [int(item.replace("_", "")) for item in text.split(",") if item.strip()]
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}", hint="for example 128,512,2048") from None
    if any(size < 1 for size in sizes):
        raise ConfigError(f"{flag} is {text!r}", hint="sizes are at least 1")
    return sizes


def open_engine(call: Invocation, model: str | None) -> tuple[Engine, str]:
    """The engine of a model, or one around a model that does nothing. The host cache stays off."""
    import dataclasses

    from engine.process_env import prepare_process

    prepare_process(call.settings.engine.num_threads)
    from engine.engine import Engine
    from hicache.config import HiCacheConfig

    off = HiCacheConfig(size_gb=0)
    if model == NULL:
        from deepinfer_cli.bench.null_model import NullRunner

        seqs = call.settings.engine.max_num_seqs
        runner: Any = NullRunner(NULL_SEQS if isinstance(seqs, str) else seqs)
        return Engine(dataclasses.replace(call.settings.engine, spec=False), off, runner=runner), NULL
    directory, name = resolve_model(call, model)
    config = dataclasses.replace(call.settings.engine, model=str(directory))
    with call.ui.progress("loading", 1.0) as bar:
        engine = Engine(config, off, on_progress=lambda stage, share: bar.update(share, stage))
        bar.update(1.0, "compiled step")
        path = settled_path(engine.runner)
    call.ui.note(f"steps run {path}", "quiet")
    return engine, name


def settled_path(runner: Any) -> str:
    """How steps run for good. A build that is under way is waited for: half of the points would be of one path, half of the other."""
    runner.native.wait()
    return str(runner.native.status if runner.path == "eager" else runner.path)


def show(call: Invocation, points: list[Any], lines: list[dict[str, Any]], name: str, stamp: str | None) -> None:
    from deepinfer_cli.bench.engine_sweep import decode_grid, prefill_grid
    from deepinfer_cli.report.tables import print_grid

    if call.json:
        call.ui.document("dix.engine/1", {"model": name, "note": stamp, "points": lines})
        return
    for grid in (prefill_grid(points), decode_grid(points)):
        if grid.rows:
            print_grid(call.ui, grid)
    if stamp:
        call.ui.print(stamp, "warning")


engine = command(_engine, sections=("engine",), leave_out=("engine.model", "engine.dp"))
