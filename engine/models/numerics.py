"""The three switches of a precision profile, and the linear layer that obeys them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import Precision
from engine.ops.q8 import q8


@dataclass(frozen=True, slots=True)
class Numerics:
    """dtype: of activations, plain weights and caches. quantize_inputs: inputs of quantised linears pass through fp8.
    quantize_kv: window keys, compressed entries and index vectors pass through their storage formats.
    """

    dtype: torch.dtype
    quantize_inputs: bool
    quantize_kv: bool

    @staticmethod
    def of(precision: Precision) -> Numerics:
        full = precision in (Precision.F, Precision.FQ)
        return Numerics(
            dtype=torch.float32 if full else torch.bfloat16,
            quantize_inputs=precision is Precision.R,
            quantize_kv=precision is not Precision.F,
        )


@dataclass(frozen=True, slots=True)
class Linear:
    """x [..., C] -> [..., A] with weight [A, C] of x's dtype."""

    weight: Tensor
    quantize_input: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(q8(x) if self.quantize_input else x, self.weight)
