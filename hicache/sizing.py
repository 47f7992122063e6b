"""How large the arena is: given, or derived from what the machine still allows."""

from __future__ import annotations

from pathlib import Path

from hicache.config import HiCacheConfig

GIB = 2**30
CPU_AUTO_BYTES = GIB // 8  # about a thousand pages of a toy model, so that the embedded model stays small
RESERVE_BYTES = 10 * GIB  # left to the rest of the host beside a GPU
AUTO_SHARE = 0.25
_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def available_host_bytes() -> int:
    """Memory that this process may still take: the smaller of the machine's and the control group's."""
    available = _meminfo_available()
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage))
    return available


def arena_bytes(config: HiCacheConfig, device: str, ranks: int = 1) -> int:
    """Bytes of one rank's arena, 0 for off. `auto` is small on CPU and a quarter of the allowed memory beside a GPU."""
    if config.size_gb != "auto":
        return int(float(config.size_gb) * GIB)
    if device == "cpu":
        return CPU_AUTO_BYTES
    return int(max(0, AUTO_SHARE * (available_host_bytes() - RESERVE_BYTES)) / ranks)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable line")


def _read_int(path: Path) -> int | None:
    """The number in a control-group file; None when there is no such file or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
