"""What a server's processes hold, sampled into CSV files: memory, handles and CPU time of each, and files of the whole server."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from server.launch import segment_name
from tests.e2e.conftest import Dix

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment. Memory in KiB; `own_kib`: anonymous pages and its share of shared memory, which no other program moves.

    `life` tells processes of one role apart: it counts the pids that played it. `age_s` is the time since this one was first seen.
    """

    elapsed_s: float
    role: str
    life: int
    pid: int
    age_s: float
    rss_kib: int
    pss_kib: int
    uss_kib: int
    own_kib: int
    threads: int
    fds: int
    sockets: int
    segments: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class HostSample:
    """Files of the whole server at one moment: shared memory, logs, disk tier, everything in its home."""

    elapsed_s: float
    shm_files: int
    shm_bytes: int
    home_files: int
    home_bytes: int


class Table:
    """A CSV file that is complete after every row."""

    def __init__(self, path: Path, kind: type) -> None:
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(kind)])
        self._writer.writeheader()

    def add(self, row: Any) -> None:
        self._writer.writerow(asdict(row))
        self._file.flush()


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Sampler:
    """Knows which process is which, and what the ones that are gone had used."""

    def __init__(self, dix: Dix, name: str, began_s: float) -> None:
        self._dix, self._name, self._began_s = dix, name, began_s
        self._lives: dict[str, list[tuple[int, float]]] = {}
        self._cpu: dict[tuple[int, int], float] = {}

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes seen so far, and of this one."""
        return sum(self._cpu.values()) + time.process_time()

    def sample(self) -> list[Sample]:
        found = []
        for role, process in self._processes():
            try:
                found.append(self._one(role, process))
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended meanwhile
        return found

    def host(self) -> HostSample:
        mine = segment_name(self._dix.state(self._name)["server_dir"])
        shm = [path.stat().st_size for path in SHARED_MEMORY.glob(f"{mine}*")]
        home = list(_sizes(self._dix.home))
        return HostSample(self._now(), len(shm), sum(shm), len(home), sum(home))

    def _now(self) -> float:
        return round(time.monotonic() - self._began_s, 2)

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        state = self._dix.state(self._name)
        records = {record["pid"]: record for record in [state["supervisor"], *state["processes"]]}
        guards = 0
        for pid, record in records.items():
            role = f"rank {record['rank']}" if record["role"] == "rank" else record["role"]
            if role == "guard":
                role, guards = f"guard {guards}", guards + 1
            try:
                process = psutil.Process(pid)
                children = [child for child in process.children() if child.pid not in records]
            except psutil.NoSuchProcess:
                continue
            yield role, process
            for number, child in enumerate(children):
                yield f"{role} child {number}", child

    def _one(self, role: str, process: psutil.Process) -> Sample:
        now, pid = self._now(), process.pid
        lives = self._lives.setdefault(role, [])
        if not lives or lives[-1][0] != pid:
            lives.append((pid, now))
        memory, links = _memory(pid), _links(pid)
        cpu = process.cpu_times()
        self._cpu[pid, int(process.create_time())] = cpu.user + cpu.system
        maps = Path(f"/proc/{pid}/maps").read_text()
        return Sample(
            elapsed_s=now,
            role=role,
            life=len(lives),
            pid=pid,
            age_s=round(now - lives[-1][1], 2),
            rss_kib=memory["Rss"],
            pss_kib=memory["Pss"],
            uss_kib=memory["Private_Clean"] + memory["Private_Dirty"],
            own_kib=memory["Pss_Anon"] + memory["Pss_Shmem"],
            threads=process.num_threads(),
            fds=len(links),
            sockets=sum(link.startswith("socket:") for link in links),
            segments=len({line.split(maxsplit=5)[5] for line in maps.splitlines() if f"{SHARED_MEMORY}/" in line}),
            cpu_s=round(cpu.user + cpu.system, 2),
        )


def _memory(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(value) for name, value, *_ in (line.split() for line in lines)}


def _links(pid: int) -> list[str]:
    links = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(entry.path))
        except FileNotFoundError:
            continue
    return links


def _sizes(directory: Path) -> Iterator[int]:
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                yield os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
