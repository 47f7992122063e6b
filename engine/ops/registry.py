"""One operation, several implementations: a reference in plain torch and kernels that must agree with it.

The choice is made once at start-up (`select`), not per call. Asking for a backend that is missing is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from typing import Any

from torch import Tensor

from engine.errors import ConfigError
from engine.ops.tolerance import Tolerance

_OPS: dict[str, Op] = {}


class Op:
    """A named operation. Calling it runs the selected implementation; `reference` is the definition.

    cuda, triton: `module:function` of the kernels' launches, or "" while there is none. invariant: backend -> what runs in its place in
    batch-invariant mode. A backend that is not named there gives a row the same bits in every batch as it is, on CPUs and GPUs; tests/ops
    hold it to that.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[..., Any],
        tolerance: Tolerance,
        triton: str = "",
        cuda: str = "",
        invariant: Mapping[str, str | Callable[..., Any]] | None = None,
    ) -> None:
        assert name not in _OPS, f"op {name} is registered twice"
        self.name, self.reference, self.tolerance = name, reference, tolerance
        self._invariant = dict(invariant or {})
        self._kernels = {backend: place for backend, place in (("cuda", cuda), ("triton", triton)) if place}
        self.backend = "reference"
        self._run = self._fallback = reference
        _OPS[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def fallback(self, *args: Any, **kwargs: Any) -> Any:
        """The reference, for kernels that do not take some shape: in batch-invariant mode its invariant form."""
        return self._fallback(*args, **kwargs)

    def backends(self) -> list[str]:
        """Implementations that exist, the best first."""
        return [*(name for name in self._kernels if name in available_kernels()), "reference"]

    @property
    def has_kernels(self) -> bool:
        return bool(self._kernels)

    def missing(self) -> list[str]:
        """Why kernels that exist for this op cannot be used on this machine; empty when all can."""
        return [_MISSING[name] for name in self._kernels if name not in available_kernels()]

    def use(self, backend: str, invariant: bool = False) -> None:
        """Select an implementation. invariant: one that gives a row the same bits in every batch.

        Raises:
            ConfigError: this op has no such backend.
        """
        if backend not in self.backends():
            raise ConfigError(f"op {self.name} has no backend {backend!r}", hint=f"choose one of: {', '.join(self.backends())}")
        reference = self._invariant.get("reference", self.reference) if invariant else self.reference
        assert not isinstance(reference, str), "references are functions"
        self._fallback = reference
        place: str | Callable[..., Any] = reference if backend == "reference" else self._kernels[backend]
        if invariant:
            place = self._invariant.get(backend, place)
        if isinstance(place, str):
            module, function = place.split(":")
            self._run = getattr(import_module(module), function)
        else:
            self._run = place
        self.backend = backend


_MISSING = {"cuda": "nvcc is not in PATH, or triton is not installed", "triton": "triton is not installed"}


@dataclass(frozen=True, slots=True)
class Explained:
    """Which implementation an op uses, and why it is that one."""

    op: str
    backend: str
    why: str


@cache
def available_kernels() -> frozenset[str]:
    """Kinds of kernels that this machine can build: CUDA sources need nvcc, and leave some shapes to triton."""
    triton = find_spec("triton") is not None
    found = {"cuda": triton and which("nvcc") is not None, "triton": triton}
    return frozenset(name for name, is_there in found.items() if is_there)


def select(choice: str, device: str, invariant: bool = False) -> dict[str, str]:
    """Choose implementations for `engine.ops`: "auto" or comma-separated `op:backend` pairs. Returns op -> backend.

    On CPU auto means the reference everywhere. invariant: of every op what gives a row the same bits in every batch.

    Raises:
        ConfigError: unknown op, unknown backend or a malformed pair.
    """
    for op in _OPS.values():
        op.use(op.backends()[0] if device == "cuda" else "reference", invariant)
    for pair in [] if choice == "auto" else choice.split(","):
        name, _, backend = pair.strip().partition(":")
        if name not in _OPS:
            raise ConfigError(f"engine.ops names unknown op {name!r}", hint=f"known: {', '.join(sorted(_OPS))}")
        _OPS[name].use(backend, invariant)
    return {name: op.backend for name, op in sorted(_OPS.items())}


def explain(choice: str, device: str) -> list[Explained]:
    """The outcome of `select` with its reasons. Raises: as `select`."""
    asked = {pair.strip().partition(":")[0] for pair in choice.split(",")} if choice != "auto" else set()
    return [Explained(name, backend, _why(_OPS[name], backend, device, name in asked)) for name, backend in select(choice, device).items()]


def _why(op: Op, backend: str, device: str, asked: bool) -> str:
    if asked:
        return "asked for by engine.ops"
    if not op.has_kernels:
        return "the only implementation"
    if device != "cuda":
        return "kernels need a GPU"
    return "; ".join(op.missing()) or ("the best here" if backend == op.backends()[0] else "")


def failing_op(error: BaseException | None) -> str:
    """The innermost op in which an error arose, "" outside of all. An error that it replaced goes first."""
    if error is None:
        return ""
    replaced, found, trace = failing_op(error.__cause__ or error.__context__), "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is Op.__call__.__code__:
            found = trace.tb_frame.f_locals["self"].name
        trace = trace.tb_next
    return replaced or found


def check(condition: bool, op: str, **tensors: Tensor) -> None:
    """Refuse arguments that break an op's contract, showing every shape and dtype."""
    if not condition:
        shown = ", ".join(f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items())
        raise ValueError(f"{op}: arguments do not fit its contract: {shown}")
