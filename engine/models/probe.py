"""An observer of intermediate results, for tests. The model calls it only when one is given."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Probe(Protocol):
    """Sees values as they are computed; rows follow the batch, or the kept rows behind the boundary of a truncated prefill."""

    def record(self, name: str, layer: int, value: Tensor) -> None:
        """Take note of `value`. It may be changed in place afterwards, so keep a copy."""
