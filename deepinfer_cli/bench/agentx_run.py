"""One AgentX run from its first byte to its verdict. Whatever stage fails, what was measured is kept."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_cli.api import Api, RequestRefused
from deepinfer_cli.bench import agentx_plan, agentx_verdict
from deepinfer_cli.bench.agentx_collect import HARNESS_DIR, HARNESS_LOG, NEAR_S, SAMPLES, Collected, collect, write_tables
from deepinfer_cli.bench.agentx_live import LiveView, ServerSampler, as_event, one_line
from deepinfer_cli.bench.agentx_preflight import Preflight
from deepinfer_cli.bench.agentx_sets import GENERATED
from deepinfer_cli.bench.agentx_traces import ideal_hit_share
from deepinfer_cli.bench.agentx_verdict import Evidence, Verdict
from deepinfer_cli.bench.aiperf_command import (
    KEY_VARIABLE,
    AgentxPlan,
    arguments,
    child_environment,
    command_text,
    launch_line,
    scratch_dir,
    special_environment,
)
from deepinfer_cli.bench.aiperf_harness import Harness
from deepinfer_cli.bench.aiperf_process import ClockWatch, CpuWatch, HarnessProcess
from deepinfer_cli.bench.runs import SCHEMA, new_run
from deepinfer_cli.doctor import environment_snapshot
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.models import STAMP, is_tiny
from deepinfer_cli.outputs import write_json
from server.errors import ServerUnreachable

LOOK_S = 0.25
SAMPLE_S = 0.25  # the window's first counters must lie close to its start
EVENT_S = 1.0
EXPORT_S = 30.0  # the harness's partial export after an interrupt
NOTHING_YET_S = 5.0  # before the window there is nothing to export, and the harness does not listen while it loads
LOADING_LIMIT_S = 3600.0
AFTER_WINDOW_S = 120.0  # grace and export come on top of the window; beyond, the harness itself hangs
UNOFFICIAL = "unofficial"
KILLED = -9


@dataclass(slots=True)
class Ending:
    """How the child ended. `exit_code` None: it had to be killed."""

    exit_code: int | None = None
    interrupted: bool = False
    terminated: bool = False
    stuck: bool = False


class Terminated(KeyboardInterrupt):
    """SIGTERM: as a second Ctrl-C, with its own exit code."""


def _terminated(number: int, frame: object) -> None:
    raise Terminated


class AgentxRun:
    """One run directory and one child."""

    def __init__(
        self, call: Invocation, plan: AgentxPlan, harness: Harness, found: Preflight, api: Api, labels: Mapping[str, str], key: str = ""
    ) -> None:
        self._call, self._plan, self._harness, self._found, self._api, self._key = call, plan, harness, found, api, key
        self.folder = new_run(call.paths.runs, "agentx")
        self.harness_dir, self.log = self.folder / HARNESS_DIR, self.folder / HARNESS_LOG
        self._clock, self._cpu = ClockWatch(), CpuWatch()
        self._body = self._first_body(labels)
        write_json(self.folder / "run.json", self._body)
        write_json(self.folder / "config.json", {"settings": call.resolved.plain(), "agentx": agentx_plan.plain(plan)})
        write_json(self.folder / "environment.json", environment_snapshot())

    def _first_body(self, labels: Mapping[str, str]) -> dict[str, Any]:
        found, plan = self._found, self._plan
        return {
            "schema": SCHEMA,
            "id": self.folder.name,
            "recipe": "agentx",
            "recipe_hash": agentx_plan.recipe_hash(plan),
            "status": "running",
            "valid": False,
            "comparable": False,
            "reasons": [],
            "labels": dict(labels),
            "started_unix_s": time.time(),
            "window_s": None,
            "server": {"url": found.url, "model": found.model, "ranks": found.ranks, "ours": found.ours, "tiny": is_tiny(found.model)},
            "harness": {"name": self._harness.name, "version": self._harness.version},
            "seed": plan.seed,
            "notes": list(found.notes),
            "stamp": f"{STAMP} · {UNOFFICIAL}" if is_tiny(found.model) else UNOFFICIAL,
            "command": command_for(plan),
            "ideal_hit_share": ideal_hit_share(plan.traces) if len(plan.traces.traces) <= 64 else None,
        }

    def execute(self) -> tuple[Verdict, int]:
        """Run the harness, judge what it left, and write everything down. Returns the verdict and the exit code."""
        began_s = time.time()
        before = self._server_counters()
        ending = Ending(interrupted=True)
        sampler = ServerSampler(self._api, self.folder / SAMPLES, SAMPLE_S)
        if self._found.ours:
            sampler.start()
        previous = signal.signal(signal.SIGTERM, _terminated)
        try:
            ending = self._drive(sampler)
        finally:
            signal.signal(signal.SIGTERM, previous)
            if self._found.ours:
                sampler.stop()
            shutil.rmtree(scratch_dir(self.folder), ignore_errors=True)
            verdict = self._conclude(ending, began_s, before)
        if ending.interrupted:
            return verdict, ExitCode.TERMINATED if ending.terminated else ExitCode.INTERRUPTED
        return verdict, ExitCode.OK if verdict.valid else ExitCode.INVALID

    def _server_counters(self) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = self._api.get("/deepinfer/metrics")
        except (RequestRefused, ServerUnreachable, ValueError):
            return None
        return answer

    def _drive(self, sampler: ServerSampler) -> Ending:
        for folder in ("mmap", "home"):
            (scratch_dir(self.folder) / folder).mkdir(parents=True)
        rows = arguments(self._plan, self.harness_dir)
        special = special_environment(self._call.environ, self.folder, self._plan.traces)
        (self.folder / "command.txt").write_text(command_text(str(self._harness.program), rows, special) + "\n", encoding="utf-8")
        environment = child_environment(self._call.environ, self.folder, self._plan.traces)
        environment |= {KEY_VARIABLE: self._key} if self._key else {}
        with HarnessProcess(launch_line(self._harness.program, rows, self._key), environment, self.log, self.folder) as child:
            return self._follow(child, sampler)

    def _follow(self, child: HarnessProcess, sampler: ServerSampler) -> Ending:
        """Draw until the child ends. The first Ctrl-C asks for the partial export, the second ends the child at once."""
        view = LiveView(self.harness_dir, self.log, self._plan.traces, self._plan.duration_s)
        ending, next_event_s = Ending(), 0.0
        whole_s = self._plan.duration_s + self._plan.grace_s + AFTER_WINDOW_S
        deadline_s = time.monotonic() + LOADING_LIMIT_S + whole_s
        with self._call.ui.progress("agentx", self._plan.duration_s) as bar, (self.folder / "progress.jsonl").open("a") as events:
            while (code := child.poll()) is None and time.monotonic() < deadline_s:
                try:
                    self._look(child, view, sampler)
                    if view.in_window and not ending.interrupted:
                        # Counted from the window's start: the first look sets it, later ones cannot move it back.
                        deadline_s = min(deadline_s, time.monotonic() + whole_s)
                    bar.update(view.window_done_s, one_line(view.now))
                    if time.monotonic() >= next_event_s:
                        next_event_s = time.monotonic() + EVENT_S
                        self._tell(view, events)
                    time.sleep(LOOK_S)
                except KeyboardInterrupt as stop:
                    ending.terminated = isinstance(stop, Terminated)
                    if ending.interrupted or ending.terminated:
                        ending.interrupted = True
                        child.terminate()
                        return ending
                    ending.interrupted = True
                    self._call.ui.note("stopping: what was measured is kept; Ctrl-C again stops at once", "warning")
                    child.interrupt()
                    deadline_s = time.monotonic() + (EXPORT_S if view.has_window else NOTHING_YET_S)
        ending.exit_code, ending.stuck = code, code is None
        return ending

    def _look(self, child: HarnessProcess, view: LiveView, sampler: ServerSampler) -> None:
        self._clock.look()
        view.look(sampler.first, sampler.latest)
        if view.in_window:
            self._cpu.look(child)
            if view.now.elapsed_s > NEAR_S:
                sampler.interval_s = max(SAMPLE_S, self._call.settings.bench.sample_interval_s)

    def _tell(self, view: LiveView, events: Any) -> None:
        event = as_event(view.now)
        events.write(json.dumps(event) + "\n")
        events.flush()
        if self._call.json:
            self._call.ui.event("progress", **event)

    def _conclude(self, ending: Ending, began_s: float, before: Mapping[str, Any] | None) -> Verdict:
        collected = collect(self.folder, self._plan.traces, began_s)
        verdict = self._judge(ending, collected, before, self._server_counters())
        write_tables(self.folder, collected)
        partial = ending.interrupted or ending.stuck or collected.aggregate is None
        client = agentx_verdict.client_hit_share(collected.rows)
        told = agentx_verdict.as_json(verdict)
        apart = [f"not comparable: {r.text}" for r in verdict.not_comparable]
        self._body |= {
            "status": "partial" if partial else "complete",
            "valid": verdict.valid,
            "comparable": verdict.comparable,
            "reasons": [reason.text for reason in verdict.reasons],
            "verdict": told,
            "counts": told["counts"],
            "window_s": collected.window_s,
            "ended_unix_s": time.time(),
            "harness_exit_code": ending.exit_code,
            "clock_step_s": self._clock.step_s,
            "client_cpu": self._cpu.share,
            "counters_before": collected.counters_before,
            "counters_after": collected.counters_after,
            "hit_share": {"client": client, "server": collected.server_hit_share, "scraped": collected.scraped_hit_share},
            "harness_ideal_hit_share": collected.aggregate.ideal_hit_share if collected.aggregate else None,
            "notes": [*self._found.notes, *(r.text for r in verdict.warnings), *apart],
        }
        write_json(self.folder / "run.json", self._body)
        return verdict

    def _judge(self, ending: Ending, collected: Collected, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Verdict:
        return agentx_verdict.judge(
            Evidence(
                plan=self._plan,
                rows=collected.rows,
                exit_code=KILLED if ending.stuck else ending.exit_code,
                aggregate=collected.aggregate,
                counters=collected.counters,
                server_hit_share=collected.server_hit_share,
                log=collected.log,
                interrupted=ending.interrupted,
                clock_step_s=self._clock.step_s,
                client_cpu=self._cpu.share,
                answering_model=self._found.answering_model,
                server_restarts=restarts(before, after),
                server_errors=errors_between(before, after),
                our_server=self._found.ours,
            )
        )


def command_for(plan: AgentxPlan) -> str:
    """The command that repeats this run."""
    named = plan.traces.public or plan.traces.name in GENERATED
    traces = plan.traces.name if named else plan.traces.folder
    load = f"--concurrency {plan.concurrency} --duration {plan.duration_s:g}s --cache {plan.cache}"
    return f"dix bench agentx --url {plan.url} --traces {traces} {load}"


def restarts(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> int:
    """Ranks, or the whole server, that were replaced between two samples of our own server's counters."""
    if not before or not after:
        return 0
    if before.get("boot_id") != after.get("boot_id"):
        return 1
    old = {rank.get("rank"): rank.get("generation") for rank in before.get("ranks") or []}
    return sum(rank.get("generation") != old.get(rank.get("rank"), rank.get("generation")) for rank in after.get("ranks") or [])


def errors_between(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> int | None:
    """Requests that our own server itself counts as failed; None for a server that does not count them."""

    def total(metrics: Mapping[str, Any] | None) -> int | None:
        finished = ((metrics or {}).get("requests") or {}).get("finished_total")
        return int(finished.get("error", 0)) if isinstance(finished, Mapping) else None

    first, last = total(before), total(after)
    return None if first is None or last is None else last - first
