"""Memory and handles of every process over time, with kills and pauses."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tests.e2e.soak.verdict import read_lives

PANELS = (("own_kib", "memory, MB", 1024 / 1e6), ("fds", "open files and sockets", 1), ("threads", "threads", 1))


def draw(out: Path, target: Path) -> None:
    """Read samples.csv and events.jsonl of a run, write a PNG."""
    roles = dict(sorted(read_lives(out / "samples.csv").items()))
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(11, 10), sharex=True, layout="constrained")
    for axis, (column, label, scale) in zip(axes, PANELS, strict=True):
        for number, (role, lives) in enumerate(roles.items()):
            for life in lives:
                minutes = [sample["elapsed_s"] / 60 for sample in life]
                name = role if life is lives[0] else None
                axis.plot(minutes, [sample[column] * scale for sample in life], color=f"C{number % 10}", linewidth=1.2, label=name)
        for event in events:
            if event["event"] == "kill":
                axis.axvline(event["elapsed_s"] / 60, color="#c0392b", linewidth=0.6, linestyle=":")
            elif event["event"] == "resumed":
                axis.axvspan((event["elapsed_s"] - event["seconds"]) / 60, event["elapsed_s"] / 60, color="#888888", alpha=0.2, linewidth=0)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    axes[0].legend(loc="center right", fontsize=8, ncols=2)
    axes[0].set_title("soak: dotted lines are killed ranks, grey bands pauses of the load", fontsize=10)
    axes[-1].set_xlabel("minutes")
    figure.savefig(target, dpi=110)
    plt.close(figure)
