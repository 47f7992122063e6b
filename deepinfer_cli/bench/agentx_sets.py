"""The trace sets that `--traces` names: generated ones, made on first use and kept in the cache, a directory, or a public corpus."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer_cli.bench.agentx_generate import SHAPES, make_trace, write_trace
from deepinfer_cli.bench.agentx_traces import TraceSet, read_traces
from hicache.errors import ConfigError

GENERATOR_VERSION = 1  # part of the directory name: a changed generator never meets old files


@dataclass(frozen=True, slots=True)
class Recipe:
    """A generated set. One session means the five shapes' own names; more are numbered so that no two are alike."""

    sessions: int
    scale: float
    time_scale: float = 1.0


GENERATED = {"bundled": Recipe(len(SHAPES), 1), "small": Recipe(32, 8), "long": Recipe(32, 24)}
# Pinned data sets, by the harness's own names; only these can be a valid submission.
PUBLIC = {"public": "semianalysis_cc_traces_weka_062126", "public-256k": "semianalysis_cc_traces_weka_062126_256k"}
PUBLIC_CACHE = "datasets--*cc-traces-weka*"


def default_set(tiny: bool, environ: Mapping[str, str]) -> tuple[str, str]:
    """The set's name and the reason for it."""
    if tiny:
        return "bundled", "the served model is the embedded one"
    if any(_hub_cache(environ).glob(PUBLIC_CACHE)):
        return "public", "the public corpus is in the local hub cache"
    return "small", "the public corpus is not in the local hub cache"


def _hub_cache(environ: Mapping[str, str]) -> Path:
    home = environ.get("HF_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".cache/huggingface")
    return Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def open_traces(spec: str, cache: Path) -> TraceSet:
    """A named set or a directory. Raises: ConfigError for a name nobody knows and for files that are not traces."""
    if spec in GENERATED:
        return read_traces(spec, ensure_generated(spec, cache))
    public = PUBLIC.get(spec, spec if spec in PUBLIC.values() else "")
    if public:
        return TraceSet(spec, None, public)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return read_traces(folder.absolute().name, folder)
    raise ConfigError(f"no trace set {spec!r}", hint=f"{', '.join([*GENERATED, *PUBLIC])}, or a directory of trace files")


def ensure_generated(name: str, cache: Path) -> Path:
    """The directory of a generated set; made on first use and put in place by one rename, so that two starts cannot mix."""
    folder = cache / "traces" / f"{name}-{GENERATOR_VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    generate(GENERATED[name], made)
    made.chmod(0o755)
    try:
        os.rename(made, folder)
    except OSError:
        # Another start was faster; its files are the same bytes.
        shutil.rmtree(made)
        if not folder.is_dir():
            raise
    return folder


def generate(recipe: Recipe, folder: Path, *, seed: int = 7) -> None:
    """Write the recipe's sessions into a directory."""
    shapes = list(SHAPES)
    for index in range(recipe.sessions):
        shape = shapes[index % len(shapes)]
        name = f"syn-{shape}" if recipe.sessions == len(shapes) else f"syn-{index:03d}-{shape}"
        write_trace(folder, make_trace(shape, name, seed=seed, scale=recipe.scale, time_scale=recipe.time_scale))
