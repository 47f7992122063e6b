"""What the server costs: the same load on the engine called directly and through HTTP, in turns on one machine.

`python -m tests.server.bench_front [--streams 1,16,64] [--rounds 5] [--tokens 128]` prints one line per number of streams: time to first
token and throughput of both, the median of the paired ratios, and the processor time per token of each process, which does not depend
on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.models.tiny import ensure_tiny
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig
from server import launcher
from server.config import ServerConfig
from server.plan import ServerPlan
from server.state import ServerState

PROMPT_TOKENS = 64
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """One round: median time to first token over the streams, throughput, and processor seconds per process."""

    ttft_s: float
    tok_s: float
    cpu_s: dict[str, float]


def prompt(number: int) -> list[int]:
    """Distinct prompts: nothing is cached."""
    return [(number * 7919 + position * 104729) % 3000 + 300 for position in range(PROMPT_TOKENS)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Direct:
    """The engine in a child process, driven by the shortest possible loop."""

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=drive, args=(config, theirs), daemon=True)
        self._process.start()
        self._pipe.recv()

    def round(self, streams: int, tokens: int, first: int) -> Sample:
        self._pipe.send((streams, tokens, first))
        sample: Sample = self._pipe.recv()
        return sample

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def drive(config: EngineConfig, pipe: Connection) -> None:
    from engine.engine import Engine

    engine = Engine(config, HiCacheConfig(size_gb=0))
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        streams, tokens, first = order
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        began_s, cpu_s = time.perf_counter(), cpu_seconds(os.getpid())
        first_s: dict[str, float] = {}
        for number in range(streams):
            engine.add_request(Request(str(number), prompt(first + number), params))
        open_streams, produced = streams, 0
        while open_streams:
            for output in engine.step():
                first_s.setdefault(output.request_id, time.perf_counter() - began_s)
                produced += len(output.token_ids)
                open_streams -= output.finish_reason is not None
        spent_s = time.perf_counter() - began_s
        pipe.send(Sample(statistics.median(first_s.values()), produced / spent_s, {"engine": cpu_seconds(os.getpid()) - cpu_s}))
    engine.close()


class Served:
    """A server of the same engine, and a client that reads as little as it can."""

    def __init__(self, config: EngineConfig, base: Path) -> None:
        self._base = base
        server = ServerConfig(port=0, max_queue=256, ready_timeout_s=120)
        plan = ServerPlan(config, HiCacheConfig(size_gb=0), server, "bench", base, base / "run")
        self.state: ServerState = launcher.start(plan, lambda _event: None)

    def round(self, streams: int, tokens: int, first: int) -> Sample:
        before = self._cpu()
        began_s = time.perf_counter()
        results = asyncio.run(self._load(streams, tokens, first))
        spent_s = time.perf_counter() - began_s
        produced = sum(count for _, count in results)
        cpu = {name: seconds - before[name] for name, seconds in self._cpu().items()}
        return Sample(statistics.median(ttft for ttft, _ in results), produced / spent_s, cpu)

    def _cpu(self) -> dict[str, float]:
        found = {record.role: cpu_seconds(record.pid) for record in self.state.processes if record.role in ("front", "rank")}
        return {**found, "client": cpu_seconds(os.getpid())}

    async def _load(self, streams: int, tokens: int, first: int) -> list[tuple[float, int]]:
        return await asyncio.gather(*(self._stream(tokens, first + number) for number in range(streams)))

    async def _stream(self, tokens: int, number: int) -> tuple[float, int]:
        """(time to the first piece of text, tokens that the usage names) of one stream."""
        ask: dict[str, Any] = {"prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({**ask, "stream_options": {"include_usage": True}}).encode()
        began_s = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.state.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        ttft_s, tail = 0.0, b""
        while data := await reader.read(65536):
            if not ttft_s and b"data: " in data:
                ttft_s = time.perf_counter() - began_s
            tail = (tail + data)[-2048:]
        writer.close()
        assert b"data: [DONE]" in tail, tail
        usage = tail[tail.rindex(b'"completion_tokens":') + 20 :]
        return ttft_s, int(usage[: usage.index(b",")])

    def close(self) -> None:
        launcher.stop("bench", self._base, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server does not stay behind
    with tempfile.TemporaryDirectory(prefix="dxb-", dir="/tmp") as base:
        model = ensure_tiny(Path(base) / "models")
        config = EngineConfig(model=str(model), max_num_seqs=64, num_threads=1, prefill_any_interval=2)
        direct, served = Direct(config), Served(config, Path(base))
        try:
            for streams in (int(number) for number in options.streams.split(",")):
                compare(direct, served, streams, options.rounds, options.tokens)
        finally:
            direct.close()
            served.close()


def compare(direct: Direct, served: Served, streams: int, rounds: int, tokens: int) -> None:
    pairs: list[tuple[Sample, Sample]] = []
    for number in range(rounds + 1):
        first = (number * 2 + 1) * 1000 + streams
        # The order alternates, so that neither side always runs on the warmer machine.
        if number % 2:
            pair = direct.round(streams, tokens, first), served.round(streams, tokens, first + 500)
        else:
            later = served.round(streams, tokens, first + 500)
            pair = direct.round(streams, tokens, first), later
        pairs.append(pair)
    pairs = pairs[1:]  # the first pair warms up
    ttft_ms = 1000 * statistics.median(b.ttft_s - a.ttft_s for a, b in pairs)
    ratio = statistics.median(b.tok_s / a.tok_s for a, b in pairs)
    per_token = {
        name: 1e6 * statistics.median(sample.cpu_s[name] for sample in samples) / (streams * tokens)
        for samples in ([a for a, _ in pairs], [b for _, b in pairs])
        for name in samples[0].cpu_s
    }
    costs = ", ".join(f"{name} {value:.0f}" for name, value in per_token.items())
    print(
        f"{streams:3d} streams: direct {statistics.median(a.tok_s for a, _ in pairs):7.0f} tok/s, served ratio {ratio:.3f}, "
        f"TTFT {1000 * statistics.median(a.ttft_s for a, _ in pairs):.1f} ms + {ttft_ms:.1f} ms; processor us per token: {costs}",
        flush=True,
    )


if __name__ == "__main__":
    main()
