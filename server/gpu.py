"""Which processes use the machine's GPUs, according to the driver. Without GPUs every function here returns nothing."""

from __future__ import annotations

import glob
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from server.errors import MachineError
from server.launch import BOOT_VARIABLE

QUERY_TIMEOUT_S = 20.0  # the first query after boot loads the driver
RELEASE_LIMIT_S = 10.0
POLL_S = 0.25
MIB = 2**20
log = logging.getLogger("supervisor")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory on a GPU. `gpu` is the GPU's uuid."""

    pid: int
    used_bytes: int
    gpu: str


def gpu_uuids() -> list[str]:
    """Uuids of the machine's GPUs in the driver's order."""
    return [line.strip() for line in _query("--query-gpu=uuid")]


def gpu_processes() -> list[GpuProcess]:
    """Every compute process that the driver names. Inside a container it may name none."""
    found = []
    for line in _query("--query-compute-apps=pid,used_memory,gpu_uuid"):
        pid, used, gpu = (part.strip() for part in line.split(","))
        if pid.isdigit():
            found.append(GpuProcess(int(pid), int(used) * MIB if used.isdigit() else 0, gpu))
    return found


def _query(what: str) -> list[str]:
    """Lines of nvidia-smi; none without driver, and none (with a warning in the log) when it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None or not glob.glob("/dev/nvidia[0-9]*"):
        return []
    try:
        done = subprocess.run([tool, what, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        log.warning("nvidia-smi did not answer within %.0f s; the GPUs are not checked", QUERY_TIMEOUT_S)
        return []
    if done.returncode != 0:
        log.warning("nvidia-smi failed, the GPUs are not checked: %s", done.stdout.strip()[-200:])
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


def check_unoccupied(processes: Collection[GpuProcess], gpus: Collection[str]) -> None:
    """Refuse GPUs on which a program computes that is not ours. It is never killed.

    Ours are the processes of any dix server (its engine finds out whether the memory is enough) and those that started this one. A pid
    that does not exist here belongs to another container, and nothing can be said about it.

    Raises:
        MachineError: names the pid and its memory.
    """
    ours = ancestors(os.getpid())
    for process in processes:
        if process.gpu not in gpus or process.pid in ours or not Path(f"/proc/{process.pid}").exists() or _of_a_server(process.pid):
            continue
        raise MachineError(
            f"GPU {process.gpu} is used by {_command(process.pid)} (pid {process.pid}, {process.used_bytes / 2**30:.1f} GiB)",
            hint="end that program, choose another GPU with CUDA_VISIBLE_DEVICES, or share the GPU with --share-gpu",
        )


def still_on_gpu(pids: Collection[int], limit_s: float = RELEASE_LIMIT_S) -> list[GpuProcess]:
    """Those of our processes that the driver still lists after `limit_s`; returns as soon as there are none."""
    deadline = time.monotonic() + limit_s
    while left := [process for process in gpu_processes() if process.pid in pids]:
        if time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)
    return []


def ancestors(pid: int) -> set[int]:
    """`pid`, its parent, and so on up to the first process."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def _of_a_server(pid: int) -> bool:
    try:
        return f"{BOOT_VARIABLE}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's process
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() or "another program"
    except OSError:
        return "another program"
