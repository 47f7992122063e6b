"""One stream beside a busy process on two cores: what is left of its idle speed. Not a test.

    python -m tests.engine.bench_neighbour [--rounds 10] [--served]

Everything runs on two cores of the machine. Rounds alternate between an idle and a busy neighbour, a process that only counts. `--served`
measures through HTTP, so a server process wants a core as well.
"""

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from tests.engine.paired import make_engine, model_dir, prompts_of, start

TOKENS = 400
CORES = 2


def count():
    while True:
        pass


@contextlib.contextmanager
def neighbour():
    """A process that only counts, stopped at first. Gives its id."""
    process = multiprocessing.get_context("spawn").Process(target=count, daemon=True)
    process.start()
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()


def direct(model):
    """Decode speed of an engine in this process, as a function of the round."""
    from engine.request import Request, SamplingParams

    engine, prompt = make_engine(model, 1), prompts_of(model)[0]

    def speed(number):
        engine.add_request(Request(f"r{number}", prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)))
        began, produced = None, 0
        while True:
            outputs = engine.step()
            if began is not None:
                produced += sum(len(output.token_ids) for output in outputs)
            elif outputs:
                began = time.perf_counter()
            if any(output.finish_reason for output in outputs):
                return produced / (time.perf_counter() - began)

    return speed


def served(port):
    """The same through a server: tokens per second between the first chunk and the last."""

    def speed(number):
        body = {
            "model": "tiny",
            "prompt": f"Count from {number} on.",
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        times, usage = [], {}
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                usage = json.loads(line[6:]).get("usage") or usage
        connection.close()
        assert usage.get("completion_tokens") == TOKENS, f"{usage} instead of {TOKENS} tokens"
        return TOKENS / (times[-1] - times[0])

    return speed


def compare(speed, rounds, pid):
    speed(-1)
    idle, busy = [], []
    for number in range(rounds):
        idle.append(speed(2 * number))
        os.kill(pid, signal.SIGCONT)
        busy.append(speed(2 * number + 1))
        os.kill(pid, signal.SIGSTOP)
    ratios = sorted(b / a for a, b in zip(idle, busy, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(
        f"one stream: idle {statistics.median(idle):.0f} tok/s, busy neighbour {statistics.median(busy):.0f} tok/s,"
        f" ratio {statistics.median(ratios):.3f} [quartiles {low:.3f}, {high:.3f}], load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


@contextlib.contextmanager
def server(model):
    """Port of a server on this machine with one rank."""
    from engine.config import EngineConfig
    from hicache.config import HiCacheConfig
    from server import launcher
    from server.config import ServerConfig
    from server.plan import ServerPlan

    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        config = ServerConfig(port=0, served_name="tiny", ready_timeout_s=300)
        plan = ServerPlan(EngineConfig(model=model), HiCacheConfig(size_gb=0), config, "neighbour", base, base / "run")
        state = launcher.start(plan, lambda _event: None)
        try:
            yield state.port
        finally:
            launcher.stop("neighbour", base, 0.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--served", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    start()
    model = model_dir(None)
    with neighbour() as pid:
        if not args.served:
            compare(direct(model), args.rounds, pid)
            return
        with server(model) as port:
            time.sleep(2.0)  # the compiled step is found by then
            compare(served(port), args.rounds, pid)


if __name__ == "__main__":
    main()
