"""One run of the built-in load generator: preflight, child process, samples of the server's counters, verdict, tables."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from deepinfer_cli.api import Api, RequestRefused
from deepinfer_cli.bench.load import Job
from deepinfer_cli.bench.preflight import Server
from deepinfer_cli.bench.prompts import make_conversations, word_counter
from deepinfer_cli.bench.recipe import Recipe
from deepinfer_cli.bench.runs import SCHEMA, new_run, read_lines
from deepinfer_cli.doctor import environment_snapshot
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.models import STAMP
from deepinfer_cli.outputs import write_json
from deepinfer_cli.ui import Bar
from hicache.errors import DixError
from server.errors import ServerUnreachable

DRAIN_S = 30.0
COUNTERS_AGE_S = 1.2  # `/deepinfer/metrics` may be one second old


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run counts, and why not."""

    status: str
    valid: bool
    reasons: list[str]
    counts: dict[str, int]


class Run:
    """One run directory from its first byte to its verdict. Whatever stage fails, what was measured is kept."""

    def __init__(self, call: Invocation, recipe: Recipe, server: Server, api: Api, key: str, labels: Mapping[str, str]) -> None:
        self._call, self._recipe, self._server, self._api, self._key = call, recipe, server, api, key
        self.folder = new_run(call.paths.runs, recipe.name)
        self._body: dict[str, Any] = {
            "schema": SCHEMA, "id": self.folder.name, "recipe": recipe.name, "recipe_hash": recipe.fingerprint(), "status": "running",
            "valid": False, "comparable": True, "reasons": [], "labels": dict(labels), "started_unix_s": time.time(), "window_s": None,
            "server": {"url": server.url, "model": server.model, "ranks": server.ranks, "ours": server.ours, "tiny": server.tiny},
            "harness": {"name": "dix load", "version": 1}, "notes": list(server.notes), "stamp": STAMP if server.tiny else None,
            "command": f"dix bench run {recipe.name} --url {server.url}",
        }  # fmt: skip
        write_json(self.folder / "run.json", self._body)
        write_json(self.folder / "config.json", {"settings": call.resolved.plain(), "recipe": recipe.plain()})
        write_json(self.folder / "environment.json", environment_snapshot())

    def execute(self) -> tuple[Verdict, int]:
        """Drive the load. Returns the verdict and the exit code."""
        interrupted = False
        before = self._settled_counters()
        try:
            job = self._write_job()
            interrupted = self._drive(job)
        except OSError as error:
            self._close(Verdict("partial", False, [f"{error.strerror}: {error.filename or self.folder}"], {}), before)
            raise
        except DixError as error:
            self._close(Verdict("failed", False, [str(error)], {}), before)
            raise
        except SystemExit:  # SIGTERM, or the terminal is gone: what was measured is kept
            self._close(self._judged(interrupted=True), before)
            raise
        verdict = self._judged(interrupted)
        self._close(verdict, before)
        if interrupted:
            return verdict, ExitCode.INTERRUPTED
        return verdict, ExitCode.OK if verdict.valid else ExitCode.INVALID

    def _judged(self, interrupted: bool) -> Verdict:
        return judge(self._recipe, self._call.settings.bench.max_failed, read_lines(self.folder / "requests.jsonl"), interrupted)

    def _settled_counters(self) -> dict[str, Any] | None:
        """The server's counters once they include everything that has ended."""
        if self._server.ours:
            time.sleep(COUNTERS_AGE_S)
        return self._counters()

    def _counters(self) -> dict[str, Any] | None:
        if not self._server.ours:
            return None
        try:
            counters: dict[str, Any] = self._api.get("/deepinfer/metrics")
        except (RequestRefused, ValueError):
            return None
        return counters

    def _write_job(self) -> Path:
        count = self._count if self._server.counts_tokens else word_counter(self._server.tokens_per_word)
        conversations = make_conversations(self._recipe, count)
        records = self.folder / "requests.jsonl"
        job = Job(
            self._server.url,
            self._server.model,
            self._recipe,
            conversations,
            records,
            self._server.ours,
            self._call.settings.bench.client_timeout_s,
            ignore_eos=self._server.ours or "ignore_eos" in self._server.fields,
            bypass=self._server.bypass,
            salt=self._server.salt,
        )
        path = self.folder / "job.json"
        write_json(path, job.to_json())
        return path

    def _count(self, text: str) -> int:
        return self._api.count_tokens({"model": self._server.model, "prompt": text})

    def _drive(self, job: Path) -> bool:
        """Run the child, draw its progress, sample the server. Returns whether it was interrupted."""
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "deepinfer_cli.bench.load", str(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(self.folder / "load.err").open("wb"), text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(self._key + "\n")
        child.stdin.close()
        sampler = Sampler(self._server, self._key, self.folder / "samples.jsonl", self._call.settings.bench.sample_interval_s)
        sampler.start()
        try:
            with self._call.ui.progress(self._recipe.name, self._recipe.requests) as bar:
                interrupted = self._follow(child, child.stdout, bar)
        finally:
            sampler.stop()
            _end(child)
        if child.returncode not in (0, -signal.SIGINT) and not interrupted:
            text = (self.folder / "load.err").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise LoadFailed(
                f"the load generator ended with {child.returncode}: {text[-1] if text else 'no message'}",
                hint=f"see {self.folder / 'load.err'}",
            )
        return interrupted

    def _follow(self, child: subprocess.Popen[str], lines: IO[str], bar: Bar) -> bool:
        interrupted = False
        arrived: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pump, args=(lines, arrived), daemon=True).start()
        with (self.folder / "progress.jsonl").open("a", encoding="utf-8") as log:
            while True:
                try:
                    line = arrived.get()
                    if line is None:
                        return interrupted
                    log.write(line)
                    self._show(json.loads(line), bar)
                except KeyboardInterrupt:
                    if interrupted:
                        raise
                    interrupted = True
                    self._call.ui.note("stopping: what was measured is kept; Ctrl-C again stops at once", "warning")
                    child.send_signal(signal.SIGINT)
                except SystemExit:
                    child.send_signal(signal.SIGINT)
                    raise

    def _show(self, event: dict[str, Any], bar: Bar) -> None:
        if self._call.json:
            self._call.ui.event(event.pop("event"), **event)
        elif event["event"] == "progress":
            ttft = f" · TTFT p50 {event['ttft_p50_s'] * 1e3:,.0f} ms" if event["ttft_p50_s"] is not None else ""
            failed = f" · {event['failed']} failed" if event["failed"] else ""
            rate = event["output_tokens"] / event["at_s"] if event["at_s"] else 0.0
            bar.update(event["done"], f"{event['done']} of {self._recipe.requests}{failed}{ttft} · {rate:,.0f} tok/s")
        else:
            self._call.ui.warn(str(event.get("text", event)))

    def _close(self, verdict: Verdict, before: dict[str, Any] | None) -> None:
        from deepinfer_cli.bench.tables import write_tables

        after = None
        with contextlib.suppress(ServerUnreachable):
            after = self._settled_counters()
        requests = write_tables(self.folder, self.folder.name)
        window_s = float(requests["end_s"].max() - requests["start_s"].min()) if len(requests) else 0.0
        self._body |= {
            "status": verdict.status, "valid": verdict.valid, "reasons": verdict.reasons, "counts": verdict.counts, "window_s": window_s,
            "ended_unix_s": time.time(), "counters_before": before, "counters_after": after,
        }  # fmt: skip
        write_json(self.folder / "run.json", self._body)


