"""What every command receives: its settings, where files are, and how to print."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli.paths import Paths, paths_from
from deepinfer_cli.settings import Resolved, Settings, find_files, resolve
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_cli.ui import Ui


@dataclass(frozen=True, slots=True)
class Invocation:
    """One run of one command."""

    resolved: Resolved
    settings: Settings
    paths: Paths
    ui: Ui
    environ: Mapping[str, str] = field(repr=False)

    @property
    def json(self) -> bool:
        return self.ui.options.json


@dataclass(frozen=True, slots=True)
class Shared:
    """The options that every command takes."""

    config: Path | None = None
    set: tuple[str, ...] = ()
    json: bool = False
    quiet: bool = False
    verbose: int = 0
    no_color: bool = False
    no_progress: bool = False


def prepare(shared: Shared, flags: Mapping[str, Any], defaults: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Invocation:
    """Read all sources of settings and build the consoles.

    Raises: ConfigError for anything unknown or out of range, before the command does any work.
    """
    from deepinfer_cli.ui import Ui, UiOptions

    environ = os.environ if environ is None else environ
    paths = paths_from(environ)
    files = find_files(shared.config, Path.cwd(), paths.user_config)
    resolved = settle_truncation(resolve(flags={**_sets(shared.set), **flags}, environ=environ, files=files, defaults=defaults))
    settings = resolved.settings()
    options = UiOptions(
        json=shared.json,
        quiet=shared.quiet,
        verbose=shared.verbose,
        color=False if shared.no_color or environ.get("NO_COLOR") else _tri(settings.ui.color),
        progress=not shared.no_progress,
        unicode=_tri(settings.ui.unicode),
    )
    ui = Ui(options, environ)
    for warning in resolved.warnings:
        ui.warn(warning)
    return Invocation(resolved, settings, paths, ui, environ)


def settle_truncation(resolved: Resolved) -> Resolved:
    """`yoco_keep_tokens` 0 means truncation off, unless the mode itself was chosen; a chosen keep switches the mode on."""
    from deepinfer_cli.settings import Value

    keep, mode = resolved.values["engine.yoco_keep_tokens"], resolved.values["engine.yoco_mode"]
    if resolved.given("engine.yoco_mode"):
        return resolved
    if keep.value == 0 and mode.value != "off":
        resolved.values["engine.yoco_mode"] = Value("off", keep.source)
    elif keep.value > 0 and mode.value == "off":
        resolved.values["engine.yoco_mode"] = Value("compact", keep.source)
    return resolved


def _sets(pairs: tuple[str, ...]) -> dict[str, str]:
    out = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or "." not in key:
            raise ConfigError(f"--set {pair!r} is not section.key=value", hint="for example --set engine.max_num_seqs=64")
        out[key.strip()] = value
    return out


def _tri(value: bool | str) -> bool | None:
    return value if isinstance(value, bool) else None
