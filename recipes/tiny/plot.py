"""Draw curves of one or more runs: `python -m recipes.tiny.plot OUT.png CURVES.json...`; phases follow one another on the time axis."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def points(files: list[Path]) -> list[dict[str, Any]]:
    """Step records of all files with the time counted through."""
    found, offset = [], 0.0
    for file in files:
        last = 0.0
        for record in json.loads(file.read_text(encoding="utf-8")):
            if "seconds" in record:
                last = record["seconds"]
                found.append({**record, "time": offset + last})
        offset += last
    return found


def draw(files: list[Path], out: Path) -> None:
    records = [r for r in points(files) if "accuracy" in r]  # the backbone's; the draft stages have a time axis of their own
    drafts = [r for file in files for r in json.loads(file.read_text(encoding="utf-8")) if "hits" in r]
    figure, axes = pyplot.subplots(4 if drafts else 3, 1, figsize=(9, 12 if drafts else 9))
    loss, wrong, index = axes[:3]
    loss.sharex(index)
    wrong.sharex(index)
    time = [r["time"] for r in records]
    loss.semilogy(time, [r["loss"] for r in records])
    loss.set_ylabel("loss on answers")
    for family in records[-1]["families"]:
        wrong.semilogy(time, [max(1 - r["families"].get(family, 1.0), 1e-5) for r in records], label=family, linewidth=0.9)
    wrong.set_ylabel("wrong answer tokens, share")
    wrong.legend(fontsize=7, ncol=4)
    index.plot(time, [r["index"] for r in records])
    index.set_ylabel("index divergence, nats")
    index.set_xlabel("seconds of training on one H200")
    for before, after in pairwise(records):
        if (before["phase"], before["mode"]) != (after["phase"], after["mode"]):
            for axis in (loss, wrong, index):
                axis.axvline(after["time"], color="gray", linewidth=0.6)
            loss.text(after["time"], loss.get_ylim()[1], f" {after['phase']} {after['mode']}", fontsize=7, va="top")
    if drafts:
        _draw_drafts(axes[3], drafts)
    figure.tight_layout()
    figure.savefig(out, dpi=90)


def _draw_drafts(axis: Any, records: list[dict[str, Any]]) -> None:
    time = [r["seconds"] for r in records]
    for place, hits in enumerate(zip(*(r["hits"] for r in records), strict=True), 1):
        axis.plot(time, hits, linewidth=0.9, label=f"place {place}")
    axis.set_ylabel("drafts that the model agrees with, share")
    axis.set_xlabel("seconds of draft training, the rest of the model frozen")
    axis.set_ylim(0.5, 1)
    axis.legend(fontsize=7, ncol=5)


if __name__ == "__main__":
    draw([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]))
