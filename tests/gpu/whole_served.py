"""All 40 layers of the released shapes, served over HTTP as a user would: `python -m tests.gpu.whole_served OUT --ranks 8`.

Random weights, drawn on the GPUs: `dix start` until ready, a warm-up, a first and a second turn on every rank at once, `dix bench agentx`
on generated long traces, `kill -9` of one rank under load, `dix stop`. Ten minutes in all: the measured window of the traces gets what the
other parts leave of it. Every part has a limit of its own, runs whatever happened to the one before, and leaves its result in
`OUT/served.json`; a table ends it, and no process stays behind, whatever happens. With fewer than eight GPUs give `--layers`;
`--device cpu` tries it at small sizes. Needs what a server needs and the load harness, unlike most scripts here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine.models.released import excerpt, write_excerpt
from engine.models.tiny import write_text_format
from server import parent_death
from tests.e2e.conftest import Dix, alive, kill
from tests.gpu.ranks import QUIET
from tests.gpu.streams import Asked, ask, ask_together, begin, texts
from tests.gpu.whole_model import small

NAME = "whole"
BUDGET_S = 595.0
# What later parts need; the window of the traces gets the rest. Around it: the harness loads, waits for running answers and exports, and
# sends one prompt per session first.
AFTER_KILL_S, STOP_S, AROUND_WINDOW_S, LEAST_WINDOW_S = 12.0, 8.0, 40.0, 8.0
SESSION_TOKENS = {"bundled": 2_000, "small": 16_000, "long": 50_000}
EXPORT_S = 40.0  # of a harness that is told to end
SMALL_VOCABULARY = 4_608  # more than the embedded tokenizer has, as in the release


@dataclass
class Sizes:
    """Lengths in tokens, windows in seconds."""

    context: int
    prompt: int
    follow_up: int = 256
    answer: int = 64
    warm_up: tuple[int, ...] = ()
    seqs: int = 32
    streams: int = 4  # open requests a rank when one is killed
    long_answer: int = 8_192
    arena_gb: float = 2.0


CUDA = Sizes(context=131_072, prompt=32_768, warm_up=(512, 8_192, 32_768))
CPU = Sizes(context=16_384, prompt=1_024, warm_up=(256, 1_024), seqs=8, streams=2, arena_gb=0.25)


@dataclass
class Served:
    """One run: its limits, its server, and what was found so far."""

    options: argparse.Namespace
    sizes: Sizes
    began_s: float = field(default_factory=time.monotonic)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    processes: list[psutil.Process] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.dix = Dix(self.options.out / "home")
        self.model: Path = self.options.out / "model"

    @property
    def parts(self) -> list[str]:
        return str(self.options.parts).split(",")

    @property
    def left_s(self) -> float:
        return self.began_s + self.options.budget - time.monotonic()

    def part(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Run a part, keep what it found or how it failed."""
        began = time.monotonic()
        try:
            result = work()
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {str(error)[-600:]}"}
        self.found[name] = {**result, "took_s": round(time.monotonic() - began, 1)}
        print(name, json.dumps(self.found[name]), flush=True)
        (self.options.out / "served.json").write_text(json.dumps(self.found, indent=1) + "\n")

    def command(self, *arguments: str, limit_s: float, ask: signal.Signals = signal.SIGTERM) -> str:
        """A `dix` command that ends with us and within its limit, asked by that signal. Returns what it printed.

        Raises RuntimeError: it failed, with the end of what it printed. subprocess.TimeoutExpired: it ran past the limit and was ended.
        """
        environment = {**os.environ, **QUIET, "DIX_HOME": str(self.dix.home), "OMP_NUM_THREADS": "1"}
        log = self.options.out / f"dix-{'-'.join(word for word in arguments[:2] if word.isalpha())}.log"
        with log.open("w+") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "deepinfer_cli", *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT,
                preexec_fn=functools.partial(parent_death.arm, os.getpid(), signal.SIGTERM),
            )  # fmt: skip
            try:
                code = child.wait(max(1.0, limit_s))
            except BaseException:
                child.send_signal(ask)  # `start` ends what it was starting, `bench` its harness
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(EXPORT_S)
                child.kill()
                raise
            output.seek(0)
            said = output.read()
        if code not in (0, 5):  # 5: measured, but not valid; the report says why
            raise RuntimeError(f"dix {arguments[0]} exited {code}: {said[-500:]}")
        return said


