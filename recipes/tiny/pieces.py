"""One pure function per part of a layer, over flattened rows; each is compiled once and serves every layer.

Rows are packed tokens, [N, ...]. Weights are f32 and take the dtype of the activations; statistics and mixes are f32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.tiny.quant import q4_index, q4_kv, q8

EPS = 1e-20


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last 2·P channels. x [N, (heads,) D]; cos, sin [N, P] f32; pass -sin to undo."""
    rotated = cos.shape[-1] * 2
    keep, turn = x[..., :-rotated], x[..., -rotated:].float().unflatten(-1, (-1, 2))
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    a, b = turn[..., 0], turn[..., 1]
    out = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((keep, out.to(x.dtype)), -1)


def collapse(h: Tensor, pre: Tensor) -> Tensor:
    """[N, n, C], [N, n] f32 -> [N, C]."""
    return (pre[..., None] * h.float()).sum(1).to(h.dtype)


def expand(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sublayer's output back to the streams; the residual mix sums over the first index of comb [N, n, n]."""
    n = h.shape[1]
    f = h.float()
    mixed = sum(comb[:, j, :, None] * f[:, j, None, :] for j in range(n))
    return (post[..., None] * y.float()[:, None] + mixed).to(h.dtype)


def mix_logits(h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Hyper-connection mixes of one sublayer: pre [N, n], post [N, n], logits of comb [N, n, n], all f32."""
    n = h.shape[1]
    z = h.flatten(1)
    m = linear(z, fn).float() * torch.rsqrt(z.float().square().mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2.0 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    return pre, post, (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))


def attention_in(
    h: Tensor,
    pre: Tensor,
    norm: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    rounding: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normed input x [N, C], low-rank query [N, Q], rotated queries [N, H, D] and window keys [N, D]."""
    x = rms(collapse(h, pre), norm)
    qr = rms(linear(x, wq_a), q_norm)
    q = rope(linear(qr, wq_b).unflatten(-1, (heads, -1)), cos, sin)
    kw = rope(rms(linear(x, wkv), kv_norm), cos, sin)
    return x, qr, q, q8(kw) if rounding else kw


def attention_out(
    o: Tensor,
    lse: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    wo_a: Tensor,
    wo_b: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
) -> Tensor:
    """Apply the sink, undo the rotation, project by groups and write to the streams. wo_a [G, r, H·D/G]."""
    o = (o.float() * torch.sigmoid(lse - sink)[..., None]).to(o.dtype)
    o = rope(o, cos, -sin)
    g = o.flatten(1).unflatten(-1, (wo_a.shape[0], -1))
    t = torch.cat([linear(g[:, i], wo_a[i]) for i in range(wo_a.shape[0])], -1)
    return expand(linear(t, wo_b), h, post, comb)


def compress(
    x: Tensor, wkv: Tensor, wgate: Tensor | None, norm: Tensor, wk: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, rounding: bool
) -> tuple[Tensor, Tensor]:
    """Compressed entries [N/r, D] and index keys [N/r, Di]; r is 2 with a gate and 1 without. cos, sin of the entries' positions.

    The index key's inputs are detached: only the index loss trains the indexer.
    """
    v = linear(x, wkv)
    if wgate is not None:
        alpha = torch.softmax(linear(x, wgate).float().unflatten(0, (-1, 2)), 1)
        v = (alpha * v.float().unflatten(0, (-1, 2))).sum(1).to(x.dtype)
    latent = rms(v, norm)
    entry = rope(latent, cos, sin)
    key = rope(rms(linear(latent.detach(), wk), k_norm), cos, sin)
    return (q4_kv(entry), q4_index(key)) if rounding else (entry, key)


def index_query(
    x: Tensor, qr: Tensor, wq_b: Tensor, weights_proj: Tensor, cos: Tensor, sin: Tensor, heads: int, rounding: bool
) -> tuple[Tensor, Tensor]:
    """Index queries [N, Hi, Di] and head weights [N, Hi] f32; inputs detached."""
    iq = rope(linear(qr.detach(), wq_b).unflatten(-1, (heads, -1)), cos, sin)
    w = linear(x.detach(), weights_proj).float() * (iq.shape[-1] ** -0.5 * heads**-0.5)
    return (q4_index(iq) if rounding else iq), w


def route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Routing weights [N, E] f32, zero for unselected experts, and the selection [N, E] bool. Ties: lower index."""
    s = torch.sqrt(F.softplus(F.linear(x.float(), gate)))
    b = (s + bias).detach()
    experts = b.shape[-1]
    order = torch.arange(experts, device=b.device)
    beats = (b[:, None, :] > b[:, :, None]) | ((b[:, None, :] == b[:, :, None]) & (order[None, None, :] < order[None, :, None]))
    chosen = beats.sum(-1) < top_k
    picked = torch.where(chosen, s, 0.0)
    return picked / (picked.sum(-1, keepdim=True) + EPS) * scale, chosen


def moe(
    h: Tensor,
    pre: Tensor,
    norm: Tensor,
    gate: Tensor,
    bias: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    post: Tensor,
    comb: Tensor,
    top_k: int,
    scale: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """All experts as one wide feed-forward; the shared expert is the last. w1, w3 [E+1, I, C]; w2 [E+1, C, I].

    Returns the new streams and the number of rows of each routed expert, [E] f32.
    """
    x = rms(collapse(h, pre), norm)
    weight, chosen = route(x, gate, bias, top_k, scale)
    weight = torch.cat((weight, torch.ones_like(weight[:, :1])), -1)
    g = linear(x, w1.flatten(0, 1)).float().clamp(max=limit)
    u = linear(x, w3.flatten(0, 1)).float().clamp(-limit, limit)
    a = (F.silu(g) * u).unflatten(-1, (weight.shape[-1], -1)) * weight[..., None]
    y = linear(a.flatten(1).to(x.dtype), w2.permute(1, 0, 2).flatten(1))
    return expand(y, h, post, comb), chosen.float().sum(0)


def engram(h: Tensor, found: Tensor, wkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
    """Add the gated n-gram memory to every stream. found [N, columns, d]: the table's rows."""
    n, width = h.shape[1], h.shape[2]
    kv = linear(found.flatten(1).to(h.dtype), wkv).float()
    key, value = kv[:, : n * width].unflatten(-1, (n, width)), kv[:, n * width :]
    f = h.float()
    dot = (f * q_weight * k_weight * key).sum(-1)
    dot = dot * torch.rsqrt(f.square().mean(-1) + EPS) * torch.rsqrt(key.square().mean(-1) + EPS) * width**-0.5
    gate = torch.sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp(min=1e-6)), dot))
    return (f + gate[..., None] * value[:, None]).to(h.dtype)


def head_logits(x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
    """[N, V] f32."""
    return linear(rms(x, norm), head).float()


def token_loss(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy per row [N] f32 and whether the argmax is the target [N] bool."""
    logits = head_logits(x, norm, head)
    return F.cross_entropy(logits, targets, reduction="none"), logits.detach().argmax(-1) == targets