class LoadFailed(DixError):
    """The load generator itself broke."""

    exit_code = 70


class Sampler(threading.Thread):
    """Writes the server's counters once a second. A sample that fails is left out: a gap in the time line says so."""

    def __init__(self, server: Server, key: str, path: Path, interval_s: float) -> None:
        super().__init__(daemon=True)
        self._server, self._key, self._path, self._interval_s = server, key, path, interval_s
        self._ended = threading.Event()

    def run(self) -> None:
        if not self._server.ours:
            return
        zero_s = time.perf_counter()
        api = Api(self._server.url, self._key, timeout_s=5.0)
        with self._path.open("a", encoding="utf-8") as file:
            while not self._ended.is_set():
                at_s = time.perf_counter() - zero_s
                with contextlib.suppress(ServerUnreachable, RequestRefused):
                    file.write(json.dumps({"at_s": round(at_s, 3), "metrics": api.get("/deepinfer/metrics")}) + "\n")
                self._ended.wait(max(0.0, self._interval_s - (time.perf_counter() - zero_s - at_s)))
        api.close()

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=10.0)


def judge(recipe: Recipe, default_max_failed: float, raw: list[dict[str, Any]], interrupted: bool) -> Verdict:
    """Valid means: every planned request was made, and few enough failed."""
    counts = {"planned": recipe.requests, "made": len(raw)}
    for record in raw:
        counts[str(record["outcome"])] = counts.get(str(record["outcome"]), 0) + 1
    # What an interrupt cut off or kept from starting is not the server's failure.
    bad = len(raw) - counts.get("ok", 0) - (counts.get("cancelled", 0) if interrupted else 0)
    missing = recipe.requests - len(raw)
    unsent = 0 if interrupted else max(0, missing)
    limit = default_max_failed if recipe.limits.max_failed is None else recipe.limits.max_failed
    reasons = []
    if not raw:
        reasons.append("no request was made")
    # Turns that were never sent because an earlier one failed are failures of the run as well.
    if bad + unsent > limit * recipe.requests:
        reasons.append(f"{bad} of {len(raw)} requests failed and {unsent} were never sent; the limit is {limit:.0%} of {recipe.requests}")
    if interrupted:
        reasons.append("interrupted")
    status = "partial" if interrupted or missing > 0 else "complete"
    return Verdict(status, not reasons, reasons, counts)


def _pump(lines: IO[str], out: queue.Queue[str | None]) -> None:
    for line in lines:
        out.put(line)
    out.put(None)


def _end(child: subprocess.Popen[str]) -> None:
    """The child and its group are gone when this returns."""
    try:
        child.wait(timeout=DRAIN_S if child.poll() is None else 0)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
