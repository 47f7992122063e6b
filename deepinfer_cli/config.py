"""Settings of the benchmarks (section `bench`) and of what is drawn on the screen (section `ui`)."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.knob import check_knobs, knob


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What `dix bench` assumes when neither the recipe nor a flag says otherwise."""

    max_failed: float = knob(0.10, "Share of failed requests above which a run is not valid.", ge=0, le=1)
    client_timeout_s: float = knob(600.0, "Longest time that the load generator waits for the next byte.", unit="s", gt=0)
    sample_interval_s: float = knob(1.0, "Time between two samples of the server's counters.", unit="s", gt=0)

    def __post_init__(self) -> None:
        check_knobs(self, "bench")


@dataclass(frozen=True, slots=True)
class UiConfig:
    """How the screen looks. `auto` follows the terminal and the locale."""

    unicode: bool | str = knob("auto", "Glyphs beyond ASCII.", choices=(True, False, "auto"))
    color: bool | str = knob("auto", "Colour; NO_COLOR and --no-color win.", choices=(True, False, "auto"))

    def __post_init__(self) -> None:
        check_knobs(self, "ui")
