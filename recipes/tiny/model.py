"""Forward pass of the backbone over packed rows; agrees with the serving model in fp32.

Rows of several documents lie one after another; `Batch` says where each document starts and what its decoder layers may see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.engram_tables import bucket_primes, column_offsets, hash_multipliers
from recipes.tiny import kernels, pieces
from recipes.tiny.attention import Visibility, attention, attention_reference
from recipes.tiny.params import Params
from recipes.tiny.selection import candidate_mask, select
from recipes.tiny.shape import Shape, rope_frequencies

DENSE, TOPK, FILTER = "dense", "topk", "filter"


@dataclass(frozen=True, slots=True)
class Options:
    """What of the serving arithmetic is on.

    rounding: KV and index round trips. selection: dense, topk, or filter (top-k and the candidate filter, as served).
    dtype: of activations. max_len: longest document of the batch (bounds the width of score and selection matrices).
    """

    rounding: bool = False
    selection: str = DENSE
    dtype: torch.dtype = torch.bfloat16
    max_len: int = 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows, all [N]: ids int64, first row of the document, one past its last, first row the decoder windows may see."""

    ids: Tensor
    start: Tensor
    end: Tensor
    rect: Tensor


@dataclass(slots=True)
class Indexed:
    """One index source's tensors: queries [N, Hi, Di], head weights [N, Hi] f32, keys [Ne, Di], visible entries, selection or None."""

    query: Tensor
    weight: Tensor
    key: Tensor
    vis: Visibility
    sel: Tensor | None


@dataclass(slots=True)
class Result:
    """hidden: [N, C] before the final norm. taps: [N, targets * C]. loads: rows per routed expert of each layer, [L, E]."""

    hidden: Tensor
    taps: Tensor
    loads: list[Tensor]
    indexed: dict[int, Indexed] = field(default_factory=dict)
    attended: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # layer -> q, entries, lse (no sink)
    streams: list[Tensor] = field(default_factory=list)


def first_mix(h: Tensor) -> Tensor:
    """One-hot on stream 0, [N, n] f32. It asks for a gradient so that the first layer runs the same compiled function as the others."""
    pre = torch.zeros(h.shape[0], h.shape[1], device=h.device)
    pre[:, 0] = 1.0
    return pre.requires_grad_(torch.is_grad_enabled())