def start(run: Served) -> dict[str, Any]:
    """From nothing to the first token: seconds of every stage, and the memory of every rank."""
    options, sizes = run.options, run.sizes
    ranks = str(options.ranks)
    arguments = [
        "start", str(run.model), "--name", NAME, "--port", "0", "--device", options.device, "--dp", ranks, "--ep", ranks, "--rank-header",
        "--max-model-len", str(sizes.context), "--max-num-seqs", str(sizes.seqs), "--hicache-size-gb", f"{sizes.arena_gb:g}",
        "--set", "engine.load_format=dummy", "--json",
    ]  # fmt: skip
    arguments += ["--set", f"engine.force_accept_length={options.accept:g}"] if options.accept else []
    arguments += [word for setting in options.set for word in ("--set", setting)]
    said = run.command(*arguments, limit_s=min(run.left_s - STOP_S, options.start_limit))
    run.processes = run.dix.processes(NAME)
    run.url = f"http://127.0.0.1:{run.dix.state(NAME)['port']}"
    events = [event for line in said.splitlines() if line.startswith("{") and "elapsed_s" in (event := json.loads(line))]
    weights = [event["elapsed_s"] for event in events if event.get("stage") == "weights"]
    return {
        "weights_s": round(max(weights, default=0.0), 1),
        "ready_s": round(max(event["elapsed_s"] for event in events), 1),
        "memory": memory(run),
    }


def memory(run: Served) -> list[dict[str, float]]:
    """GiB of every rank: on its GPU, and of the host (resident, what it shares with others included)."""
    pids = {process["rank"]: process["pid"] for process in run.dix.state(NAME)["processes"] if process["role"] == "rank"}
    used: list[float] = []
    if run.options.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        used = [float(line) / 1024 for line in subprocess.check_output(query, text=True, timeout=20).split()]
    found = []
    for rank, pid in sorted(pids.items()):
        gpu = {"gpu_gib": round(used[rank], 1)} if used else {}
        found.append({"rank": rank, **gpu, "host_gib": round(psutil.Process(pid).memory_info().rss / 2**30, 2)})
    return found


def warm_up(run: Served) -> dict[str, Any]:
    """Every rank once at every size, so that nothing is compiled later. What is left of it shows in the time of the last round."""
    make, last = texts(run.model, 1), 0.0
    for length in (*run.sizes.warm_up, run.sizes.warm_up[-1]):
        began = time.monotonic()
        ended = ask_together(run.url, [[user(make(length))] for _ in range(run.options.ranks)], 16)
        last = time.monotonic() - began
        assert all(one.kind == "whole" for one in ended), [one.kind for one in ended]
    return {"requests": (len(run.sizes.warm_up) + 1) * run.options.ranks, "last_round_s": round(last, 2)}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def two_turns(run: Served) -> dict[str, Any]:
    """A long first turn on every rank at once, then its second turn: how much of it came from the cache, and what that is worth."""
    make, sizes = texts(run.model, 2), run.sizes
    prompts = [[user(make(sizes.prompt))] for _ in range(run.options.ranks)]
    first = ask_together(run.url, prompts, sizes.answer)
    assert all(one.kind == "whole" for one in first), [one.kind for one in first]
    for prompt, said in zip(prompts, first, strict=True):
        prompt += [{"role": "assistant", "content": said.text}, user(make(sizes.follow_up))]
    second = ask_together(run.url, prompts, sizes.answer)
    assert all(one.kind == "whole" for one in second), [one.kind for one in second]
    rows = [turn_row(one, two) for one, two in zip(first, second, strict=True)]
    return {
        "rows": rows,
        "ranks_reached": len({row["rank"] for row in rows}),
        "least_cached_share": round(min(row["cached"] / row["first_prompt"] for row in rows), 3),
        "cold_ttft_ms": round(statistics.median(row["cold_ms"] for row in rows), 1),
        "second_ttft_ms": round(statistics.median(row["second_ms"] for row in rows), 1),
    }


