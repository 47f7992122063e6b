"""Exact match of held-out answers, teacher-forced: right when every answer token, EOS included, is the argmax given the reference prefix.

That equals greedy generation. `build` runs in a process of its own without torch; `score` packs the examples into training batches.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from recipes.tiny.corpus import Sample
from recipes.tiny.heldout import examples
from recipes.tiny.packing import ALIGN, KEEP


def build(path: Path, count: int, long_count: int) -> None:
    """Write examples as one npz: ids, their offsets, answer starts and set names."""
    found = list(examples(count, long_count))
    offsets = np.cumsum([0, *(len(e.ids) for e in found)])
    np.savez(
        path,
        ids=np.concatenate([e.ids for e in found]),
        offsets=offsets,
        answers=np.array([e.answer for e in found]),
        names=np.array([e.name for e in found]),
    )


def load(path: Path) -> list[tuple[str, Sample, int]]:
    data = np.load(path)
    out = []
    for i, (name, answer) in enumerate(zip(data["names"], data["answers"], strict=True)):
        ids = data["ids"][data["offsets"][i] : data["offsets"][i + 1]]
        out.append((str(name), Sample(ids, np.ones(len(ids), np.float32), "text"), int(answer)))
    return out


def score(found: list[tuple[str, Sample, int]], trainer, rows: int, truncated: bool) -> dict[str, float]:
    """Share of right answers of every set. trainer: a `train.Trainer`; its current options are used."""
    totals: dict[str, list[bool]] = defaultdict(list)
    waiting = [item for item in sorted(found, key=lambda item: -len(item[1].ids)) if len(item[1].ids) <= min(rows, trainer.options.max_len)]
    while waiting:
        room, chosen, rest = rows, [], []
        for item in waiting:
            size = -(-len(item[1].ids) // ALIGN) * ALIGN
            (chosen if size <= room else rest).append(item)
            room -= size if size <= room else 0
        waiting = rest
        right = trainer.right_rows(
            [sample for _, sample, _ in chosen], [max(0, answer - KEEP) if truncated else 0 for _, _, answer in chosen]
        )
        at = 0
        for name, sample, answer in chosen:
            totals[name].append(bool(right[at + answer - 1 : at + len(sample.ids) - 1].all()))
            at += -(-len(sample.ids) // ALIGN) * ALIGN
    return {name: round(sum(marks) / len(marks), 4) for name, marks in totals.items()}


if __name__ == "__main__":
    build(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
