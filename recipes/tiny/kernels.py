"""Two small Triton kernels with slow twins: the Sinkhorn normalisation of stream mixes, and index scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.tiny.attention import TILE


@triton.jit
def _sinkhorn_forward(X, Y, num_rows, eps, ITERS: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0) * B + tl.arange(0, B)
    at = row[:, None, None] * (N * N) + tl.arange(0, N)[None, :, None] * N + tl.arange(0, N)[None, None, :]
    ok = (row < num_rows)[:, None, None]
    a = tl.load(X + at, mask=ok, other=0.0)
    a = tl.exp(a - tl.max(a, 2)[:, :, None])
    a = a / tl.sum(a, 2)[:, :, None] + eps
    a = a / (tl.sum(a, 1)[:, None, :] + eps)
    for _ in range(ITERS - 1):
        a = a / (tl.sum(a, 2)[:, :, None] + eps)
        a = a / (tl.sum(a, 1)[:, None, :] + eps)
    tl.store(Y + at, a, mask=ok)


@triton.jit
def _sinkhorn_backward(X, DY, DX, S, num_rows, eps, ITERS: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
    """Recomputes the forward steps into the scratch S [2·ITERS - 1, rows, N, N], then walks them backwards."""
    row = tl.program_id(0) * B + tl.arange(0, B)
    at = row[:, None, None] * (N * N) + tl.arange(0, N)[None, :, None] * N + tl.arange(0, N)[None, None, :]
    ok = (row < num_rows)[:, None, None]
    step = num_rows.to(tl.int64) * (N * N)
    a = tl.load(X + at, mask=ok, other=0.0)
    a = tl.exp(a - tl.max(a, 2)[:, :, None])
    soft = a / tl.sum(a, 2)[:, :, None]
    a = soft + eps
    tl.store(S + at, a, mask=ok)
    a = a / (tl.sum(a, 1)[:, None, :] + eps)
    for i in range(ITERS - 1):
        tl.store(S + (2 * i + 1) * step + at, a, mask=ok)
        a = a / (tl.sum(a, 2)[:, :, None] + eps)
        tl.store(S + (2 * i + 2) * step + at, a, mask=ok)
        a = a / (tl.sum(a, 1)[:, None, :] + eps)
    tl.debug_barrier()
    g = tl.load(DY + at, mask=ok, other=0.0)
    for back in range(ITERS - 1):
        i = ITERS - 2 - back
        x = tl.load(S + (2 * i + 2) * step + at, mask=ok, other=1.0)
        s = tl.sum(x, 1)[:, None, :] + eps
        g = g / s - tl.sum(g * x, 1)[:, None, :] / (s * s)
        x = tl.load(S + (2 * i + 1) * step + at, mask=ok, other=1.0)
        s = tl.sum(x, 2)[:, :, None] + eps
        g = g / s - tl.sum(g * x, 2)[:, :, None] / (s * s)
    x = tl.load(S + at, mask=ok, other=1.0)
    s = tl.sum(x, 1)[:, None, :] + eps
    g = g / s - tl.sum(g * x, 1)[:, None, :] / (s * s)
    g = soft * (g - tl.sum(g * soft, 2)[:, :, None])
    tl.store(DX + at, g, mask=ok)


_ROWS = 64


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, iters, eps):
        x = x.contiguous()
        y = torch.empty_like(x)
        _sinkhorn_forward[(triton.cdiv(x.shape[0], _ROWS),)](x, y, x.shape[0], eps, iters, x.shape[1], _ROWS, num_warps=2)
        ctx.save_for_backward(x)
        ctx.iters, ctx.eps = iters, eps
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        scratch = torch.empty(2 * ctx.iters - 1, *x.shape, dtype=x.dtype, device=x.device)
        _sinkhorn_backward[(triton.cdiv(x.shape[0], _ROWS),)](
            x, dy.contiguous(), dx, scratch, x.shape[0], ctx.eps, ctx.iters, x.shape[1], _ROWS, num_warps=2
        )
        return dx, None, None


def sinkhorn(x: Tensor, iters: int, eps: float) -> Tensor:
    """Doubly normalise exp(x): x [N, n, n] f32 logits -> [N, n, n] f32. Source: config keys `hc_sinkhorn_iters`, `hc_eps`."""
    return _Sinkhorn.apply(x, iters, eps)


def sinkhorn_reference(x: Tensor, iters: int, eps: float) -> Tensor:
    """The slow twin."""
    a = torch.softmax(x, -1) + eps
    a = a / (a.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        a = a / (a.sum(2, keepdim=True) + eps)
        a = a / (a.sum(1, keepdim=True) + eps)
    return a


@triton.jit
def _index_scores(
    Q, W, K, START, HI, OUT, length, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    tile, j = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    row = tile * T + tl.arange(0, T)
    d = tl.arange(0, D)
    start = tl.load(START + tile * T)
    hi = tl.load(HI + row)
    ok = (start + j)[None, :] < hi[:, None]
    k = tl.load(K + (start + j)[:, None] * D + d[None, :], mask=(start + j < tl.max(hi))[:, None], other=0.0)
    acc = tl.zeros((T, B), tl.float32)
    for h in range(H):
        q = tl.load(Q + (row[:, None] * H + h) * D + d[None, :])
        s = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
        acc += s * tl.load(W + row * H + h)[:, None]
    out = tl.where(ok, acc, float("-inf"))
    tl.store(OUT + row[:, None].to(tl.int64) * length + j[None, :], out, mask=(j < length)[None, :])


def index_scores(iq: Tensor, w: Tensor, ik: Tensor, start: Tensor, hi: Tensor, length: int) -> Tensor:
    """Scores of every entry of a row's document, [N, length] f32, -inf where invisible; no gradient.

    iq [N, Hi, Di]; w [N, Hi] f32; ik [Ne, Di]; start, hi [N] int32 absolute entry bounds. N is a multiple of TILE.
    """
    rows, heads, dim = iq.shape
    out = torch.empty(rows, length, dtype=torch.float32, device=iq.device)
    block = 128
    _index_scores[(rows // TILE, triton.cdiv(length, block))](
        iq.detach().contiguous(), w.detach().contiguous(), ik.detach().contiguous(), start, hi, out, length, TILE, heads, dim, block,
        num_warps=4,
    )  # fmt: skip
    return out


def index_scores_reference(iq: Tensor, w: Tensor, ik: Tensor, start: Tensor, hi: Tensor, length: int) -> Tensor:
    """The slow twin, for any N."""
    at = start[:, None].long() + torch.arange(length, device=iq.device)
    keys = ik.detach().float()[at.clamp(max=ik.shape[0] - 1)]
    dots = torch.einsum("nhd,njd->nhj", iq.detach().float(), keys).relu()
    return torch.einsum("nh,nhj->nj", w.detach(), dots).masked_fill(at >= hi[:, None], float("-inf"))
