"""Attention of each query row over packed window keys and packed compressed entries, rotations of query and output included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.cache_rows import entry_row_bytes, unpack_entry_rows, unpack_window_rows, window_row_bytes
from engine.ops.registry import Op, check
from engine.ops.rope import rotate_
from engine.ops.sparse_attention import Selection, sparse_attention
from engine.ops.tolerance import Tolerance

# Queries whose keys the reference unpacks at a time: 84 MB of fp32 at the released sizes.
_QUERIES = 64


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """Packed rows and which of them each query sees.

    rows: uint8 [M, row bytes], contiguous, 16-byte aligned. index: [T, K] int32, -1 for absent entries, in any place and order.
    """

    rows: Tensor
    index: Tensor


def row_attention(q: Tensor, rot: Tensor, sources: list[PackedKeys], sink: Tensor, scale: float, splits: int = 0) -> Tensor:
    """One softmax over the selected rows of one or two sources; keys serve as values too.

    q: [T, H, D] bf16 or fp32 before its rotation. rot: [T, R/2] complex64, turns the last R of D; the output is turned
    back by it. sources: window rows, then window or entry rows. sink: [H] fp32, adds exp(sink) to the denominator only.
    splits: parts over which a row's keys are spread, 0 for as many as fill the device; batch-invariant mode has its own.
    Returns [T, H, D] of q's dtype; a row without keys gives 0. A key named twice counts twice.
    """
    width = q.shape[-1]
    known = [window_row_bytes(width), entry_row_bytes(width)]
    check(q.ndim == 3 and sink.shape == q.shape[1:2] and len(sources) in (1, 2), "row_attention", q=q, sink=sink)
    for source, sizes in zip(sources, (known[:1], known), strict=False):
        check(source.rows.shape[-1] in sizes and len(source.index) == len(q), "row_attention", q=q, rows=source.rows, index=source.index)
    return ROW_ATTENTION(q, rot, sources, sink, scale, splits)


def _reference(q: Tensor, rot: Tensor, sources: list[PackedKeys], sink: Tensor, scale: float, splits: int) -> Tensor:
    query = rotate_(q.clone(), rot)
    out = torch.empty_like(query)
    # Unpacking whole caches would cost more than the attention: rows are gathered first, for a few queries at a time.
    for begin in range(0, len(q), _QUERIES):
        part = slice(begin, begin + _QUERIES)
        out[part] = sparse_attention(query[part], [_gathered(s.rows, s.index[part], q) for s in sources], sink, scale)
    return rotate_(out, rot.conj_physical())


def _gathered(rows: Tensor, index: Tensor, q: Tensor) -> tuple[Tensor, Selection]:
    """Selected rows unpacked one after the other, and where each query finds its own."""
    unpack = unpack_window_rows if rows.shape[-1] == window_row_bytes(q.shape[-1]) else unpack_entry_rows
    keys = unpack(rows.index_select(0, index.clamp(min=0).flatten().long()), q.dtype)
    # Absent entries name row 0, whatever it holds: it must not reach the product as NaN.
    keys = keys.masked_fill_((index < 0).flatten()[:, None], 0)
    places = torch.arange(index.numel(), device=index.device).view(index.shape)
    return keys, Selection.of(places.masked_fill(index < 0, -1))


ROW_ATTENTION = Op(
    "row_attention",
    reference=_reference,
    triton="engine.ops.triton.row_attention:launch",
    invariant={"triton": "engine.ops.triton.row_attention:launch_invariant"},
    tolerance=Tolerance(fp32=2e-6, bf16=1.6e-2),
)
