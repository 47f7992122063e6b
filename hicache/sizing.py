"""How large the arena is: given, or derived from what the machine still allows."""

from __future__ import annotations

from pathlib import Path

from hicache.config import HiCacheConfig
from hicache.errors import MachineError

GIB = 2**30
CPU_AUTO_BYTES = GIB // 8  # about a thousand pages of a toy model, so that the embedded model stays small
RESERVE_BYTES = 10 * GIB  # left to the rest of the host beside a GPU
AUTO_SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")
# Limit, usage, and the line of memory.stat that tells how much of the usage is file cache that goes when memory is needed.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_host_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that this process may still take: the smaller of the machine's and the control group's."""
    available = _meminfo_available()
    for limit_file, usage_file, stat_file, cache_line in _CGROUP_FILES:
        limit, usage = _read_int(cgroup / limit_file), _read_int(cgroup / usage_file)
        if limit is not None and usage is not None:
            used = max(0, usage - _read_line(cgroup / stat_file, cache_line))
            available = min(available, max(0, limit - used))
    return available


def check_size(num_bytes: int, ranks: int, available: int) -> None:
    """Whether arenas of `num_bytes` for each of `ranks` fit what the machine still allows.

    Raises:
        MachineError: they do not; the hint names what would.
    """
    if num_bytes * ranks > available:
        raise MachineError(
            f"a host cache of {num_bytes / GIB:.2f} GiB for each of {ranks} ranks is more than the {available / GIB:.2f} GiB free here",
            hint=f"--hicache-size-gb {0.9 * available / GIB / ranks:.2f} or less, or auto",
        )


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


def _read_line(path: Path, name: str) -> int:
    """The number behind `name` in a file of lines; 0 when it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _read_int(path: Path) -> int | None:
    """The number in a control-group file; None when there is no such file or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
