"""Starting and ending the children of the supervisor: each in a process group of its own, watched by a guard inside that group."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from server import guard
from server.gpu import gpu_uuids
from server.launch import BOOT_VARIABLE, Launch

# Our ranks get their numbers from the launch file; torch would take these for theirs and look for torchrun's store.
TORCHRUN_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"})
SECRET_WORDS = ("API_KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(slots=True)
class Child:
    """A process group: its leader, and the guard that ends the group when the supervisor or the leader is gone."""

    role: str
    rank: int
    process: subprocess.Popen[bytes]
    guard: subprocess.Popen[bytes]
    start_time: str
    returncode: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def name(self) -> str:
        return "the front" if self.role == "front" else f"rank {self.rank}"

    @property
    def alive(self) -> bool:
        if self.returncode is None:
            self.returncode = self.process.poll()
        return self.returncode is None

    def signal_leader(self, number: int) -> None:
        if self.alive:
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """SIGKILL to everything in the group. Leader and guard are members, so its id is ours until both have been waited for."""
        if self.guard.returncode is None or self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # all members may be gone already
                os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.guard.wait()
        self.returncode = self.process.returncode


def spawn(
    role: str, rank: int, arguments: list[str], *, boot_uuid: str, output: Path, guard_pipe: int, pass_fds: tuple[int, ...] = ()
) -> Child:
    """Start `python -m ...` as the leader of a new group, then its guard. Call it from the main thread only (parent-death signal).

    `guard_pipe` is the read end of a pipe whose write end only the supervisor holds.
    """
    environment = child_environment(boot_uuid, rank if role == "rank" else None)
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=environment,
            pass_fds=pass_fds,
            process_group=0,
        )
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(guard_pipe), str(process.pid)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={BOOT_VARIABLE: boot_uuid},
            pass_fds=(guard_pipe,),
            process_group=process.pid,
        )
    return Child(role, rank, process, watcher, guard.start_time(process.pid))


def child_environment(boot_uuid: str, rank: int | None) -> dict[str, str]:
    """This process's environment without secrets, with the boot id, and for a rank with its GPU when the machine has any."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not any(word in name.upper() for word in SECRET_WORDS)
    }
    environment[BOOT_VARIABLE] = boot_uuid
    environment["PYTHONUNBUFFERED"] = "1"
    if rank is not None and (device := visible_device(rank)):
        environment["CUDA_VISIBLE_DEVICES"] = device
    return environment


def visible_device(rank: int) -> str:
    """The GPU of a rank as CUDA_VISIBLE_DEVICES names it, or "" without GPUs. A list set by the user is shared out in order."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        devices = [name for name in chosen.split(",") if name.strip()]
    else:
        devices = [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    return devices[rank % len(devices)] if devices else ""


def rank_gpu(rank: int, uuids: list[str]) -> str:
    """Uuid of a rank's GPU, given those of the machine; "" when it has none."""
    device = visible_device(rank)
    if device.isdigit():
        return uuids[int(device)] if int(device) < len(uuids) else ""
    return device


def launch_gpus(launch: Launch) -> list[str]:
    """Uuids of the GPUs that the ranks of a server get, one per rank; empty without GPUs."""
    uuids = gpu_uuids() if launch.engine.device != "cpu" else []
    return [rank_gpu(rank, uuids) for rank in range(launch.local_ranks)] if uuids else []


def reap_orphans(known: set[int]) -> None:
    """Wait for adopted grandchildren. Children in `known` are left for their owners to wait for."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return
        os.waitpid(found.si_pid, os.WNOHANG)


def end_groups(children: list[Child], patience_s: float) -> list[int]:
    """SIGTERM to all leaders, then SIGKILL to every group once they left or after `patience_s`. Returns the leaders killed."""
    for child in children:
        child.signal_leader(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(child.alive for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    stubborn = [child.pid for child in children if child.alive]
    for child in children:
        child.kill_group()
    return stubborn
