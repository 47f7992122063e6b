"""From the joint projection of a sublayer's input to what attention needs: the query latent and the window key as rings store it."""

from __future__ import annotations

from torch import Tensor

from engine.ops.cache_rows import PACK_WINDOW_ROWS, window_row_bytes
from engine.ops.registry import Op, check
from engine.ops.rms_norm import RMS_NORM
from engine.ops.rope import ROPE
from engine.ops.tolerance import Tolerance


def attention_inputs(
    both: Tensor, q_norm: Tensor, kv_norm: Tensor, rot: Tensor, eps: float, ring: Tensor | None = None, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalise both parts, rotate the key and pack it.

    both: [T, rank + D] bf16 or fp32, query latent then key. q_norm: [rank], kv_norm: [D], both's dtype. rot: [T, R/2] complex64.
    ring: uint8 [rows, D + D/32] that also receives the keys at rows `places` [T] int64, None to store nothing.
    Returns the latent [T, rank] of both's dtype and the keys uint8 [T, D + D/32].
    """
    width = len(kv_norm)
    check(both.ndim == 2 and both.shape[1] == len(q_norm) + width and len(rot) == len(both), "attention_inputs", both=both, rot=rot)
    if ring is not None:
        assert places is not None, "a ring without places"
        check(ring.shape[1] == window_row_bytes(width) and len(places) == len(both), "attention_inputs", ring=ring, places=places)
    latent, keys = ATTENTION_INPUTS(both, q_norm, kv_norm, rot, eps, ring, places)
    return latent, keys


def _reference(
    both: Tensor, q_norm: Tensor, kv_norm: Tensor, rot: Tensor, eps: float, ring: Tensor | None, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    rank = len(q_norm)
    latent = RMS_NORM(both[:, :rank], q_norm, eps)
    keys = PACK_WINDOW_ROWS(ROPE(RMS_NORM(both[:, rank:], kv_norm, eps), rot))
    if ring is not None and places is not None:
        ring.index_copy_(0, places, keys)
    return latent, keys


ATTENTION_INPUTS = Op(
    "attention_inputs",
    reference=_reference,
    triton="engine.ops.triton.attention_inputs:launch",
    tolerance=Tolerance(fp32=1e-6, bf16=8e-3),
)
"""`keys` may differ from the reference by one E4M3 step where a sum of squares in another order moves a value over a rounding edge."""
