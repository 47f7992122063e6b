"""Query latent and packed window key of a token in one kernel: one program a token.

Channels of the key are handled as even and odd halves of pairs, which is what the rotation mixes and what two neighbouring bytes hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def prepare(
    both, q_norm, kv_norm, rot, latent, keys, ring, places, rank, stride, row_bytes, eps,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, RANK: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """both: [T, rank + WIDTH]; keys, ring: uint8 rows of row_bytes. PAIRS: rotated ones, at the end. RANK >= rank, a power of two."""
    row = tl.program_id(0).to(tl.int64)
    source = both + row * stride
    cols = tl.arange(0, RANK)
    inside = cols < rank
    q = tl.load(source + cols, mask=inside, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) / rank + eps) * tl.load(q_norm + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(latent + row * rank + cols, q.to(latent.dtype.element_ty), mask=inside)

    half: tl.constexpr = WIDTH // 2
    pair = tl.arange(0, half)
    even = tl.load(source + rank + 2 * pair).to(tl.float32)
    odd = tl.load(source + rank + 2 * pair + 1).to(tl.float32)
    scale = tl.rsqrt((tl.sum(even * even, axis=0) + tl.sum(odd * odd, axis=0)) / WIDTH + eps)
    even = _rounded(even * scale * tl.load(kv_norm + 2 * pair).to(tl.float32), both)
    odd = _rounded(odd * scale * tl.load(kv_norm + 2 * pair + 1).to(tl.float32), both)
    turned = pair - (half - PAIRS)
    angle = rot + (row * PAIRS + turned) * 2
    cos = tl.load(angle, mask=turned >= 0, other=1.0)
    sin = tl.load(angle + 1, mask=turned >= 0, other=0.0)
    even, odd = _rounded(even * cos - odd * sin, both), _rounded(even * sin + odd * cos, both)

    groups: tl.constexpr = WIDTH // 32
    largest = tl.max(tl.reshape(tl.maximum(tl.abs(even), tl.abs(odd)), (groups, 16)), axis=1)
    # Source: the release's quantiser: floor 1e-4, fp32 reciprocal of 448, scale rounded up to a power of two.
    bits = (tl.maximum(largest, 1e-4) * 0.0022321429569274187).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    factor = tl.reshape(tl.broadcast_to((((254 - exponent) << 23).to(tl.float32, bitcast=True))[:, None], (groups, 16)), (half,))
    packed = _e4m3(even * factor) | (_e4m3(odd * factor) << 8)
    group = tl.arange(0, groups)
    target = keys + row * row_bytes
    tl.store(target.to(tl.pointer_type(tl.uint16)) + pair, packed.to(tl.uint16))
    tl.store(target + WIDTH + group, exponent.to(tl.uint8))
    if STORE:
        place = ring + tl.load(places + row) * row_bytes
        tl.store(place.to(tl.pointer_type(tl.uint16)) + pair, packed.to(tl.uint16))
        tl.store(place + WIDTH + group, exponent.to(tl.uint8))


@triton.jit
def _rounded(x, like):
    """fp32 -> the dtype of `like` -> fp32, as between two operations of the reference."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _e4m3(x):
    """Nearest E4M3 code of |x| <= 448, ties to even, as int32. Normal numbers round in their own bits, small ones by adding 2^14."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # Below 2^-6 the grid is even, 2^-9 apart: so are the low bits of numbers near 2^14.
    near = size.to(tl.float32, bitcast=True) + 16384.0
    small = near.to(tl.int32, bitcast=True) - (141 << 23)
    return sign | tl.where(size < (121 << 23), small, normal)


def launch(
    both: Tensor, q_norm: Tensor, kv_norm: Tensor, rot: Tensor, eps: float, ring: Tensor | None, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The op `attention_inputs`."""
    tokens, rank, width = len(both), len(q_norm), len(kv_norm)
    row_bytes = width + width // 32
    latent = both.new_empty(tokens, rank)
    keys = torch.empty(tokens, row_bytes, dtype=torch.uint8, device=both.device)
    if tokens:
        assert both.stride(1) == 1, "rows of `both` must be contiguous"
        angles = torch.view_as_real(rot.resolve_conj().contiguous())
        prepare[(tokens,)](
            both, q_norm, kv_norm, angles, latent, keys, keys if ring is None else ring, both if places is None else places,
            rank, both.stride(0), row_bytes, eps, width, rot.shape[1], triton.next_power_of_2(rank), ring is not None, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return latent, keys
