"""Attention of each query row over its own list of keys, with a sink in the denominator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.ops.fixed_rows import in_groups, tiles
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

# Gathered keys are materialised per chunk of queries; about this much at a time stays near the caches of a CPU core.
_CHUNK_BYTES = 8 * 2**20


class Selection:
    """Which rows of a key tensor each query sees. signed: [T, K] int32, -1 for absent entries; what kernels read."""

    __slots__ = ("_plain", "signed")

    def __init__(self, signed: Tensor) -> None:
        self.signed = signed
        self._plain: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(index: Tensor) -> Selection:
        """From indices of any integer type with -1 for absent entries."""
        return Selection(index.int())

    @property
    def plain(self) -> tuple[Tensor, Tensor]:
        """index: [T, K] int64, absent entries point at row 0; bias: [T, 1, K] fp32, 0 for keys and -inf for absent entries. Made once."""
        if self._plain is None:
            absent = self.signed < 0
            bias = torch.zeros(absent.shape, device=absent.device).masked_fill_(absent, float("-inf"))
            self._plain = (self.signed.long().masked_fill_(absent, 0), bias[:, None])
        return self._plain


def sparse_attention(q: Tensor, sources: list[tuple[Tensor, Selection]], sink: Tensor, scale: float) -> Tensor:
    """One softmax over all selected rows of all sources; keys serve as values too.

    q: [T, H, D] bf16 or fp32. sources: (rows [M, D], selection of K of them per query); row 0 of each must be finite.
    sink: [H] fp32, adds exp(sink) to the denominator only. Returns [T, H, D] of q's dtype; a row without keys gives 0. bf16 queries are
    computed in fp32, fp32 ones in fp64.
    A key that two entries select counts twice.
    """
    check(q.ndim == 3 and sink.shape == q.shape[1:2], "sparse_attention", q=q, sink=sink)
    return SPARSE_ATTENTION(q, sources, sink, scale)


def _reference(q: Tensor, sources: list[tuple[Tensor, Selection]], sink: Tensor, scale: float) -> Tensor:
    return _in_chunks(_attend, q, sources, sink, scale)


def _invariant(q: Tensor, sources: list[tuple[Tensor, Selection]], sink: Tensor, scale: float) -> Tensor:
    return _in_chunks(_attend_by_tiles, q, sources, sink, scale)


def _in_chunks(attend: Callable[..., Tensor], q: Tensor, sources: list[tuple[Tensor, Selection]], sink: Tensor, scale: float) -> Tensor:
    plain = [(rows, *selection.plain) for rows, selection in sources]
    num_keys = sum(index.shape[1] for _, index, _ in plain)
    step = max(1, _CHUNK_BYTES // max(1, 4 * num_keys * q.shape[2]))
    if q.shape[0] <= step:
        return attend(q, plain, sink, scale)
    parts = []
    for begin in range(0, q.shape[0], step):
        part = slice(begin, begin + step)
        parts.append(attend(q[part], [(rows, index[part], bias[part]) for rows, index, bias in plain], sink, scale))
    return torch.cat(parts)


def _attend(q: Tensor, sources: list[tuple[Tensor, Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
    # The fp32 profile is a reference: with sums in fp64 the order of keys, which is free, decides nothing.
    wide = torch.float64 if q.dtype is torch.float32 else torch.float32
    query, width = q.to(wide), q.shape[2]
    keys = [rows.index_select(0, index.flatten()).view(*index.shape, width).to(wide) for rows, index, _ in sources]
    logits = [torch.baddbmm(bias.to(wide), query, k.transpose(1, 2), alpha=scale) for k, (_, _, bias) in zip(keys, sources, strict=True)]
    logits.append(sink.to(wide)[None, :, None].expand(q.shape[0], -1, 1))
    weights = torch.cat(logits, -1).softmax(-1)
    out: Tensor | None = None
    begin = 0
    for k in keys:
        part = weights[:, :, begin : begin + k.shape[1]]
        out = torch.bmm(part, k) if out is None else torch.baddbmm(out, part, k)
        begin += k.shape[1]
    return torch.zeros_like(q) if out is None else out.to(q.dtype)


def _attend_by_tiles(q: Tensor, sources: list[tuple[Tensor, Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
    """`_attend` with keys in tiles of one size, whose sums are added in their order. Tiles without a key add exactly nothing: how many of
    them stand behind a row's own, which depends on its neighbours, changes no bit.
    """
    wide = torch.float64 if q.dtype is torch.float32 else torch.float32
    cut = [(rows, tile) for rows, index, bias in sources for tile in tiles(index, bias, _TILE)]

    def group(query: Tensor, *parts: Tensor) -> Tensor:
        keys = [
            rows.index_select(0, index.flatten()).view(*index.shape, -1).to(wide) for (rows, _), index in zip(cut, parts[::2], strict=True)
        ]
        logits = [torch.baddbmm(bias.to(wide), query, k.transpose(1, 2), alpha=scale) for k, bias in zip(keys, parts[1::2], strict=True)]
        top = sink.to(wide)[None, :].expand(len(query), -1)
        for part in logits:
            top = torch.maximum(top, part.amax(-1))
        total, out = (sink.to(wide) - top).exp_(), torch.zeros_like(query)
        for k, part in zip(keys, logits, strict=True):
            weights = part.sub_(top[:, :, None]).exp_()
            total += weights.sum(-1)
            out = torch.baddbmm(out, weights, k)
        return out.div_(total[:, :, None])

    result: Tensor = in_groups(group, q.to(wide), *(part for _, tile in cut for part in tile))
    return result.to(q.dtype)


_TILE = 64

SPARSE_ATTENTION = Op(
    "sparse_attention", reference=_reference, invariant={"reference": _invariant}, tolerance=Tolerance(fp32=2e-6, bf16=8e-3)
)
