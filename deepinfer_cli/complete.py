"""Names that the shell completes: servers, runs and recipes, read from directories without loading anything."""

from __future__ import annotations

import os

from deepinfer_cli.paths import paths_from


def servers(incomplete: str) -> list[str]:
    folder = paths_from(os.environ).state / "servers"
    return sorted(p.name for p in folder.glob("*") if p.name.startswith(incomplete))


def runs(incomplete: str) -> list[str]:
    """`last` and every run, the newest first."""
    names = sorted((p.name for p in paths_from(os.environ).runs.glob("*")), reverse=True)
    return [name for name in ["last", *names] if name.startswith(incomplete)]


def recipes(incomplete: str) -> list[str]:
    from deepinfer_cli.bench.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    return [name for name in ("tiny",) if name.startswith(incomplete)]
