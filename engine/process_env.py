"""Variables that third-party libraries read when they load. Call `prepare_process` before torch is imported."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from pathlib import Path

log = logging.getLogger(__name__)


def available_cores() -> int:
    """Cores this process may use: its affinity mask, cut by the cgroup's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, math.ceil(int(limit) / int(period))))
    return cores


def resolve_threads(num_threads: int | str, ranks: int) -> int:
    """The setting `engine.num_threads`: a number, or "auto" = (cores - 1) / ranks, at least 1: one core is for the server process."""
    return max(1, (available_cores() - 1) // ranks) if isinstance(num_threads, str) else num_threads


def prefill_threads(num_threads: int | str, ranks: int) -> int:
    """Most threads of a long prefill step on a CPU. With "auto" every core may help, which a step does only while cores are idle."""
    return max(1, available_cores() // ranks) if isinstance(num_threads, str) else num_threads


def interface_towards(address: str) -> str:
    """The network interface by which this host reaches `address`, "" when it cannot tell."""
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only chooses a route
            own = probe.getsockname()[0]
    except OSError as error:
        log.warning("no route to %s: %s", address, error)
        return ""
    found = (name for name, places in psutil.net_if_addrs().items() if any(place.address == own for place in places))
    return next(found, "")


def prepare_process(num_threads: int | str = "auto", ranks: int = 1, *, peers_at: str = "") -> dict[str, str]:
    """Set thread counts and the interface that ranks meet at: loop-back, or the one towards `peers_at` for ranks of several hosts.
    Variables that the user has set win. ranks: those of this host.

    Returns the variables that were set here. With torch already loaded only its thread count can still change.
    """
    threads = resolve_threads(num_threads, ranks)
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # A thread that spins at a barrier keeps the one it waits for off a core that other processes want too: with two threads and
        # one busy neighbour a step takes fifty times as long.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",  # its thread pool does not survive a fork and competes with the model
        # NVLink multicast gains little at the sizes of a decode step, and a failed multicast team can take the host's GPUs out of service.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    # Otherwise gloo resolves the host name, which fails or leaves the machine in many containers.
    interface = interface_towards(peers_at) if peers_at else "lo0" if sys.platform == "darwin" else "lo"
    if interface:
        wanted["GLOO_SOCKET_IFNAME"] = interface
        if peers_at:
            wanted["NCCL_SOCKET_IFNAME"] = interface
    changed = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(changed)
    log.debug("process environment: %s", changed)
    return changed
