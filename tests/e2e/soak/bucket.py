"""How much CPU time a run may take: a leaky bucket that the processes fill and time drains."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CpuBucket:
    """Drains `share` of one core, and holds `burst_s` seconds of CPU time before load has to wait.

    It never falls below empty, so a quiet hour is no credit for a busy one; and it does not rise while the run is paused, so what an
    idle server uses meanwhile is no debt. Both times only grow: `cpu_s` over all processes of the run, `now_s` on a monotonic clock.
    """

    share: float
    burst_s: float
    level_s: float = 0.0
    _cpu_s: float = field(default=0.0, repr=False)
    _now_s: float = field(default=0.0, repr=False)

    def update(self, cpu_s: float, now_s: float, paused: bool = False) -> bool:
        """Takes in what was used since the last call. Whether load has to wait."""
        level = max(0.0, self.level_s + (cpu_s - self._cpu_s) - self.share * (now_s - self._now_s))
        self.level_s = min(level, self.level_s) if paused else level
        self._cpu_s, self._now_s = cpu_s, now_s
        return self.level_s > self.burst_s
