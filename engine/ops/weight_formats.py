"""Stored weights and their values: FP8 in 32x32 blocks, FP4 rows, n-gram table rows. Decoding is exact in bf16.

Encoders pick the smallest power-of-two scale that does not clip; encoding decoded values gives the same values again.
Source: config key `quantization_config`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.ops.number_formats import (
    E2M1_MAX,
    E4M3_MAX,
    ceil_power_of_two,
    e2m1_codes,
    e2m1_values,
    e8m0_values,
    pack_e2m1,
    round_e2m1,
    round_e4m3,
    unpack_e2m1,
)

BLOCK = 32
# An all-zero block needs some scale; this one keeps the arithmetic in normal numbers.
_MIN_AMAX = 2.0**-100


def encode_fp8_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """w: [A, B] float. Returns e4m3 [A, B] and E8M0 bytes uint8 [ceil(A/32), ceil(B/32)], one scale per 32x32 tile."""
    rows, cols = w.shape
    tiles = pad(w.float(), (0, -cols % BLOCK, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = _scale(tiles.abs().amax(dim=(1, 3)), E4M3_MAX)
    return round_e4m3(w.float() / _spread_blocks(scale, rows, cols)), scale


def decode_fp8_blocks(w: Tensor, scale: Tensor, dtype: torch.dtype, block_rows: int = BLOCK) -> Tensor:
    """w: [A, B] e4m3, scale: [ceil(A/block_rows), ceil(B/32)] uint8. Returns [A, B] of `dtype`."""
    rows, cols = w.shape
    return w.to(dtype).mul_(_spread_blocks(scale, rows, cols, block_rows).to(dtype))


def encode_fp4_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """w: [A, B] float, B a multiple of 32. Returns int8 [A, B/2] (two codes a byte) and uint8 [A, B/32], a scale per row and 32 columns."""
    groups = w.float().unflatten(-1, (-1, BLOCK))
    scale = _scale(groups.abs().amax(dim=-1), E2M1_MAX)
    values = round_e2m1(groups / e8m0_values(scale)[..., None]).flatten(-2)
    return pack_e2m1(e2m1_codes(values)).view(torch.int8), scale


def decode_fp4_rows(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed: [A, B/2] int8, scale: [A, B/32] uint8. Returns [A, B] of `dtype`."""
    codes = packed.view(torch.uint8).flatten().to(torch.int32)
    values = _byte_values(packed.device).index_select(0, codes).view(packed.shape[0], -1, BLOCK)
    return values.mul_(e8m0_values(scale)[..., None]).flatten(-2).to(dtype)


@lru_cache(maxsize=8)
def _byte_values(device: torch.device) -> Tensor:
    """[256, 2] fp32: both values of every packed byte."""
    return e2m1_values(unpack_e2m1(torch.arange(256, dtype=torch.uint8, device=device)[:, None]))


def encode_table_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """w: [N, D] float, D a multiple of 32. Returns e4m3 [N, D] and uint8 [N, D/32], a scale per row and 32 columns."""
    groups = w.float().unflatten(-1, (-1, BLOCK))
    scale = _scale(groups.abs().amax(dim=-1), E4M3_MAX)
    return round_e4m3(groups / e8m0_values(scale)[..., None]).flatten(-2), scale


def decode_table_rows(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """w: [N, D] e4m3, scale: [N, D/32] uint8. Returns [N, D] of `dtype`."""
    return (w.float().unflatten(-1, (-1, BLOCK)) * e8m0_values(scale)[..., None]).flatten(-2).to(dtype)


def _scale(amax: Tensor, largest: float) -> Tensor:
    return ceil_power_of_two(amax.clamp(min=_MIN_AMAX) / largest)


def _spread_blocks(scale: Tensor, rows: int, cols: int, block_rows: int = BLOCK) -> Tensor:
    values = e8m0_values(scale)
    return values.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
