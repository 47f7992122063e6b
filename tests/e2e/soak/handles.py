"""Whether a process gains handles: threads, open files, sockets, mapped segments, judged by the floors of parts of its life.

How many connections are open follows the load, so a mean says nothing; what is leaked is never given back and raises the floor. One floor
may be an accident (a sample while ranks restart has fewer), so medians of floors are compared. A rise by one is none: a disk tier that
fills opens one file more, while a leak per restart or per hundred requests adds several in a run that is long enough to judge.
"""

from __future__ import annotations

import numpy as np

PARTS = 9
MOST_RISE = 1
AFTER_RESTART_S = 60.0


def calm(seconds: np.ndarray, restarts: list[tuple[float, float]]) -> np.ndarray:
    """[samples] bool: all ranks are up, and have been for a minute. restarts: (killed, serves again) in seconds, of the whole run."""
    keep = np.ones(len(seconds), dtype=bool)
    for killed_s, back_s in restarts:
        keep &= (seconds < killed_s) | (seconds > back_s + AFTER_RESTART_S)
    return keep


def floors(counts: np.ndarray) -> tuple[int, int]:
    """(early, late): medians of the floors of the first and the last third of `PARTS` parts of equally many samples.

    counts: one kind of handle of one process, at least `PARTS` samples in order of time.
    """
    found = [int(part.min()) for part in np.array_split(counts, PARTS)]
    third = PARTS // 3
    return int(np.median(found[:third])), int(np.median(found[-third:]))
