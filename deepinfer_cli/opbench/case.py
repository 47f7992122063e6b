"""What a measurement of one operation is: inputs that exist, calls on them, the least work they need, and what to compare with.

A case module lists its cases in `CASES`; `registry.py` names the case modules. See `cases/library.py` for the smallest example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from engine.ops.registry import Op
from hicache.errors import ConfigError

Call = Callable[[], Any]
Made = TypeVar("Made")

# Inputs of one sample rotate through more than this, so that an op whose inputs are cold in the model is not timed out of the L2 cache.
COLD_BYTES = 96 * 10**6


class NotMeasured(Exception):
    """A case has nothing to time here for a reason that is no fault of ours. The message is the reason, and the record carries it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a case runs. small: the shapes of a functional check, for tests and machines without a GPU.

    `shared` keeps what several cases need (a layer's weights) until the run ends.
    """

    device: str = "cuda"
    small: bool = False
    seed: int = 0
    _made: dict[str, Any] = field(default_factory=dict)

    def shared(self, key: str, make: Callable[[], Made]) -> Made:
        """The object of this key, made once."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def drop(self, key: str) -> None:
        """Forget a shared object, so that its memory returns."""
        self._made.pop(key, None)

    def drop_others(self, prefix: str, kept: str) -> None:
        """Forget the shared objects whose keys begin with `prefix`, but for `kept`."""
        for key in [key for key in self._made if key.startswith(prefix) and key != kept]:
            self.drop(key)

    def select(self, *ops: Op) -> None:
        """Let ops run the best implementation of the device."""
        for op in ops:
            op.use(op.backends()[0] if self.device == "cuda" else "reference")

    def generator(self) -> torch.Generator:
        """The stream of random numbers of the present case; `restart` begins it anew, so that no case depends on the ones before."""
        return self.shared("generator", lambda: torch.Generator(self.device).manual_seed(self.seed))

    def restart(self) -> None:
        self.drop("generator")

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normally distributed numbers of `dtype` on the device."""
        return torch.randn(shape, device=self.device, generator=self.generator()).mul_(std).to(dtype)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case whose inputs exist.

    calls: the op on one input set each; one sample cycles through them (see `num_copies`). num_bytes, flops: the least that ONE call has to
    move and to compute; useful work only. peers: the same work by others, as calls. check: (relative error, its limit) against the
    reference, of draws the share of wrong rows, of whole layers 0 when the output is finite; None when the op copies or is the library
    itself. params: what was drawn, for example how many experts were touched. count_kernels: report how many kernels one call starts.
    """

    calls: Sequence[Call]
    num_bytes: float
    flops: float = 0.0
    peers: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    check: Callable[[], tuple[float, float]] | None = None
    params: Mapping[str, float | int | str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    count_kernels: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """What a case is held against. of: a ceiling's name ("copy", "read", "bf16", "fp8", "h2d", "d2h"), "floor" for the longer of bytes over
    copy and FLOPs over bf16, "time" for microseconds, "over_floor" for time over that floor. must and aim are lower bounds of a share
    and upper bounds of "time" and "over_floor"; None while nothing is asked. peers: peer -> least speed-up over it.
    """

    of: str
    must: float | None = None
    aim: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)

    @property
    def smaller_is_better(self) -> bool:
        return self.of in ("time", "over_floor")


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table. id as in the list of benchmarks, params what distinguishes its lines; prepare makes the inputs."""

    id: str
    params: Mapping[str, int | str]
    prepare: Callable[[Setting], Prepared]
    target: Target
    group: str = "kernels"

    @property
    def name(self) -> str:
        return " ".join([self.id, *(f"{key}={value}" for key, value in self.params.items())])


def num_copies(bytes_of_one: float, setting: Setting) -> int:
    """How many input sets a case makes so that they rotate out of the L2 cache."""
    return 1 if setting.small or setting.device == "cpu" else max(1, min(64, round(COLD_BYTES / max(bytes_of_one, 1.0) + 0.5)))


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error over the largest reference value; infinite when a NaN or an infinity stands where none belongs."""
    got, wanted = got.float(), wanted.float()
    if not torch.equal(got.isfinite(), wanted.isfinite()):
        return float("inf")
    got, wanted = got.nan_to_num(0.0, 0.0, 0.0), wanted.nan_to_num(0.0, 0.0, 0.0)
    return float((got - wanted).abs().amax() / wanted.abs().amax().clamp(min=1e-30)) if got.numel() else 0.0


def choose(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases whose name contains one of the patterns; all without any. Raises: ConfigError when a pattern fits none."""
    if not cases:
        raise ConfigError("there are no cases of this group yet", hint="dix bench kernels --list")
    for pattern in patterns:
        if not any(pattern in case.name for case in cases):
            known = ", ".join(sorted({case.id for case in cases}))
            raise ConfigError(f"no case is called {pattern!r}", hint=f"known: {known}")
    return [case for case in cases if not patterns or any(pattern in case.name for pattern in patterns)]
