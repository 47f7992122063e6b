"""`dix model`: make the embedded model, look into a model directory, verify it against reference vectors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_cli.commands.serve import SERVER_DEFAULTS
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.lazy import Lazy
from deepinfer_cli.options import command
from deepinfer_cli.outputs import named
from deepinfer_cli.servers import connect
from deepinfer_cli.ui import Column
from deepinfer_cli.units import show_bytes
from hicache.errors import ConfigError

MODES = ("fp32", "fp32-qdq", "bf16", "fp8")
SHOWN = (
    "architectures", "model_type", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "n_routed_experts",
    "num_experts_per_tok", "sliding_window", "max_position_embeddings",
)  # fmt: skip


def _make_tiny(
    call: Invocation,
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="Where to write.  [default: the cache directory]")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the random weights.")] = 0,
) -> int:
    """Write the embedded model as an ordinary checkpoint directory.

      dix model make-tiny
      dix model make-tiny ./tiny --seed 1

    Next: dix serve ./tiny
    """
    from engine.models import tiny

    if directory is None:
        made = Path(tiny.ensure_tiny(call.paths.models))
    else:
        with named(directory):
            if directory.exists() and any(directory.iterdir()):
                raise ConfigError(f"{directory} is not empty", hint="name a new directory")
            tiny.make_tiny(directory, seed=seed)
        made = directory
    if call.json:
        call.ui.document("dix.model/1", {"path": str(made)})
    else:
        call.ui.print(str(made))
    return ExitCode.OK


def _shapes(
    call: Invocation,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; what lies there stays.")],
    layers: Annotated[
        str, typer.Option("--layers", metavar="LIST", help="Released layers, such as 1,2,20,21.  [default: all 40]", show_default=False)
    ] = "",
    stages: Annotated[int, typer.Option("--stages", metavar="N", min=0, max=3, help="Draft stages.")] = 3,
    engram_rows: Annotated[
        int, typer.Option("--engram-rows", metavar="N", min=2, help="Rows of an n-gram column; 16 million in the release.")
    ] = 1_000_000,
) -> int:
    """Make a directory that can be served without weights: configuration, tokenizer and chat format.

      dix model shapes ./shapes                          the released configuration
      dix model shapes ./shapes --layers 1,2,20,21       few of its layers, for one GPU
      dix model shapes ./mine                            what lacks beside a config.json of yours

    A tokenizer and a chat format that are missing are those of the embedded model.
    Next: dix serve ./shapes --set engine.load_format=dummy
    """
    from engine.models.released import excerpt, write_excerpt
    from engine.models.tiny import write_text_format

    with named(directory):
        has_config = (directory / "config.json").exists()
        if has_config and layers:
            raise ConfigError(f"{directory / 'config.json'} is there, and --layers would make another", hint="name a new directory")
        if not has_config:
            write_excerpt(directory, excerpt(_layer_numbers(layers), stages=stages, engram_rows=engram_rows))
        written = [*([] if has_config else ["config.json"]), *write_text_format(directory)]
    if call.json:
        call.ui.document("dix.model/1", {"path": str(directory), "written": written})
    else:
        call.ui.print(f"{directory}: wrote {', '.join(written) or 'nothing, all is there'}")
        call.ui.note(f"next: dix serve {directory} --set engine.load_format=dummy", "quiet")
    return ExitCode.OK


def _layer_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else list(range(40))
    except ValueError:
        raise ConfigError(f"--layers is {text!r}", hint="numbers separated by commas, for example 1,2,20,21") from None


def _info(
    call: Invocation, model: Annotated[str | None, typer.Argument(metavar="MODEL", help="tiny, a directory, or a hub id.")] = None
) -> int:
    """Show what a model directory holds.

      dix model info tiny

    Next: dix serve
    """
    from deepinfer_cli.models import resolve_model

    directory, name = resolve_model(call, model)
    facts = describe(directory)
    if call.json:
        call.ui.document("dix.model/1", {"name": name, "path": str(directory), **facts})
        return ExitCode.OK
    rows = [("name", name), ("path", str(directory)), *((key, _text(key, value)) for key, value in facts.items())]
    call.ui.table([Column("", right=False, role="accent"), Column("", right=False)], rows)
    return ExitCode.OK


def describe(directory: Path) -> dict[str, Any]:
    """Facts from the headers alone; no weight is read. Raises: CheckpointError for files that are missing or damaged."""
    from engine.models.config import read_config_json
    from engine.safetensors_header import read_header

    config = read_config_json(directory)
    text = config.get("text_config")
    flat = {**config, **(text if isinstance(text, dict) else {})}
    facts: dict[str, Any] = {key: flat[key] for key in SHOWN if key in flat}
    dtypes: dict[str, int] = {}
    parameters = size = 0
    files = sorted(directory.glob("*.safetensors"))
    for file in files:
        for tensor in read_header(file).values():
            parameters += math.prod(tensor.shape)
            dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
        size += file.stat().st_size
    missing = [n for n in ("tokenizer.json", "encoding/encoding.py") if not (directory / n).exists()]
    return {**facts, "stored_elements": parameters, "size_bytes": size, "files": len(files), "dtypes": dtypes, "missing": missing}


def _text(key: str, value: Any) -> str:
    if key == "size_bytes":
        return show_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value > 9999 else str(value)


def _verify(
    call: Invocation,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds checkpoints, prompts.json and vectors-*.safetensors.")],
    mode: Annotated[
        str | None, typer.Option("--mode", metavar="|".join(MODES), help="Arithmetic to check.  [default: every mode with vectors]")
    ] = None,
    chunk: Annotated[
        list[int] | None,
        typer.Option("--chunk", metavar="N", help="Tokens per prefill step, 0 for whole prompts.  [default: 16, 64 and 0]"),
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", metavar="N", min=1, help="Tokens per cache block.")] = 16,
) -> int:
    """Check the serving engine against reference logits: chunked prefill and decode from the paged cache.

      dix model verify tests/golden/model                                  a minute or two
      dix model verify tests/golden/model --mode fp32-qdq --chunk 64
      dix model verify tests/golden/model -v                               every prompt in a row of its own

    Exit code 1 when a prompt is outside the stated tolerances.
    Next: dix serve
    """
    if mode is not None and mode not in MODES:
        raise ConfigError(f"--mode is {mode!r}", hint=f"one of: {', '.join(MODES)}")
    if not directory.is_dir():
        vectors = "dix model verify tests/golden/model"
        if str(directory) == "tiny":
            raise ConfigError("the embedded model has no reference vectors", hint=f"dix model eval tiny, or for the engine {vectors}")
        raise ConfigError(f"{directory} is not a directory", hint=vectors)
    if any(size < 0 for size in chunk or ()):
        raise ConfigError(f"--chunk is {min(chunk or ())}", hint="0 for whole prompts, or a number of tokens")
    from deepinfer_cli import verification

    report = verification.verify(call, directory, mode, chunk or [], block_size)
    verification.show(call, report)
    return ExitCode.OK if report.passed else ExitCode.NO


def _eval(
    call: Invocation,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="tiny, or a copy of it trained anew.")] = None,
    http: Annotated[bool, typer.Option("--http", help="Ask a running server, every prompt with and without its prefix cache.")] = False,
    port: Annotated[
        int | None, typer.Option("--port", metavar="P", help="With --http: port on this machine.  [default: the running server's]")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="With --http: a server elsewhere.")] = None,
) -> int:
    """Score the embedded model on prompts that its training never saw.

      dix model eval tiny
      dix model eval ./tiny --json
      dix model eval tiny --http --port 8901

    Greedy, through the serving engine. The controls ask the same questions behind another conversation: only a model that
    does not read its context scores there. With --http the server's grammar shapes the JSON answers; drafts and plain text are
    scored in this process only. Exit code 1 when a score is below its floor or the cache changes an answer.
    Next: dix chat tiny
    """
    from deepinfer_cli import scoring
    from deepinfer_cli.models import resolve_model

    if not http and (port is not None or url is not None):
        raise ConfigError("--port and --url name a server, but nothing was said to be asked of one", hint="add --http")
    if http:
        api = connect(call, port, url)
        evaluation, proof = scoring.score_server(call, api)
        scoring.show(call, api.model(), evaluation, proof)
        return ExitCode.OK if evaluation.passed and proof.different == 0 else ExitCode.NO
    directory, name = resolve_model(call, model)
    evaluation = scoring.score(call, directory)
    scoring.show(call, name, evaluation)
    return ExitCode.OK if evaluation.passed else ExitCode.NO


make_tiny = command(_make_tiny)
shapes = command(_shapes)
info = command(_info)
verify = command(_verify)
evaluate = command(_eval, sections=("engine",), defaults=SERVER_DEFAULTS, leave_out=("engine.model", "engine.dp"))
HERE = "deepinfer_cli.commands.model"
TABLE = {
    "make-tiny": Lazy(f"{HERE}:make_tiny", "Write the embedded model as a checkpoint."),
    "shapes": Lazy(f"{HERE}:shapes", "Make a directory that is served without weights."),
    "info": Lazy(f"{HERE}:info", "Show what a model directory holds."),
    "eval": Lazy(f"{HERE}:evaluate", "Score the embedded model on held-out prompts."),
    "verify": Lazy(f"{HERE}:verify", "Check the engine against reference logits."),
}
