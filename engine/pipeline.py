"""Steps on their way through the device. At most one is computed whose tokens nobody has read yet."""

from __future__ import annotations

from dataclasses import dataclass

from engine.late_tokens import later_rows
from engine.readout import Readout
from engine.step import Sampled, Step
from engine.step_runner import Computed, Late, StepRunner
from engine.stream import Pending, Stream


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that is computed."""

    step: Step
    sampled: Pending[Sampled | Readout]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose forward pass is on its way; its sampling waits for the tokens of the step before it."""

    step: Step
    computed: Pending[Computed]


class Pipeline:
    """Three calls per step: `launch` it, `land` the one before it, let it `sample`."""

    def __init__(self, stream: Stream, steps: StepRunner) -> None:
        self._stream, self._steps = stream, steps
        self._flight: Flight | None = None

    def launch(self, step: Step) -> Launched:
        """Start a step's forward pass, behind the step in flight."""
        before, steps = self._flight, self._steps
        late = None if before is None else Late(later_rows(step, before.step), before.sampled.result)
        return Launched(step, self._stream.submit(lambda: steps.forward(step, late)))

    def sample(self, launched: Launched) -> None:
        """Start the sampling of a launched step, which then is the one in flight."""
        assert self._flight is None, "a step is sampled before the one in front of it has landed"
        steps, computed = self._steps, launched.computed
        self._flight = Flight(launched.step, self._stream.submit(lambda: steps.sample(computed.result())))

    def land(self) -> tuple[Step, Sampled] | None:
        """Wait for the step in flight and take it out. None when there is none."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        sampled = flight.sampled.result()
        return flight.step, sampled.read() if isinstance(sampled, Readout) else sampled

    def close(self) -> None:
        """Wait until nothing is computed any more."""
        self._stream.close()
