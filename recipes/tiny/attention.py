"""Window plus compressed attention over packed rows: Triton kernels (forward and backward) and their slow twin.

A row is a packed token. Documents start on multiples of TILE rows, so a tile of TILE positions times all heads belongs to one
document and shares its keys. Every key is also the value. The sink is not part of this: it is applied outside from the log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16
BLOCK = 64
NO_KEY = -1.0e30


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which keys each row sees. All tensors on the device of the rows.

    lo: [N] int32, first visible window key's row (row + 1 when none). window: most keys in the window.
    start: [N] int32, first compressed entry of the row's document. hi: [N] int32, end of its visible entries (absolute).
    entry_end: [Ne] int32, one past the last row of the entry's document. ratio: rows per entry (0: no entries).
    """

    lo: Tensor
    window: int
    start: Tensor | None = None
    hi: Tensor | None = None
    entry_end: Tensor | None = None
    ratio: int = 0


@triton.jit
def _block_update(q, k, ok, m, z, acc, scale):
    """One block of the running softmax; scores are in base 2."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(ok, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - new_m[:, None])
    shrink = tl.exp2(m - new_m)
    acc = acc * shrink[:, None] + tl.dot(p.to(k.dtype), k, input_precision="ieee")
    return new_m, z * shrink + tl.sum(p, 1), acc


@triton.jit
def _forward(
    Q, K, C, SEL, LO, START, HI, OUT, LSE, sel_stride, scale,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, HAS_C: tl.constexpr, HAS_SEL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    r = tl.arange(0, T * H)
    row = tile * T + r // H
    d = tl.arange(0, D)
    at = (tile * T * H + r)[:, None] * D + d[None, :]
    q = tl.load(Q + at)
    lo = tl.load(LO + row)
    m = tl.full((T * H,), -1.0e30, tl.float32)
    z = tl.zeros((T * H,), tl.float32)
    acc = tl.zeros((T * H, D), tl.float32)
    end = tile * T + T
    for k0 in range(tl.min(lo) // B * B, end, B):
        j = k0 + tl.arange(0, B)
        k = tl.load(K + j[:, None] * D + d[None, :], mask=(j < end)[:, None], other=0.0)
        ok = (j[None, :] >= lo[:, None]) & (j[None, :] <= row[:, None])
        m, z, acc = _block_update(q, k, ok, m, z, acc, scale)
    if HAS_C:
        start = tl.load(START + tile * T)
        hi = tl.load(HI + row)
        last = tl.max(hi)
        for j0 in range(start, last, B):
            j = j0 + tl.arange(0, B)
            k = tl.load(C + j[:, None] * D + d[None, :], mask=(j < last)[:, None], other=0.0)
            ok = j[None, :] < hi[:, None]
            if HAS_SEL:
                ok = ok & (tl.load(SEL + row[:, None] * sel_stride + (j - start)[None, :], mask=ok, other=0) != 0)
            m, z, acc = _block_update(q, k, ok, m, z, acc, scale)
    seen = z > 0
    acc = acc / tl.where(seen, z, 1.0)[:, None]
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty))
    tl.store(LSE + tile * T * H + r, tl.where(seen, (m + tl.log2(tl.where(seen, z, 1.0))) * 0.6931471805599453, -1.0e30))


@triton.jit
def _weights(q, do, k, ok, lse2, delta, scale, natural_scale):
    """Probabilities and score gradients of one block: p, ds [rows, keys] f32."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    p = tl.where(ok, tl.exp2(tl.where(ok, s - lse2[:, None], 0.0)), 0.0)
    dp = tl.dot(do, tl.trans(k), input_precision="ieee")
    return p, p * (dp - delta[:, None]) * natural_scale


