"""Where dix keeps files: configuration, state, cache and sockets, after the XDG rules; `DIX_HOME` moves all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Paths:
    """The four roots. Nothing is created here."""

    config: Path
    state: Path
    cache: Path
    runtime: Path

    @property
    def user_config(self) -> Path:
        return self.config / "config.toml"

    @property
    def runs(self) -> Path:
        return self.state / "runs"

    @property
    def models(self) -> Path:
        return self.cache / "models"

    @property
    def crashes(self) -> Path:
        return self.state / "crashes"


def paths_from(environ: Mapping[str, str]) -> Paths:
    """The roots for this environment. An empty variable counts as unset, as the XDG rules say."""
    if home := environ.get("DIX_HOME"):
        root = Path(home).expanduser().absolute()
        return Paths(root / "config", root / "state", root / "cache", root / "run")
    user = Path(environ.get("HOME") or Path.home())
    config = Path(environ.get("XDG_CONFIG_HOME") or user / ".config")
    state = Path(environ.get("XDG_STATE_HOME") or user / ".local/state")
    cache = Path(environ.get("XDG_CACHE_HOME") or user / ".cache")
    runtime = environ.get("XDG_RUNTIME_DIR")
    # Without a session directory the sockets live beside the state, which only the user can enter.
    return Paths(config / "dix", state / "dix", cache / "dix", Path(runtime) / "dix" if runtime else state / "dix" / "run")