def turn_row(first: Asked, second: Asked) -> dict[str, Any]:
    return {
        "rank": first.rank, "second_rank": second.rank, "first_prompt": first.prompt_tokens, "second_prompt": second.prompt_tokens,
        "cached": second.cached_tokens, "cold_ms": round(first.ttft_ms, 1), "second_ms": round(second.ttft_ms, 1),
    }  # fmt: skip


def agentx(run: Served) -> dict[str, Any]:
    """Recorded-like agent sessions for as long as the later parts leave; the report is `OUT/agentx.html`."""
    options = run.options
    # A group that starts again finds its kernels compiled.
    later_s = STOP_S + (run.found["start"]["ready_s"] + AFTER_KILL_S if "lost rank" in run.parts else 0)
    warm_s = min(30.0, options.minutes * 6)
    window_s = int(min(60 * options.minutes, run.left_s - later_s - AROUND_WINDOW_S - warm_s - first_prompts_s(run)))
    assert window_s >= LEAST_WINDOW_S, f"{run.left_s:.0f} s are left, {later_s:.0f} of them for what comes later"
    result: dict[str, Any] = {"window_s": window_s}
    try:
        said = run.command(
            "bench", "agentx", "--url", run.url, "--traces", options.traces, "--concurrency", str(options.concurrency), "--duration",
            f"{window_s}s", "--warmup-duration", f"{warm_s:g}s", "--grace", "5s", "--tokenizer", str(run.model),
            limit_s=run.left_s - later_s - EXPORT_S / 2, ask=signal.SIGINT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said, result["cut"] = str(error), True  # what was measured until then is kept
    if not list(run.dix.home.glob("**/runs/*/run.json")):
        raise RuntimeError(said[-500:])  # refused before it began
    said = run.command("report", "last", "--html", str(options.out / "agentx.html"), "--csv", str(options.out / "agentx.csv"), limit_s=30)
    (options.out / "agentx.txt").write_text(said)
    return result | {"memory": memory(run)}


def first_prompts_s(run: Served) -> float:
    """What the prompts of all sessions take their ranks, by the first turns measured before."""
    turns = run.found.get("two turns", {})
    sessions = run.options.concurrency / run.options.ranks
    return sessions * SESSION_TOKENS.get(run.options.traces, 0) / run.sizes.prompt * turns.get("cold_ttft_ms", 0.0) / 1e3


def lose_a_rank(run: Served) -> dict[str, Any]:
    """kill -9 of the last rank while every rank answers: how each open request ended and when, and when the server was good again."""
    make, sizes, ranks = texts(run.model, 3), run.sizes, run.options.ranks
    open_requests = begin(run.url, [[user(make(400))] for _ in range(ranks * sizes.streams)], sizes.long_answer)
    wait_until(lambda: all(asked.first_s or asked.ended_s for asked, _ in open_requests), 30, "every request answers")
    running = [(asked, thread) for asked, thread in open_requests if not asked.ended_s]
    victim = next(p["pid"] for p in run.dix.state(NAME)["processes"] if p["role"] == "rank" and p["rank"] == ranks - 1)
    killed_s = time.monotonic()
    kill(victim)
    for _, thread in running:
        thread.join(max(0.1, killed_s + AFTER_KILL_S - time.monotonic()))
    ended = [asked for asked, _ in running]
    kinds = {kind: sum(asked.kind == kind for asked in ended) for kind in sorted({asked.kind for asked in ended})}
    result: dict[str, Any] = {
        "open": len(running),
        "ended": kinds,
        "last_ended_s": round(max(asked.ended_s for asked in ended) - killed_s, 2),
        "all_told": set(kinds) == {"error"},
    }
    wait_until(lambda: healthy(run.url), run.left_s - STOP_S - 2, "the group serves again")
    result["healthy_after_s"] = round(time.monotonic() - killed_s, 1)
    run.processes += run.dix.processes(NAME)
    served = ask(run.url, [user(make(64))], 16)
    return {**result, "served_after": served.kind, "ttft_after_ms": round(served.ttft_ms, 1)}


def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
    return False


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.05)