@triton.jit
def _backward_q(
    Q, K, C, SEL, LO, START, HI, DO, LSE2, DELTA, DQ, sel_stride, scale, natural_scale,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, HAS_C: tl.constexpr, HAS_SEL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    r = tl.arange(0, T * H)
    row = tile * T + r // H
    d = tl.arange(0, D)
    at = (tile * T * H + r)[:, None] * D + d[None, :]
    q = tl.load(Q + at)
    do = tl.load(DO + at)
    lse2 = tl.load(LSE2 + tile * T * H + r)
    delta = tl.load(DELTA + tile * T * H + r)
    lo = tl.load(LO + row)
    acc = tl.zeros((T * H, D), tl.float32)
    end = tile * T + T
    for k0 in range(tl.min(lo) // B * B, end, B):
        j = k0 + tl.arange(0, B)
        k = tl.load(K + j[:, None] * D + d[None, :], mask=(j < end)[:, None], other=0.0)
        ok = (j[None, :] >= lo[:, None]) & (j[None, :] <= row[:, None])
        _, ds = _weights(q, do, k, ok, lse2, delta, scale, natural_scale)
        acc += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    if HAS_C:
        start = tl.load(START + tile * T)
        hi = tl.load(HI + row)
        last = tl.max(hi)
        for j0 in range(start, last, B):
            j = j0 + tl.arange(0, B)
            k = tl.load(C + j[:, None] * D + d[None, :], mask=(j < last)[:, None], other=0.0)
            ok = j[None, :] < hi[:, None]
            if HAS_SEL:
                ok = ok & (tl.load(SEL + row[:, None] * sel_stride + (j - start)[None, :], mask=ok, other=0) != 0)
            _, ds = _weights(q, do, k, ok, lse2, delta, scale, natural_scale)
            acc += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    tl.store(DQ + at, acc.to(DQ.dtype.element_ty))


@triton.jit
def _backward_window(
    Q, K, LO, DO, LSE2, DELTA, DK, num_rows, window, scale, natural_scale,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    k0 = tl.program_id(0) * B
    j = k0 + tl.arange(0, B)
    d = tl.arange(0, D)
    k = tl.load(K + j[:, None] * D + d[None, :], mask=(j < num_rows)[:, None], other=0.0)
    acc = tl.zeros((B, D), tl.float32)
    r = tl.arange(0, T * H)
    last = tl.minimum(k0 + B + window - 1, num_rows)
    for t0 in range(k0, last, T):
        row = t0 + r // H
        at = (t0 * H + r)[:, None] * D + d[None, :]
        q = tl.load(Q + at)
        do = tl.load(DO + at)
        lo = tl.load(LO + row)
        ok = (j[None, :] >= lo[:, None]) & (j[None, :] <= row[:, None])
        p, ds = _weights(q, do, k, ok, tl.load(LSE2 + t0 * H + r), tl.load(DELTA + t0 * H + r), scale, natural_scale)
        acc += tl.dot(tl.trans(p.to(k.dtype)), do, input_precision="ieee")
        acc += tl.dot(tl.trans(ds.to(k.dtype)), q, input_precision="ieee")
    tl.store(DK + j[:, None] * D + d[None, :], acc.to(DK.dtype.element_ty), mask=(j < num_rows)[:, None])


@triton.jit
def _backward_entries(
    Q, C, SEL, START, HI, ENTRY_END, DO, LSE2, DELTA, DC, sel_stride, num_entries, scale, natural_scale,
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, HAS_SEL: tl.constexpr,
):  # fmt: skip
    j0 = tl.program_id(0) * B
    j = j0 + tl.arange(0, B)
    d = tl.arange(0, D)
    inside = j < num_entries
    k = tl.load(C + j[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    acc = tl.zeros((B, D), tl.float32)
    r = tl.arange(0, T * H)
    last = tl.max(tl.load(ENTRY_END + j, mask=inside, other=0))
    for t0 in range(j0 * R // T * T, last, T):
        row = t0 + r // H
        start = tl.load(START + t0)
        hi = tl.load(HI + row)
        ok = (j[None, :] >= start) & (j[None, :] < hi[:, None])
        if HAS_SEL:
            ok = ok & (tl.load(SEL + row[:, None] * sel_stride + (j - start)[None, :], mask=ok, other=0) != 0)
        at = (t0 * H + r)[:, None] * D + d[None, :]
        q = tl.load(Q + at)
        do = tl.load(DO + at)
        p, ds = _weights(q, do, k, ok, tl.load(LSE2 + t0 * H + r), tl.load(DELTA + t0 * H + r), scale, natural_scale)
        acc += tl.dot(tl.trans(p.to(k.dtype)), do, input_precision="ieee")
        acc += tl.dot(tl.trans(ds.to(k.dtype)), q, input_precision="ieee")
    tl.store(DC + j[:, None] * D + d[None, :], acc.to(DC.dtype.element_ty), mask=inside[:, None])


_LOG2E = 1.4426950408889634


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, c, sel, vis):
        rows, heads, dim = q.shape
        q, k = q.contiguous(), k.contiguous()
        c = c.contiguous() if c is not None else None
        o, lse = torch.empty_like(q), torch.empty(rows, heads, dtype=torch.float32, device=q.device)
        has_c, has_sel = c is not None, sel is not None
        stride = sel.stride(0) if has_sel else 0
        _forward[(rows // TILE,)](
            q, k, c if has_c else k, sel if has_sel else k, vis.lo, vis.start if has_c else vis.lo, vis.hi if has_c else vis.lo, o, lse,
            stride, dim**-0.5 * _LOG2E, TILE, heads, dim, BLOCK, has_c, has_sel, num_warps=8, num_stages=2,
        )  # fmt: skip
        ctx.save_for_backward(q, k, c, sel, o, lse)
        ctx.vis = vis
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, c, sel, o, lse = ctx.saved_tensors
        vis, (rows, heads, dim) = ctx.vis, q.shape
        do = do.contiguous()
        delta = (do.float() * o.float()).sum(-1)
        delta = delta if dlse is None else delta - dlse
        delta, lse2 = delta.contiguous(), lse * _LOG2E
        has_c, has_sel = c is not None, sel is not None
        stride, scale, natural = sel.stride(0) if has_sel else 0, dim**-0.5 * _LOG2E, dim**-0.5
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        mask = sel if has_sel else k
        _backward_q[(rows // TILE,)](
            q, k, c if has_c else k, mask, vis.lo, vis.start if has_c else vis.lo, vis.hi if has_c else vis.lo, do, lse2, delta, dq,
            stride, scale, natural, TILE, heads, dim, BLOCK, has_c, has_sel, num_warps=8, num_stages=2,
        )  # fmt: skip
        _backward_window[(triton.cdiv(rows, BLOCK),)](
            q, k, vis.lo, do, lse2, delta, dk, rows, vis.window, scale, natural, TILE, heads, dim, BLOCK, num_warps=8, num_stages=2
        )
        dc = None
        if has_c:
            dc = torch.empty_like(c)
            _backward_entries[(triton.cdiv(c.shape[0], BLOCK),)](
                q, c, mask, vis.start, vis.hi, vis.entry_end, do, lse2, delta, dc, stride, c.shape[0], scale, natural,
                vis.ratio, TILE, heads, dim, BLOCK, has_sel, num_warps=8, num_stages=2,
            )  # fmt: skip
        return dq, dk, dc, None, None


def attention(q: Tensor, k: Tensor, c: Tensor | None, sel: Tensor | None, vis: Visibility) -> tuple[Tensor, Tensor]:
    """Outputs [N, H, D] and natural log-sum-exp [N, H] f32 (NO_KEY where nothing is visible) of one layer.

    q [N, H, D]; k [N, D]; c [N/ratio, D] or None; sel [N, L] uint8 over entries counted from the document's first, or None for all.
    N is a multiple of TILE, H and D are powers of two.
    """
    return _Attention.apply(q, k, c, sel, vis)


def attention_reference(q: Tensor, k: Tensor, c: Tensor | None, sel: Tensor | None, vis: Visibility) -> tuple[Tensor, Tensor]:
    """The slow twin: the same contract for any N, with dense scores and autograd."""
    rows = torch.arange(q.shape[0], device=q.device)
    ok = (rows[None, :] >= vis.lo[:, None]) & (rows[None, :] <= rows[:, None])
    keys = k
    if c is not None:
        entries = torch.arange(c.shape[0], device=q.device)
        seen = (entries[None, :] >= vis.start[:, None]) & (entries[None, :] < vis.hi[:, None])
        if sel is not None:
            local = (entries[None, :] - vis.start[:, None]).clamp(0, sel.shape[1] - 1).long()
            seen &= sel.gather(1, local) != 0
        ok, keys = torch.cat((ok, seen), 1), torch.cat((k, c), 0)
    scores = torch.einsum("nhd,kd->nhk", q.float(), keys.float()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~ok[:, None], NO_KEY)
    top = scores.detach().amax(-1, keepdim=True)
    e = torch.exp(scores - top) * ok[:, None]
    z = e.sum(-1)
    seen = ok.any(1)[:, None]
    o = torch.einsum("nhk,kd->nhd", e, keys.float()) / torch.where(seen, z, 1.0)[..., None]
    return o.to(q.dtype), torch.where(seen, top[..., 0] + torch.log(torch.where(seen, z, 1.0)), NO_KEY)
