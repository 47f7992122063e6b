"""Several runs that belong together: the cells of a sweep, repeated and alternated, each in a run directory of its own."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_cli.api import Api
from deepinfer_cli.bench.cells import Cell, in_order
from deepinfer_cli.bench.compiled import await_compiled
from deepinfer_cli.bench.harness import Run
from deepinfer_cli.bench.preflight import preflight
from deepinfer_cli.bench.runs import list_runs
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from hicache.errors import DixError
from server.errors import ServerUnreachable

CELL, SWEEP = "cell", "sweep"  # labels that hold a campaign together


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. url: the server of cells that name none. model: what to serve for cells with settings of a server."""

    cells: list[Cell]
    url: str = ""
    repeats: int = 1
    order: str = "abba"
    model: str = "tiny"
    labels: Mapping[str, str] = field(default_factory=dict)
    fail_fast: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(3))

    @property
    def many(self) -> bool:
        return len(self.cells) > 1

    def labels_of(self, cell: Cell) -> dict[str, str]:
        own = {CELL: cell.name, SWEEP: self.id} | {key: str(value) for key, value in cell.values.items()} if self.many else {}
        return {**own, **self.labels}


@dataclass(slots=True)
class Campaign:
    """What came of a plan: run directories by cell, and the worst exit code."""

    folders: list[list[Path]]
    code: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)


class Conductor:
    """Carries a plan out. A failed cell does not keep the others from running, unless the plan says so."""

    def __init__(self, call: Invocation, plan: Plan, key: str) -> None:
        self._call, self._plan, self._key = call, plan, key
        self._told: set[str] = set()

    def run(self, *, resume: bool = False) -> Campaign:
        """Raises: ServerUnreachable and the like when there is one cell, or under `fail_fast`."""
        plan = self._plan
        out = Campaign([[] for _ in plan.cells])
        done = self._done() if resume else [[] for _ in plan.cells]
        order = in_order(len(plan.cells), plan.repeats, plan.order)
        for position, index in enumerate(order):
            if done[index]:
                out.folders[index].append(done[index].pop())
                out.skipped += 1
                continue
            try:
                code = self._one(plan.cells[index], f"run {position + 1} of {len(order)}", out.folders[index])
            except DixError as error:
                if plan.fail_fast or not plan.many:
                    raise
                self._call.ui.warn(f"{plan.cells[index].name}: {error}")
                out.failures.append(f"{plan.cells[index].name}: {error}")
                code = int(error.exit_code)
            out.code = max(out.code, code)
            if code == ExitCode.INTERRUPTED or (code and plan.fail_fast):
                break
        return out

    def _done(self) -> list[list[Path]]:
        """Valid runs of this campaign, by cell, that asked for the same work."""
        out: list[list[Path]] = [[] for _ in self._plan.cells]
        for run in list_runs(self._call.paths.runs):
            labels = run.get("labels") or {}
            for index, cell in enumerate(self._plan.cells):
                mine = labels.get(SWEEP) == self._plan.id and labels.get(CELL) == cell.name
                if mine and run.get("valid") and run.get("recipe_hash") == cell.recipe.fingerprint():
                    out[index].append(self._call.paths.runs / str(run["id"]))
        return out

    def _one(self, cell: Cell, which: str, folders: list[Path]) -> int:
        with self._server(cell) as url:
            api = Api(url, self._key)
            try:
                await_compiled(api, self._call.ui)
                server = preflight(api, cell.recipe)
                for note in server.notes:
                    self._tell_once(note)
                run = Run(self._call, cell.recipe, server, api, self._key, self._plan.labels_of(cell))
                folders.append(run.folder)
                what = cell.name if self._plan.many else cell.recipe.name
                self._call.ui.note(f"{what} · {server.model} at {server.url} · {cell.recipe.requests} requests · {which}", "quiet")
                verdict, code = run.execute()
            finally:
                api.close()
        for reason in verdict.reasons:
            self._call.ui.warn(f"not valid: {reason}")
        return code

    def _tell_once(self, note: str) -> None:
        if note not in self._told:
            self._told.add(note)
            self._call.ui.warn(note)

    @contextmanager
    def _server(self, cell: Cell) -> Iterator[str]:
        """The cell's server: named, given, or started for it with its settings and stopped afterwards."""
        if not cell.engine:
            yield cell.url or self._plan.url
            return
        name = f"sweep-{self._plan.id}"
        settings = [word for key, value in cell.engine.items() for word in ("--set", f"{key}={value}")]
        self._call.ui.note(f"starting {self._plan.model} with {' '.join(settings[1::2])}", "quiet")
        try:
            started = _dix("start", self._plan.model, "--name", name, "--port", "0", "--json", *settings)
            yield str(json.loads(started.splitlines()[-1])["url"])
        finally:
            _dix("stop", name, "--json", check=False)


def _dix(*words: str, check: bool = True) -> str:
    """Another `dix` command in its own process. Raises: ServerUnreachable with that command's own words."""
    done = subprocess.run([sys.executable, "-P", "-m", "deepinfer_cli", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.startswith("error:")] or done.stderr.strip().splitlines()
        raise ServerUnreachable(f"dix {' '.join(words)} failed: {lines[0] if lines else done.returncode}", hint="run it by hand to see why")
    return done.stdout
