"""What a soak shows: memory slopes, handles, requests. Works on the files of a run, also while it still runs.

Memory is judged by anonymous pages and the share of shared memory (`own_kib`): file pages of libraries are shared with other programs, so
what is counted of them moves when those start and end. The slope of a role is the median of the slopes between any two samples of one life
(Theil and Sen), all lives together, each without its warm-up: a restart is no step in it, and a few odd samples do not move it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.soak.handles import MOST_RISE, PARTS, calm, floors
from tests.e2e.soak.samples import read_table

MOST_MB_PER_HOUR = 1.0
HANDLES = ("threads", "fds", "sockets", "segments")
Life = list[dict[str, float]]
Restarts = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Role:
    """One process role. Memory in MB of the first and last judged tenth; slope in MB per hour, None without a life that is long enough.

    `handles` maps threads, fds, sockets and segments to their early and late floors while nothing restarts (`handles.py`).
    """

    role: str
    lives: int
    judged_minutes: float
    first_mb: float
    last_mb: float
    slope: float | None
    pss_slope: float | None
    handles: dict[str, tuple[int, int]]

    @property
    def complaints(self) -> list[str]:
        found = []
        if self.slope is not None and self.slope > MOST_MB_PER_HOUR:
            found.append(f"{self.role}: memory grows by {self.slope:.2f} MB per hour")
        found += [f"{self.role}: {name} grow from {a} to {b}" for name, (a, b) in self.handles.items() if b > a + MOST_RISE]
        return found

    def line(self) -> str:
        if self.slope is None:
            return f"{self.role:16} {self.lives} lives, none long enough to judge"
        handles = ", ".join(f"{name} {a} -> {b}" for name, (a, b) in self.handles.items())
        return (
            f"{self.role:16} {self.lives} lives, {self.judged_minutes:.0f} min judged: "
            f"{self.first_mb:.1f} -> {self.last_mb:.1f} MB, {self.slope:+.2f} MB/h (PSS {self.pss_slope:+.2f}); {handles}"
        )


@dataclass(slots=True)
class Verdict:
    """`complaints` is empty when everything held."""

    complaints: list[str] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        lines = [role.line() for role in self.roles]
        lines += [f"{name}: {value}" for name, value in self.facts.items()]
        lines += ["verdict: good" if not self.complaints else "verdict: NOT good", *self.complaints]
        return "\n".join(lines) + "\n"

    def document(self) -> dict[str, Any]:
        return {"good": not self.complaints, "complaints": self.complaints, "roles": [asdict(role) for role in self.roles], **self.facts}


def slope_per_hour(lives: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Median of the slopes between any two samples of the same life; times in seconds."""
    slopes = []
    for seconds, values in lives:
        first, second = np.triu_indices(len(seconds), k=1)
        distance = seconds[second] - seconds[first]
        slopes.append((values[second] - values[first])[distance > 0] / distance[distance > 0])
    return float(np.median(np.concatenate(slopes))) * 3600


