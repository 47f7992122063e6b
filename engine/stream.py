"""Where steps are computed: in order, one after the other, beside the thread that plans them or in it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The result of a job."""

    def result(self) -> T_co:
        """Waits for the job. Raises what the job raised."""


class Stream(Protocol):
    """Runs jobs in the order in which they were submitted, never two at a time."""

    def submit(self, job: Callable[[], T]) -> Pending[T]: ...

    def close(self) -> None:
        """Wait for all jobs and take no more. Idempotent."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    value: T

    def result(self) -> T:
        return self.value


class CallerStream:
    """Runs every job at once in the calling thread. On a GPU that means to enqueue it."""

    def submit(self, job: Callable[[], T]) -> Done[T]:
        return Done(job())

    def close(self) -> None:
        return None


class WorkerStream:
    """Runs jobs in a thread of its own. Native steps and most operations of torch release the interpreter meanwhile."""

    def __init__(self) -> None:
        # The current device belongs to a thread; the caller has chosen it.
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        self._executor = ThreadPoolExecutor(1, "steps", _enter_device, (device,))

    def submit(self, job: Callable[[], T]) -> Any:
        return self._executor.submit(job)

    def close(self) -> None:
        self._executor.shutdown(wait=True)


def _enter_device(device: int) -> None:
    if device >= 0:
        torch.cuda.set_device(device)
