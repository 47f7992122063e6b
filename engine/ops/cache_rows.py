"""Cache rows in the released packed formats, and back.

    window row   D e4m3 bytes, then D/32 E8M0 scales                       528 bytes for D = 512
    entry row    D/2 bytes of E2M1 pairs, then D/16 E4M3 scales            288 bytes for D = 512
    index row    D/2 bytes of E2M1 pairs, then D/32 E8M0 scales             68 bytes for D = 128

The even element of a pair is the low nibble. Unpacking a packed row gives exactly the round trip of `q8`, `q4_kv` or `q4_index`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.number_formats import e2m1_values, e8m0_values, pack_e2m1, unpack_e2m1
from engine.ops.q4_index import q4_index_codes
from engine.ops.q4_kv import q4_kv_codes
from engine.ops.q8 import q8_codes
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

FP8_GROUP, ENTRY_GROUP, INDEX_GROUP = 32, 16, 32


def window_row_bytes(width: int) -> int:
    """Bytes of a packed window key of `width` channels."""
    return width + width // FP8_GROUP


def entry_row_bytes(width: int) -> int:
    """Bytes of a packed compressed entry of `width` channels."""
    return width // 2 + width // ENTRY_GROUP


def index_row_bytes(width: int) -> int:
    """Bytes of a packed index key of `width` channels."""
    return width // 2 + width // INDEX_GROUP


def pack_window_rows(x: Tensor) -> Tensor:
    """[..., D] bf16 or fp32 -> uint8 [..., D + D/32]. D is a multiple of 32."""
    check(x.shape[-1] % FP8_GROUP == 0, "pack_window_rows", x=x)
    return PACK_WINDOW_ROWS(x)


def pack_entry_rows(x: Tensor) -> Tensor:
    """[..., D] bf16 or fp32 -> uint8 [..., D/2 + D/16]. D is a multiple of 16."""
    check(x.shape[-1] % ENTRY_GROUP == 0, "pack_entry_rows", x=x)
    return PACK_ENTRY_ROWS(x)


def pack_index_rows(x: Tensor) -> Tensor:
    """[..., D] bf16 or fp32 -> uint8 [..., D/2 + D/32]. D is a multiple of 32."""
    check(x.shape[-1] % INDEX_GROUP == 0, "pack_index_rows", x=x)
    return PACK_INDEX_ROWS(x)


def unpack_window_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., D + D/32] -> [..., D], exact in bf16 and fp32."""
    width = rows.shape[-1] * FP8_GROUP // (FP8_GROUP + 1)
    values = rows[..., :width].contiguous().view(torch.float8_e4m3fn).float()
    return _scaled(values, e8m0_values(rows[..., width:]), dtype)


def unpack_entry_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., D/2 + D/16] -> [..., D], exact in bf16 and fp32."""
    width = rows.shape[-1] * 16 // 9
    values = e2m1_values(unpack_e2m1(rows[..., : width // 2]))
    return _scaled(values, rows[..., width // 2 :].contiguous().view(torch.float8_e4m3fn).float(), dtype)


def unpack_index_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., D/2 + D/32] -> [..., D], exact in bf16 and fp32."""
    width = rows.shape[-1] * 32 // 17
    return _scaled(e2m1_values(unpack_e2m1(rows[..., : width // 2])), e8m0_values(rows[..., width // 2 :]), dtype)


def _scaled(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2).to(dtype)


def _pack_window(x: Tensor) -> Tensor:
    codes, scale = q8_codes(x)
    return torch.cat((codes.view(torch.uint8), scale), -1)


def _pack_entries(x: Tensor) -> Tensor:
    codes, scale = q4_kv_codes(x)
    return torch.cat((pack_e2m1(codes), scale.view(torch.uint8)), -1)


def _pack_index(x: Tensor) -> Tensor:
    codes, scale = q4_index_codes(x)
    return torch.cat((pack_e2m1(codes), scale), -1)


_KERNELS = "engine.ops.triton.cache_rows"
PACK_WINDOW_ROWS = Op("pack_window_rows", reference=_pack_window, triton=f"{_KERNELS}:pack_window", tolerance=Tolerance())
PACK_ENTRY_ROWS = Op("pack_entry_rows", reference=_pack_entries, triton=f"{_KERNELS}:pack_entries", tolerance=Tolerance())
PACK_INDEX_ROWS = Op("pack_index_rows", reference=_pack_index, triton=f"{_KERNELS}:pack_index", tolerance=Tolerance())
