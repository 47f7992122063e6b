"""Small floating-point formats: E4M3, E8M0 scales and E2M1 codes, with the rounding that the release uses (ties to even).

Source: OCP microscaling formats; E4M3 has no infinity and saturates at 448, E8M0 byte s stands for 2^(s - 127).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value of fp32 `x`, saturating. Any shape; returns float8_e4m3fn."""
    # The cast overflows to NaN, so saturation has to come first.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value of fp32 `x`, saturating at 6. Any shape; returns fp32."""
    size = x.abs().clamp_(max=E2M1_MAX)
    # The grid steps by 0.5 up to 2, by 1 up to 4, by 2 up to 6.
    coarse = torch.where(size < 4, size.round(), (size * 0.5).round() * 2)
    return torch.where(size < 2, (size * 2).round() * 0.5, coarse).copysign(x)


def e2m1_codes(values: Tensor) -> Tensor:
    """4-bit codes of values that lie on the E2M1 grid. Any shape fp32; returns uint8, sign in bit 3. NaN, which has none, gives 6."""
    codes = torch.bucketize(values.abs().contiguous(), _e2m1_grid(values.device)[:8]).clamp_(max=7)
    return (codes + 8 * torch.signbit(values)).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """fp32 values of 4-bit codes. codes: any shape uint8 below 16."""
    return _e2m1_grid(codes.device)[codes.long()]


@lru_cache(maxsize=16)
def _e2m1_grid(device: torch.device) -> Tensor:
    """[16] fp32, the value of every code. Made once: a recorded step must not copy from the host."""
    return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=device)


def pack_e2m1(codes: Tensor) -> Tensor:
    """[..., 2n] uint8 codes -> [..., n] bytes, even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] uint8 codes, even element from the low nibble."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def ceil_power_of_two(x: Tensor) -> Tensor:
    """E8M0 byte of the smallest power of two that is >= `x`. x: any shape fp32, normal and positive; returns uint8."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return exponent.to(torch.uint8)


def e8m0_values(codes: Tensor) -> Tensor:
    """fp32 powers of two of E8M0 bytes. codes: any shape uint8; byte 0 gives 2^-127."""
    wide = codes.to(torch.int32)
    # The exponent field of an fp32 number is the byte itself; byte 0 is the one subnormal.
    return ((wide << 23) | ((wide == 0).to(torch.int32) << 22)).view(torch.float32)
