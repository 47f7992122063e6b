"""When a failed group of ranks starts again, and when the supervisor gives up."""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_S = 600.0
PAUSES_S = (1.0, 5.0, 30.0)


@dataclass(slots=True)
class RestartPolicy:
    """At most three restarts in ten minutes, with growing pauses; `never` gives up at once."""

    mode: str
    _failures_s: list[float] = field(default_factory=list)

    def next_pause_s(self, now_s: float) -> float | None:
        """Seconds to wait before the next start, or None: stop for good."""
        if self.mode == "never":
            return None
        self._failures_s = [at for at in self._failures_s if now_s - at < WINDOW_S]
        if len(self._failures_s) >= len(PAUSES_S):
            return None
        self._failures_s.append(now_s)
        return PAUSES_S[len(self._failures_s) - 1]
