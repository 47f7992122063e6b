"""Where the cache's native code is built and kept, for processes that load torch and those that do not."""

from __future__ import annotations

from pathlib import Path

from hicache.config import HiCacheConfig


def build_directory(config: HiCacheConfig) -> Path:
    """`hicache.build_dir`, or the user's cache directory."""
    return Path(config.build_dir) if config.build_dir else Path.home() / ".cache" / "dix" / "native"
