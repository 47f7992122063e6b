"""Matrix products with sums in fp64, so that the order of summation, which differs between devices and row counts, decides nothing.

The reference profiles use it on GPUs: fake-quantised keys of the golden vectors lie on rounding edges that a library's order may cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.linear.default,
    _aten.mm.default,
    _aten.mm.out,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.matmul.default,
}


class ExactSums(TorchDispatchMode):
    """While entered, products of tensors of one type are computed in fp64 and rounded once."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _PRODUCTS or not all(t.dtype is self._dtype for t in args if isinstance(t, Tensor)):
            return func(*args, **kwargs)
        out = kwargs.pop("out", None)
        exact = _aten.mm.default if func is _aten.mm.out else func
        result = exact(*(arg.double() if isinstance(arg, Tensor) else arg for arg in args), **kwargs).to(self._dtype)
        return result if out is None else out.copy_(result)
