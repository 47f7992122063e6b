"""How much may be restored in a step, so that decoding requests keep their pace.

A restore runs on the model's stream, so its copy makes the step behind it longer. While somebody decodes, copies may take a share of
the time that passes: a restore that took more is paid off before the next one begins. Nobody decoding, only the bound per step holds.
"""

from __future__ import annotations

from collections.abc import Callable


class RestoreBudget:
    """A restore costs the time of its calls, until its path is let go, and that of its copies: their bytes by the bus's measured speed.

    most_bytes: per step; one restore always goes through. share: by which restores may lengthen the steps of others, 0 for no limit.
    gb_s: measured speed; 0 on a CPU, where the prefill behind a restore takes so much longer that waiting helps nobody.
    """

    def __init__(self, most_bytes: int, share: float, gb_s: float, clock: Callable[[], float]) -> None:
        self._most_bytes, self._share, self._gb_s, self._clock = most_bytes, share, gb_s, clock
        self._step_bytes: int | None = None  # None until steps are announced: then there is no limit
        self._debt_s = 0.0
        self._began_s = clock()
        self._limits = False

    def begin_step(self, *, decoding: bool) -> None:
        """A scheduling step begins. decoding: others wait for their next token."""
        now = self._clock()
        self._limits = decoding and self._share > 0 and self._gb_s > 0
        # The time that passes contains the restores themselves; they are to be `share` of the rest.
        paid_s = self._share / (1 + self._share) * (now - self._began_s)
        self._debt_s = max(0.0, self._debt_s - paid_s) if self._limits else 0.0
        self._step_bytes, self._began_s = 0, now

    @property
    def exhausted(self) -> bool:
        """Whether no restore of any size may begin in this step."""
        return self._debt_s > 0.0

    def allows(self, num_bytes: int) -> bool:
        """Whether a restore of that size may begin in this step."""
        if self._step_bytes is None:
            return True
        return not self.exhausted and (self._step_bytes == 0 or self._step_bytes + num_bytes <= self._most_bytes)

    def charge(self, seconds: float) -> None:
        """Time that a sequence took from the others although nothing was restored yet."""
        if self._limits:
            self._debt_s += seconds

    def spend(self, num_bytes: int, seconds: float = 0.0) -> None:
        """A restore was enqueued, which took its caller `seconds`."""
        if self._step_bytes is None:
            return
        self._step_bytes += num_bytes
        if self._limits:
            self._debt_s += seconds + num_bytes / (self._gb_s * 1e9)
