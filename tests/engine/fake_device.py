"""A device for simulations: runs jobs in order, at once or as late as possible, on a clock that it shares with the host."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

FORWARD, SAMPLING = 0, 1  # jobs alternate


class Job:
    """A job and, once it has run, its value and the time when it ended."""

    def __init__(self, device: FakeDevice, work: Callable[[], Any], submitted: float, cost: float) -> None:
        self._device, self._work = device, work
        self.submitted, self.cost, self.ended = submitted, cost, 0.0
        self.ran = False
        self._value: Any = None

    def run(self) -> None:
        self.ran = True
        self._value = self._work()

    def result(self) -> Any:
        self._device.finish(self)
        return self._value


class FakeDevice:
    """lazy: probability that a job runs only when its result is asked for, which is when a real device at its slowest would have it.

    A job occupies the device from the end of the one before it, but not before it was submitted. Asking for a result moves the host's
    clock to the job's end; `spend` is host time.
    """

    def __init__(self, lazy: float = 0.0, seed: int = 0, forward_s: float = 0.0, sampling_s: float = 0.0) -> None:
        self.now = 0.0
        self._free_at = 0.0
        self._lazy, self._rng = lazy, random.Random(seed)
        self._costs = (forward_s, sampling_s)
        self._count = 0
        self._queue: deque[Job] = deque()
        self._running = False

    @property
    def num_open(self) -> int:
        """Jobs that have not run."""
        return len(self._queue)

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def submit(self, job: Callable[[], Any]) -> Job:
        one = Job(self, job, self.now, self._costs[self._count % 2])
        self._count += 1
        self._queue.append(one)
        if self._rng.random() >= self._lazy:
            self._run_until(one)
        return one

    def finish(self, job: Job) -> None:
        if self._running:
            assert job.ran, "a job asks for the result of one behind it"
            return
        if not job.ran:
            self._run_until(job)
        self.now = max(self.now, job.ended)

    def _run_until(self, last: Job) -> None:
        while not last.ran:
            job = self._queue.popleft()
            self._free_at = job.ended = max(self._free_at, job.submitted) + job.cost
            self._running = True
            try:
                job.run()
            finally:
                self._running = False

    def close(self) -> None:
        while self._queue:
            self._run_until(self._queue[-1])
