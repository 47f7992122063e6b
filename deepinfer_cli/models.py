"""Which directory a model's name means (`tiny`, a local directory, or a hub id), and an engine for it in this process."""

from __future__ import annotations

import re
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli.invocation import Invocation
from deepinfer_cli.settings import MODEL_VARIABLE
from hicache.errors import ConfigError, MachineError

if TYPE_CHECKING:
    from engine.llm import LLM

TINY = "tiny"
STAMP = "functional check, not performance"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(call: Invocation, name: str | None) -> tuple[Path, str]:
    """A model's directory and the name clients see. Without a name: `DEEPINFER_HF_MODEL_DIR`, else `tiny`.

    Raises: ConfigError when nothing of that name exists, MachineError when a download fails.
    """
    name = name or call.settings.engine.model or call.environ.get(MODEL_VARIABLE) or TINY
    if name == TINY:
        return make_ready(call), TINY
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute(), path.absolute().name
    if path.exists():
        raise ConfigError(f"{name} is a file, not a model directory", hint="name the directory that holds config.json")
    if HUB_ID.fullmatch(name) and not name.startswith("."):
        return download(call, name), name.split("/")[1]
    guess = "did you mean tiny? A model is " if get_close_matches(name, [TINY], cutoff=0.5) else ""
    raise ConfigError(f"no model {name!r}", hint=f"{guess}tiny, a directory with config.json, or a hub id such as owner/name")


def make_ready(call: Invocation) -> Path:
    """The embedded model's directory, created in the cache on first use."""
    from engine.models.tiny import ensure_tiny

    with call.ui.progress("tiny", 1.0) as bar:
        return Path(ensure_tiny(call.paths.models, on_progress=lambda phase, share: bar.update(share, phase)))


def download(call: Invocation, name: str) -> Path:
    """A hub snapshot in the usual cache. Raises: MachineError when the hub cannot be reached or knows no such model."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MachineError(
            f"{name} is a hub id, but huggingface_hub is not installed", hint="pip install huggingface_hub, or name a directory"
        ) from None
    call.ui.note(f"downloading {name}", "quiet")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.py", "*.txt", "*.model"]))
    except (OSError, ValueError) as error:
        hint = "check the name and the network, or name a local directory"
        raise MachineError(f"model {name} is neither here nor downloadable: {str(error).splitlines()[0][:120]}", hint=hint) from error


def open_engine(call: Invocation, directory: Path, **more: Any) -> LLM:
    """An engine in this process with the settings of the command. more: keywords of `LLM`. Raises: CheckpointError and others of it."""
    from engine.llm import LLM

    engine = {f.name: getattr(call.settings.engine, f.name) for f in fields(call.settings.engine) if f.name != "model"}
    return LLM(str(directory), **more, **engine)


def is_tiny(model: str) -> bool:
    """Whether numbers of this served model are a functional check only."""
    return model == TINY or model.startswith("tiny-")