def stop(run: Served) -> dict[str, Any]:
    run.command("stop", NAME, "--grace", "2s", limit_s=60)
    wait_until(lambda: not alive(run.processes), 15, "every process has ended")
    return {"processes": len(run.processes), "left": len(alive(run.processes))}


@contextlib.contextmanager
def nothing_left(run: Served) -> Iterator[None]:
    """A server of this run ends with the block, also when this process is told to end; a watcher stops it when we are killed."""
    watch, held = os.pipe()
    watcher = subprocess.Popen(
        ["sh", "-c", 'read -r nothing; exec "$@"', "sh", sys.executable, "-m", "deepinfer_cli", "stop", "--all", "--grace", "0s"],
        env={**os.environ, "DIX_HOME": str(run.dix.home)}, stdin=watch, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(watch)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        os.close(held)  # also after a clean stop: there is nothing to stop then
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(60)
        for process in alive(run.processes):
            print(f"killed what was left: {process}")
            process.kill()


# Between start and stop, in this order.
PARTS = {"warm-up": warm_up, "two turns": two_turns, "agentx": agentx, "lost rank": lose_a_rank}


def table(run: Served) -> str:
    """What was found, for the reader of a log."""
    lines = [f"\n{run.options.ranks} ranks, layers {run.options.layers or 'all'}, {time.monotonic() - run.began_s:.0f} s in all"]
    for name, result in run.found.items():
        facts = ", ".join(f"{key} {value}" for key, value in result.items() if not isinstance(value, list))
        lines.append(f"{name:12s} {facts}")
        for row in (row for value in result.values() if isinstance(value, list) for row in value):
            lines.append(
                f"{'':14s}" + "  ".join(f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in row.items())
            )
    report = run.options.out / "agentx.txt"
    return "\n".join([*lines, report.read_text() if report.exists() else ""])


def make_model(run: Served) -> None:
    options = run.options
    layers = [int(n) for n in options.layers.split(",")] if options.layers else list(range(40))
    cpu = options.device == "cpu"
    data = excerpt(layers, stages=options.stages, engram_rows=997 if cpu else options.engram_rows)
    if cpu:
        data = small(data)
        data["text_config"] |= {"vocab_size": SMALL_VOCABULARY}
    write_text_format(write_excerpt(run.model, data))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", default="", help="released layer numbers, all 40 when empty")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--stages", type=int, default=3, help="draft stages")
    parser.add_argument("--accept", type=float, default=0.0, help="mean tokens of a verify step, whatever the drafts are")
    parser.add_argument("--minutes", type=float, default=5.0, help="window of the traces, less where the budget is short")
    parser.add_argument("--traces", default="", help="a set of `dix bench agentx`; long, bundled on a CPU")
    parser.add_argument("--concurrency", type=int, default=0, help="sessions replayed at once; four a rank when 0")
    parser.add_argument("--engram-rows", type=int, default=200_000, help="rows of an n-gram column; 16 million in the release")
    parser.add_argument("--parts", default=",".join(PARTS), help="what runs between start and stop")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--start-limit", type=float, default=300.0, help="seconds until ready at most")
    parser.add_argument("--set", action="append", default=[], help="a further setting of the server")
    options = parser.parse_args()
    if unknown := set(options.parts.split(",")) - PARTS.keys():
        parser.error(f"--parts {sorted(unknown)} are none of: {', '.join(PARTS)}")
    options.out = options.out.resolve()
    options.traces = options.traces or ("bundled" if options.device == "cpu" else "long")
    options.concurrency = options.concurrency or 4 * options.ranks
    shutil.rmtree(options.out / "home", ignore_errors=True)
    run = Served(options, CPU if options.device == "cpu" else CUDA)
    make_model(run)
    with nothing_left(run):
        run.part("start", functools.partial(start, run))
        for name in run.parts if run.url else ():
            run.part(name, functools.partial(PARTS[name], run))
        if run.url:
            run.part("stop", functools.partial(stop, run))
        print(table(run), flush=True)
    return 1 if any("failed" in result for result in run.found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