class Rotary:
    """cos and sin of both rotary bases for every position, [P, R/2] f32."""

    def __init__(self, shape: Shape, max_positions: int, device: str | torch.device) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = {flag: positions[:, None] * rope_frequencies(shape, flag)[None, :] for flag in (0, 1)}
        self.tables = {flag: (a.cos().to(device), a.sin().to(device)) for flag, a in angles.items()}

    def at(self, ratio: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables[min(ratio, 1)]
        return cos[positions], sin[positions]


class Functions:
    """The pieces, compiled or eager, and the kernels or their slow twins."""

    def __init__(self, fast: bool) -> None:
        wrap: Callable[..., Any] = partial(torch.compile, fullgraph=True, dynamic=False) if fast else (lambda fn: fn)
        names = ("attention_in", "attention_out", "compress", "index_query", "moe", "engram", "token_loss", "mix_logits", "head_logits")
        self.table = {name: wrap(getattr(pieces, name)) for name in names}
        self.attention = attention if fast else attention_reference
        self.sinkhorn = kernels.sinkhorn if fast else kernels.sinkhorn_reference
        self.index_scores = kernels.index_scores if fast else kernels.index_scores_reference
        self.fast = fast

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.table[name]


class Backbone:
    """Sizes, constants and functions; the parameters are an argument, so that one object serves training and checking."""

    def __init__(self, shape: Shape, token_map: list[int], device: str, fast: bool, max_positions: int = 8192) -> None:
        self.shape, self.device, self.fn = shape, device, Functions(fast)
        self.rotary = Rotary(shape, max_positions, device)
        self.token_map = torch.tensor(token_map, dtype=torch.int64, device=device)
        self.hashes = []
        primes = bucket_primes(shape.engram_layers, shape.engram_max_ngram, shape.engram_heads, shape.engram_vocab)
        for layer, columns in zip(shape.engram_layers, primes, strict=True):
            multipliers = hash_multipliers(layer, shape.engram_max_ngram, shape.engram_compressed_vocab)
            primes_t, offsets = (torch.tensor(v, dtype=torch.int64, device=device) for v in (columns, column_offsets(columns)))
            self.hashes.append((multipliers, primes_t, offsets))

    def visibility(self, batch: Batch, ratio: int) -> Visibility:
        """Window and entry bounds of layers with this ratio; decoder layers (ratio 1) obey the truncation boundary `rect`."""
        rows = torch.arange(batch.ids.shape[0], device=self.device)
        lo = torch.maximum(rows - self.shape.window + 1, batch.start)
        if ratio == 1:
            lo = torch.where(rows < batch.rect, rows + 1, torch.maximum(lo, batch.rect))
        if not ratio:
            return Visibility(lo.int(), self.shape.window)
        start = batch.start // ratio
        hi = start + (rows - batch.start + 1) // ratio
        entries = batch.ids.shape[0] // ratio
        return Visibility(lo.int(), self.shape.window, start.int(), hi.int(), batch.end[::ratio][:entries].int().contiguous(), ratio)

    def engram_rows(self, batch: Batch, slot: int) -> Tensor:
        """Table rows of one engram layer, [N, columns] int64. An n-gram stops at the document's first token."""
        multipliers, primes, offsets = self.hashes[slot]
        s = self.shape
        compressed = self.token_map[batch.ids]
        rows = torch.arange(batch.ids.shape[0], device=self.device)
        pad = self.token_map[s.engram_pad]
        columns, mixed = [], compressed * multipliers[0]
        for back in range(1, s.engram_max_ngram):
            shifted = torch.where(rows - back >= batch.start, compressed.roll(back), pad)
            mixed = mixed ^ (shifted * multipliers[back])
            columns.append(mixed[:, None].expand(-1, s.engram_heads))
        return torch.cat(columns, 1) % primes + offsets

    def forward(self, params: Params, batch: Batch, options: Options, keep_streams: bool = False) -> Result:
        """Run all backbone layers."""
        s = self.shape
        h = F.embedding(batch.ids, params["embed.weight"]).to(options.dtype)[:, None].expand(-1, s.streams, -1).contiguous()
        pre = first_mix(h)
        taps: list[Tensor] = []
        result = Result(h, h, [])
        run = _Run(self, params, batch, options, result)
        for layer in range(s.num_layers):
            p = f"layers.{layer}."
            if layer in s.engram_layers:
                rows = self.engram_rows(batch, s.engram_layers.index(layer))
                found = F.embedding(rows, params[p + "engram.embed.weight"])
                h = self.fn.engram(h, found, *(params[f"{p}engram.{name}"] for name in ("wkv.weight", "q_weight", "k_weight")))
            if layer in s.targets:
                taps.append(h.float().mean(1).to(h.dtype))
            h, pre = run.layer(layer, h, pre)
            if keep_streams:
                result.streams.append(h)
        result.hidden, result.taps = pieces.collapse(h, pre), torch.cat(taps, -1)
        return result


class _Run:
    """State of one forward pass: what source layers publish to later ones."""

    def __init__(self, backbone: Backbone, params: Params, batch: Batch, options: Options, result: Result) -> None:
        self.b, self.params, self.batch, self.options, self.result = backbone, params, batch, options, result
        ratios = set(backbone.shape.ratios)
        self.vis = {ratio: backbone.visibility(batch, ratio) for ratio in ratios}
        self.rope = {flag: backbone.rotary.at(flag, torch.arange(len(batch.ids), device=batch.ids.device) - batch.start) for flag in (0, 1)}
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}
        self.candidates: Tensor | None = None

    def mixes(self, prefix: str, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.b.shape
        pre, post, logits = self.b.fn.mix_logits(h, *(self.params[f"{prefix}_{name}"] for name in ("fn", "base", "scale")), s.hc_eps)
        return pre, post, self.b.fn.sinkhorn(logits, s.hc_iters, s.hc_eps)

    def layer(self, layer: int, h: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        s, p, w = self.b.shape, f"layers.{layer}.", self.params
        ratio = s.ratios[layer]
        cos, sin = self.rope[min(ratio, 1)]
        a_pre, a_post, a_comb = self.mixes(p + "hc_attn", h)
        names = ("attn_norm.weight", "attn.wq_a.weight", "attn.q_norm.weight", "attn.wq_b.weight", "attn.wkv.weight", "attn.kv_norm.weight")
        x, qr, q, kw = self.b.fn.attention_in(h, pre, *(w[p + n] for n in names), cos, sin, s.heads, self.options.rounding)
        entries, sel = self.sources(layer, x, qr) if ratio else (None, None)
        o, lse = self.b.fn.attention(q, kw, entries, sel, self.vis[ratio])
        if entries is not None:
            self.result.attended[layer] = (q, entries, lse)
        wo_a = w[p + "attn.wo_a.weight"].unflatten(0, (s.o_groups, -1))
        h = self.b.fn.attention_out(o, lse, w[p + "attn.attn_sink"], cos, sin, wo_a, w[p + "attn.wo_b.weight"], h, a_post, a_comb)
        f_pre, f_post, f_comb = self.mixes(p + "hc_ffn", h)
        names = ("ffn_norm.weight", "ffn.gate.weight", "ffn.gate.bias", "ffn.w1", "ffn.w3", "ffn.w2")
        h, load = self.b.fn.moe(h, a_pre, *(w[p + n] for n in names), f_post, f_comb, s.top_k, s.routed_scale, s.swiglu_limit)
        self.result.loads.append(load)
        return h, f_pre

    def sources(self, layer: int, x: Tensor, qr: Tensor) -> tuple[Tensor, Tensor | None]:
        """Entries and selection that this layer attends to; computes them when the layer is a source."""
        s, w, p = self.b.shape, self.params, f"layers.{layer}.attn."
        ratio, rounding = s.ratios[layer], self.options.rounding
        cos, sin = self.rope[1]
        if layer in s.kv_sources:
            rows = x.shape[0] // ratio * ratio
            names = ("wkv.weight", "wgate.weight", "norm.weight")
            c = [w.get(p + "compressor." + n) for n in names] + [w[p + "indexer.wk.weight"], w[p + "indexer.k_norm.weight"]]
            at = slice(0, rows, ratio)
            self.entries[layer] = self.b.fn.compress(x[:rows], *c, cos[at].contiguous(), sin[at].contiguous(), rounding)
        entries, keys = self.entries[s.kv_owner(layer)]
        if layer in s.index_sources:
            projections = (w[p + "indexer.wq_b.weight"], w[p + "indexer.weights_proj.weight"])
            iq, iw = self.b.fn.index_query(x, qr, *projections, cos, sin, s.index_heads, rounding)
            self.result.indexed[layer] = Indexed(iq, iw, keys, self.vis[ratio], self.selection(layer, iq, iw, keys))
        return entries, self.result.indexed[s.topk_owner(layer)].sel

    @torch.no_grad()
    def selection(self, layer: int, iq: Tensor, iw: Tensor, keys: Tensor) -> Tensor | None:
        s, vis = self.b.shape, self.vis[self.b.shape.ratios[layer]]
        if self.options.selection == DENSE:
            return None
        length = self.options.max_len // vis.ratio
        scores = self.b.fn.index_scores(iq, iw, keys, vis.start, vis.hi, length)
        if self.options.selection == FILTER and layer == s.candidate_source:
            self.candidates = candidate_mask(scores, vis, s.candidate_blocks, s.candidate_block_size)
        if self.candidates is not None and layer > s.candidate_source:
            size = s.candidate_block_size
            blocks = self.candidates.repeat_interleave(size, 1)[:, :length]
            scores = scores.masked_fill_(~blocks, float("-inf"))
        return select(scores, s.index_topk)