def judge_role(role: str, lives: list[Life], warm_s: float, restarts: Restarts) -> Role:
    """lives: samples of each process that played the role. A life counts when as much of it again lies behind its warm-up."""
    warm = [[sample for sample in life if sample["age_s"] >= warm_s] for life in lives]
    judged = [life for life in warm if len(life) >= PARTS and life[-1]["age_s"] >= 2 * warm_s]
    if not judged:
        return Role(role, len(lives), 0.0, 0.0, 0.0, None, None, {})

    def slope(column: str) -> float:
        return slope_per_hour([(_column(life, "elapsed_s"), _column(life, column) * 1024 / 1e6) for life in judged])

    longest = max(judged, key=len)
    tenth, own = max(1, len(longest) // 10), _column(longest, "own_kib") * 1024 / 1e6
    quiet = calm(_column(longest, "elapsed_s"), restarts)
    handles = {name: floors(_column(longest, name)[quiet]) for name in HANDLES if quiet.sum() >= PARTS}
    minutes = sum(life[-1]["elapsed_s"] - life[0]["elapsed_s"] for life in judged) / 60
    first, last = float(np.median(own[:tenth])), float(np.median(own[-tenth:]))
    return Role(role, len(lives), minutes, first, last, slope("own_kib"), slope("pss_kib"), handles)


def restarts_of(events: list[dict[str, Any]]) -> Restarts:
    """(killed, serves again) of each kill, in seconds; one that is not over reaches to the end of all time."""
    found: Restarts = []
    for event in events:
        if event["event"] == "kill":
            found.append((event["elapsed_s"], float("inf")))
        elif event["event"] == "serves again" and found:
            found[-1] = (found[-1][0], event["elapsed_s"])
    return found


def _column(life: Life, name: str) -> np.ndarray:
    return np.array([sample[name] for sample in life], dtype=float)


def read_lives(path: Path) -> dict[str, list[Life]]:
    lives: dict[str, dict[str, Life]] = defaultdict(lambda: defaultdict(list))
    for row in read_table(path):
        sample = {name: float(value) for name, value in row.items() if name != "role"}
        lives[row["role"]][row["life"]].append(sample)
    return {role: list(found.values()) for role, found in lives.items()}


def judge(out: Path) -> Verdict:
    """The verdict on the files in `out`: samples.csv, host.csv, requests.csv, events.jsonl, and end.json of a run that is over."""
    settings = json.loads((out / "settings.json").read_text())
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    restarts, verdict = restarts_of(events), Verdict()
    lives = sorted(read_lives(out / "samples.csv").items())
    verdict.roles = [judge_role(role, of_role, settings["warm_s"], restarts) for role, of_role in lives]
    verdict.complaints += [complaint for role in verdict.roles for complaint in role.complaints]
    if not any(role.slope is not None for role in verdict.roles if role.role.startswith("rank")):
        verdict.complaints.append("no rank lived long enough to judge its memory")
    _judge_requests(out, verdict)
    _judge_files(out, verdict)
    verdict.facts["kills"] = sum(event["event"] == "kill" for event in events)
    pauses = [event["seconds"] for event in events if event["event"] == "resumed"]
    verdict.facts["pauses"] = f"{len(pauses)}, {sum(pauses) / 60:.1f} min in all"
    if not (out / "end.json").exists():
        verdict.complaints.append("the run is not over")
        return verdict
    end = json.loads((out / "end.json").read_text())
    verdict.facts |= {"minutes": end["minutes"], "share of one core": end["cpu_share"], "server": end["counters"]}
    verdict.complaints += end["leaks"]
    return verdict


def _judge_requests(out: Path, verdict: Verdict) -> None:
    rows = read_table(out / "requests.csv")
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row["outcome"]] += 1
    verdict.facts["requests"] = dict(sorted(counts.items()))
    verdict.facts["errors"] = sorted({row["detail"][:90] for row in rows if row["outcome"] == "error"})[:8]
    verdict.complaints += [
        f"request {row['kind']} at {row['began_s']} s is {row['outcome']}: {row['detail']}"
        for row in rows
        if row["outcome"] in ("lost", "wrong")
    ]


def _judge_files(out: Path, verdict: Verdict) -> None:
    """Shared-memory files: no more at the end than at the beginning. Sizes of logs and disk tier are bounded and told."""
    rows = read_table(out / "host.csv")
    if len(rows) < PARTS:
        return
    first, last = floors(np.array([int(row["shm_files"]) for row in rows]))
    if last > first + MOST_RISE:
        verdict.complaints.append(f"shared-memory files grow from {first} to {last}")
    verdict.facts["files"] = f"{first} -> {last} in shared memory, home {int(rows[0]['home_bytes']) / 1e6:.1f} -> " + (
        f"{int(rows[-1]['home_bytes']) / 1e6:.1f} MB in {rows[0]['home_files']} -> {rows[-1]['home_files']} files"
    )
