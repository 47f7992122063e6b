"""Shared-memory files of the servers' prefix caches: kept while their server may return, removed when it will not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from hicache.segment import read_origin
from server.launch import SEGMENT_PREFIX, SHARED_MEMORY, disk_mark, secret_path, segment_name
from server.state import is_running, read_state

KEPT_NAME = "cache.kept"
log = logging.getLogger("supervisor")


def segments(server_dir: Path, memory: Path = SHARED_MEMORY) -> Iterator[Path]:
    """The segments of one server."""
    return memory.glob(f"{segment_name(str(server_dir))}-r*")


def remove_cache(server_dir: Path, memory: Path = SHARED_MEMORY) -> int:
    """Remove a server's segments and, unless pages on disk need it, the secret that their keys were made with. Returns how many segments
    there were.
    """
    found = list(segments(server_dir, memory))
    for path in found:
        path.unlink(missing_ok=True)
    if not disk_mark(server_dir).exists():
        secret_path(server_dir).unlink(missing_ok=True)
    (server_dir / KEPT_NAME).unlink(missing_ok=True)
    return len(found)


def keep_cache(server_dir: Path) -> None:
    """The server stops but its segments wait for its next start."""
    (server_dir / KEPT_NAME).touch(mode=0o600)


def remove_orphans(memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove segments of this user whose server neither runs nor asked to keep them. Files of others are left alone."""
    removed = []
    for path in memory.glob(f"{SEGMENT_PREFIX}*-r*"):
        origin = read_origin(path)
        if origin is None:
            continue
        directory = Path(origin)
        state = read_state(directory)
        if (directory / KEPT_NAME).exists() or (state is not None and is_running(state)):
            continue
        path.unlink(missing_ok=True)
        removed.append(path)
    if removed:
        log.info("removed %d cache segments that no server owns any more", len(removed))
    return removed
