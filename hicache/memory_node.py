"""Places the arena on the GPU's memory node and on huge pages. Both are best effort; the outcome is reported."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from pathlib import Path

from torch import Tensor

from csrc.loader import bind
from hicache.errors import MachineError
from hicache.host_pool import HostArena

_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers
_PREFERRED = 1  # another node is better than no memory
_MAX_NODES = 1024
log = logging.getLogger(__name__)


def gpu_node(library: ctypes.CDLL, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The memory node of the current device; None when the machine does not tell, as virtual ones."""
    text = ctypes.create_string_buffer(32)
    if bind(library, "dix_pci_address", [ctypes.c_char_p, ctypes.c_int])(text, 32):
        return None
    try:
        node = int((root / text.value.decode().lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def wanted_node(setting: str, library: ctypes.CDLL) -> int | None:
    """The node that the knob `hicache.numa` names: gpu, none or a number. None: leave it to the kernel."""
    if setting == "none":
        return None
    return gpu_node(library) if setting == "gpu" else int(setting)


def node_cpus(node: int, root: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The processors of a node that this process may use."""
    try:
        text = (root / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return []
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return sorted(cpus & os.sched_getaffinity(0))


def bind_to_node(arena: HostArena, node: int) -> bool:
    """Ask for the arena's untouched pages to come from `node`. False, with a warning, when the system refuses."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        log.warning("host cache memory is not bound to node %d: no such node or system call here", node)
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    address, num_bytes = ctypes.c_void_p(arena.rows.data_ptr()), ctypes.c_ulong(arena.num_bytes)
    if libc.syscall(
        ctypes.c_long(number), address, num_bytes, ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(_MAX_NODES), ctypes.c_uint(0)
    ):
        log.warning("host cache memory is not bound to node %d: %s", node, os.strerror(ctypes.get_errno()))
        return False
    return True


def ask_for_huge_pages(arena: HostArena) -> bool:
    """Before the arena is touched. False when the system has none for such memory."""
    try:
        arena.mapping.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        return False
    return True


def huge_share(rows: Tensor) -> float:
    """Part of the touched memory of an arena's `rows` that lies on huge pages."""
    address, inside, huge, resident = rows.data_ptr(), False, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin < address + rows.nbytes and address < end
        elif inside and head == "Rss:":
            resident += int(rest.split()[0])
        elif inside and head in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
            huge += int(rest.split()[0])
    return huge / resident if resident else 0.0


def require_huge_pages(arena: HostArena) -> None:
    """Raises MachineError unless nearly all touched memory of the arena lies on huge pages."""
    share = huge_share(arena.rows)
    if share < 0.9:
        raise MachineError(
            f"{share:.0%} of the host cache lies on huge pages",
            hint="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (segments: shmem_enabled), or --set hicache.huge_pages=try",
        )
