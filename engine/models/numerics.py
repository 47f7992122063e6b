"""The switches of a precision profile, and the linear layer that obeys them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import Precision
from engine.loader import WeightSource
from engine.ops.dense_linear import block_linear, dense_linear
from engine.ops.q8 import q8


@dataclass(frozen=True, slots=True)
class Numerics:
    """dtype: of activations, plain weights and caches. quantize_inputs: inputs of quantised linears pass through fp8.
    quantize_kv: window keys, compressed entries and index vectors pass through their storage formats. packed_weights: quantised weights
    stay as they are stored. packed_rows: caches hold the bytes of the storage formats, not elements of dtype; the numbers are the same.
    invariant: a row has the same bits in every batch, so no weight has two products between which the number of rows decides.
    """

    dtype: torch.dtype
    quantize_inputs: bool
    quantize_kv: bool
    packed_weights: bool = False
    packed_rows: bool = False
    invariant: bool = False

    @staticmethod
    def of(precision: Precision, packed_weights: bool = False, packed_rows: bool = False, invariant: bool = False) -> Numerics:
        """packed_weights: wanted where activations are bf16; packed_rows: where the profile rounds."""
        full = precision in (Precision.F, Precision.FQ)
        return Numerics(
            dtype=torch.float32 if full else torch.bfloat16,
            quantize_inputs=precision is Precision.R,
            quantize_kv=precision is not Precision.F,
            packed_weights=packed_weights and not full,
            packed_rows=packed_rows and precision is not Precision.F,
            invariant=invariant,
        )


@dataclass(frozen=True, slots=True)
class Linear:
    """x [T, C] -> [T, A] with weight [A, C] of x's dtype."""

    weight: Tensor
    quantize_input: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return dense_linear(q8(x) if self.quantize_input else x, self.weight)


@dataclass(frozen=True, slots=True)
class WideLinear:
    """x [T, C] -> [T, A] fp32, sums in fp32. weight: fp32, or bf16 on a GPU, which multiplies bf16 numbers without loss."""

    weight: Tensor

    @staticmethod
    def load(source: WeightSource, name: str, numerics: Numerics) -> WideLinear:
        weight = source.tensor(name, torch.float32)
        return WideLinear(weight.to(numerics.dtype) if weight.is_cuda else weight)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """out: [T, A] fp32 to write to."""
        return dense_linear(x.to(self.weight.dtype), self.weight, out, wide=True)


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """x [T, G * C] -> [T, G * A]: group g of the output is weight[g] times group g of the input. weight: [G, A, C]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return block_linear(x, self.weight)
