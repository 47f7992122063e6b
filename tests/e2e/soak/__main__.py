"""A long run of a server of its own under mixed load, with aborts, killed ranks, a small cache and drafts; then a verdict and a figure.

python -m tests.e2e.soak OUT --minutes 120      run; SIGTERM ends it early
python -m tests.e2e.soak OUT --judge            the verdict so far, from the files

While OUT/pause exists no new load is sent and nothing is killed. Once the server is ready everything runs at nice 19, and load is sent
within `--share` of one core (`bucket.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from server.launch import segment_name
from tests.e2e.cache_live import Live, leaks
from tests.e2e.conftest import Dix, Server, alive, kill, start, wait_until
from tests.e2e.soak.bucket import CpuBucket
from tests.e2e.soak.figure import draw
from tests.e2e.soak.load import Ended, Load
from tests.e2e.soak.samples import SHARED_MEMORY, HostSample, Sample, Sampler, Table
from tests.e2e.soak.verdict import Verdict, judge

NAME = "soak"
ARGUMENTS = (
    *("--dp", "2", "--hicache-size-gb", "0.012", "--set", "engine.kv_cache_gb=0.006", "--set", "hicache.disk_gb=0.05"),
    # So little that what the front remembers is full before memory is judged.
    *("--set", "server.sampled_ids_mb=0.2", "--set", "server.router_mb=0.3"),
    # On a shared machine a step of a process at nice 19 may take long; a slow step is no hang.
    *("--set", "server.hang_timeout_s=600", "--set", "engine.collective_timeout_s=600"),
)
SAMPLE_S = 10.0
BURST_CPU_S = 30.0
THINK_S = 3.0
CLIENTS = 8
# The supervisor gives up at the fourth failure within ten minutes; after the storm ranks live long enough to judge their memory.
KILL_GAP_S = (240.0, 360.0)
STORM_SHARE = 0.35
WORDS = 12_000
# Ranks meet new shapes and fill their tables for about half an hour under this load.
WARM_S = 1800.0


@dataclass
class Soak:
    """One run. The main thread sends load and kills; a thread takes samples."""

    out: Path
    seconds: float
    share: float
    seed: int
    began_s: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.dix = Dix(self.out / "home")
        self.requests = Table(self.out / "requests.csv", Ended)
        self.events = (self.out / "events.jsonl").open("w")
        self.draw = random.Random(self.seed)
        self.bucket = CpuBucket(self.share, BURST_CPU_S)
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def note(self, event: str, **values: Any) -> None:
        with self._lock:
            self.events.write(json.dumps({"elapsed_s": round(self.elapsed_s, 2), "event": event, **values}) + "\n")
            self.events.flush()

    def run(self) -> None:
        server = start(self.dix, NAME, *ARGUMENTS)
        for process in [psutil.Process(), *self.dix.processes(NAME)]:
            _be_gentle(process)
        _fill_word_caches(server.url, self.draw)
        self.began_s = time.monotonic()
        self.sampler = Sampler(self.dix, NAME, self.began_s)
        self.note("ready", url=server.url)
        sampling = threading.Thread(target=self._sample, daemon=True)
        sampling.start()
        live = Live(server.url)
        try:
            self._load(server, Load(live, self.seed, self.began_s))
        finally:
            self.note("load ended")
            self.over.set()
            sampling.join(60)
            try:
                self._end(server, live)
            finally:
                self.dix("stop", NAME, "--grace", "1s")

    def _sample(self) -> None:
        samples, host = Table(self.out / "samples.csv", Sample), Table(self.out / "host.csv", HostSample)
        while not self.over.is_set():
            for sample in self.sampler.sample():
                samples.add(sample)
            host.add(self.sampler.host())
            self.over.wait(SAMPLE_S)

    def _load(self, server: Server, load: Load) -> None:
        next_kill_s = self._next_kill()
        with ThreadPoolExecutor(CLIENTS) as pool:
            while self.elapsed_s < self.seconds and not self.over.is_set():
                self._wait_while_paused()
                for _ in range(self.draw.choice((1, 1, 1, 2, 5))):
                    pool.submit(self._one, load)
                if self.elapsed_s > next_kill_s:
                    self.over.wait(self.draw.uniform(0.2, 4.0))
                    self._kill(server)
                    next_kill_s = self._next_kill()
                self.over.wait(self.draw.expovariate(1 / THINK_S))
                while self.bucket.update(self.sampler.cpu_s, self.elapsed_s) and self.elapsed_s < self.seconds:
                    if self.over.wait(1.0):
                        break

    def _next_kill(self) -> float:
        """When the next rank dies: every few minutes in the storm, and once more near the end."""
        if self.seconds < 2 * KILL_GAP_S[0]:
            return 0.25 * self.seconds if self.elapsed_s < 0.25 * self.seconds else 2 * self.seconds
        at = self.elapsed_s + self.draw.uniform(*KILL_GAP_S)
        if at < STORM_SHARE * self.seconds:
            return at
        last = 0.95 * self.seconds
        return last if self.elapsed_s < last else 2 * self.seconds

    def _wait_while_paused(self) -> None:
        pause, since = self.out / "pause", self.elapsed_s
        if not pause.exists():
            return
        self.note("paused")
        while pause.exists() and self.elapsed_s < self.seconds and not self.over.wait(1.0):
            self.bucket.update(self.sampler.cpu_s, self.elapsed_s, paused=True)
        self.note("resumed", seconds=round(self.elapsed_s - since, 1))

    def _one(self, load: Load) -> None:
        try:
            ended = load.send(*load.draw())
        except Exception as error:  # a thread of a pool would swallow it
            self.note("broken load", error=repr(error))
            raise
        with self._lock:
            self.requests.add(ended)

    def _kill(self, server: Server) -> None:
        rank = self.draw.randrange(2)
        try:
            pid = server.rank_pid(rank)
        except StopIteration:
            return
        self.note("kill", rank=rank, pid=pid)
        kill(pid)
        time.sleep(1.0)

        def back() -> bool:
            return self.over.is_set() or httpx.get(f"{server.url}/health/ready", timeout=60).status_code == 200

        wait_until("the group serves again", back, 900)
        self.note("serves again")

    def _end(self, server: Server, live: Live) -> None:
        """Nothing runs any more: what is not back is a leak. Then the server goes, and nothing of it may stay."""
        wait_until("the group serves", lambda: httpx.get(f"{server.url}/health/ready", timeout=60).status_code == 200, 900)
        wait_until("all ranks report", lambda: all("frames" in rank["prefix_cache"] for rank in live.ranks()), 120)
        wait_until("all requests ended", lambda: not any(rank["running"] + rank["waiting"] for rank in live.ranks()), 120)
        time.sleep(3.0)
        document = server.metrics()
        requests, cpu_s = document["requests"], self.sampler.cpu_s
        found = leaks(live)
        open_now = {name: requests[name] for name in ("active", "queued", "streams_open") if requests[name]}
        found += [f"front: {name} {value} although nothing runs" for name, value in open_now.items()]
        if missing := requests["admitted_total"] - sum(requests["finished_total"].values()):
            found.append(f"front: {missing} admitted requests have no end")
        processes, state = self.dix.processes(NAME), self.dix.state(NAME)
        stopped = self.dix("stop", NAME, "--grace", "10s")
        if stopped.returncode:
            found.append(f"dix stop: {stopped.stderr}")
        wait_until("processes end", lambda: not alive(processes), 30)
        found += [f"left behind: {path}" for path in SHARED_MEMORY.glob(f"{segment_name(state['server_dir'])}*")]
        found += [f"left behind: {path}" for path in [Path(state["runtime_dir"])] if path.exists()]
        minutes = round(self.elapsed_s / 60, 1)
        counters = {"requests": requests, "watchdog": document["watchdog"], "totals": document["totals"]}
        end = {"minutes": minutes, "cpu_share": round(cpu_s / self.elapsed_s, 3), "leaks": found, "counters": counters}
        (self.out / "end.json").write_text(json.dumps(end, indent=1))


def _fill_word_caches(url: str, draw: random.Random) -> None:
    """The tokenizer library remembers how it split the last 10,000 words, 2.8 MB: they would fill for hours, and are full at once here."""
    for _ in range(WORDS // 1000):
        text = " ".join("".join(draw.choices("abcdefghijklmnop", k=7)) for _ in range(1000))
        for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
            httpx.post(f"{url}/tokenize", json={"model": "tiny", **body}, timeout=120).raise_for_status()


def _be_gentle(process: psutil.Process) -> None:
    """Threads that exist, and by inheritance those to come."""
    for thread in process.threads():
        os.setpriority(os.PRIO_PROCESS, thread.id, 19)


def report(out: Path) -> Verdict:
    verdict = judge(out)
    (out / "verdict.txt").write_text(verdict.text())
    (out / "verdict.json").write_text(json.dumps(verdict.document(), indent=1))
    draw(out, out / "soak.png")
    print(verdict.text(), end="", flush=True)
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--share", type=float, default=0.15, help="of one core, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--judge", action="store_true")
    options = parser.parse_args()
    out = options.out.absolute()
    if not options.judge:
        out.mkdir(parents=True, exist_ok=True)
        seconds = 60 * options.minutes
        (out / "settings.json").write_text(json.dumps({"seconds": seconds, "warm_s": min(WARM_S, seconds / 4), "arguments": ARGUMENTS}))
        soak = Soak(out, seconds, options.share, options.seed)
        signal.signal(signal.SIGTERM, lambda *_: soak.over.set())
        soak.run()
    return 1 if report(out).complaints else 0


if __name__ == "__main__":
    sys.exit(main())
