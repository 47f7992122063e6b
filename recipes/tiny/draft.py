"""The draft stages over packed anchors: one anchor is a committed row p; five rows behind it are drafted at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.tiny import pieces
from recipes.tiny.attention import NO_KEY
from recipes.tiny.model import Backbone, Batch, Options, first_mix
from recipes.tiny.params import Params
from recipes.tiny.quant import q8


@dataclass(slots=True)
class Drafted:
    """hidden: [M, block, C] before the stage norm. base: logits without the Markov term, [M, block, V] f32."""

    hidden: Tensor
    base: Tensor


def draft_attention(q: Tensor, main: Tensor, own: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """q [M, B, H, D]; main [M, W, D]; own [M, B, D]; valid [M, W] bool. Output [M·B, H, D] and lse [M·B, H] f32."""
    anchors, block, heads, dim = q.shape
    keys = torch.cat((main, own), 1)
    seen = F.pad(valid, (0, block), value=True)
    s = torch.bmm(q.reshape(anchors, block * heads, dim), keys.mT).float() * dim**-0.5
    s = s.masked_fill(~seen[:, None], NO_KEY)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[..., None]).to(q.dtype)
    return torch.bmm(p, keys).reshape(-1, heads, dim), lse.reshape(-1, heads)


class Draft:
    """Draft stages that share a backbone's sizes, tables and functions."""

    def __init__(self, backbone: Backbone) -> None:
        self.b = backbone
        self.skip_head = False  # leave `Drafted.base` empty
        self.loads: list[Tensor] = []  # rows per routed expert of each stage in the last forward pass

    def forward(self, params: Params, batch: Batch, taps: Tensor, anchors: Tensor, lo: Tensor, options: Options) -> Drafted:
        """Draft behind rows `anchors` [M] int64; token ids[p + 1] is known. lo: [M] first main key's row of each anchor."""
        s, fn = self.b.shape, self.b.fn
        block = s.draft_block
        main_x = pieces.rms(pieces.linear(taps, params["mtp.0.main_proj.weight"]), params["mtp.0.main_norm.weight"])
        window = anchors[:, None] + torch.arange(1 - s.window, 1, device=anchors.device)
        valid, window = window >= lo[:, None], window.clamp(min=0).flatten()
        ids = torch.full((len(anchors), block), s.noise_id, device=anchors.device)
        ids[:, 0] = batch.ids[anchors + 1]
        positions = (anchors - batch.start[anchors] + 1)[:, None] + torch.arange(block, device=anchors.device)
        rope = self.b.rotary.at(0, positions.flatten())
        main_rope = self.b.rotary.at(0, torch.arange(len(batch.ids), device=anchors.device) - batch.start)
        h = F.embedding(ids.flatten(), params["embed.weight"]).to(options.dtype)[:, None].expand(-1, s.streams, -1).contiguous()
        pre = first_mix(h)
        self.loads = []
        for stage in range(s.draft_stages):
            p = f"mtp.{stage}."
            keys = pieces.rope(
                pieces.rms(pieces.linear(main_x, params[p + "attn.wkv.weight"]), params[p + "attn.kv_norm.weight"]), *main_rope
            )
            keys = q8(keys) if options.rounding else keys
            main = keys.index_select(0, window).unflatten(0, (len(anchors), -1))
            h, pre = self._stage(params, p, h, pre, main, valid, rope, options.rounding)
        hidden = pieces.collapse(h, pre)
        if self.skip_head:
            return Drafted(hidden.unflatten(0, (-1, block)), hidden[:0])
        base = fn.head_logits(hidden, params[f"mtp.{s.draft_stages - 1}.norm.weight"], params["head.weight"])
        return Drafted(hidden.unflatten(0, (-1, block)), base.unflatten(0, (-1, block)))

    def _mixes(self, params: Params, prefix: str, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.b.shape
        pre, post, logits = self.b.fn.mix_logits(h, *(params[f"{prefix}_{name}"] for name in ("fn", "base", "scale")), s.hc_eps)
        return pre, post, self.b.fn.sinkhorn(logits, s.hc_iters, s.hc_eps)

    def _stage(
        self, w: Params, p: str, h: Tensor, pre: Tensor, main: Tensor, valid: Tensor, rope: tuple[Tensor, Tensor], rounding: bool
    ) -> tuple[Tensor, Tensor]:
        s, fn = self.b.shape, self.b.fn
        a_pre, a_post, a_comb = self._mixes(w, p + "hc_attn", h)
        names = ("attn_norm.weight", "attn.wq_a.weight", "attn.q_norm.weight", "attn.wq_b.weight", "attn.wkv.weight", "attn.kv_norm.weight")
        _, _, q, own = fn.attention_in(h, pre, *(w[p + n] for n in names), *rope, s.heads, rounding)
        block = s.draft_block
        o, lse = draft_attention(q.unflatten(0, (-1, block)), main, own.unflatten(0, (-1, block)), valid)
        wo_a = w[p + "attn.wo_a.weight"].unflatten(0, (s.o_groups, -1))
        h = fn.attention_out(o, lse, w[p + "attn.attn_sink"], *rope, wo_a, w[p + "attn.wo_b.weight"], h, a_post, a_comb)
        f_pre, f_post, f_comb = self._mixes(w, p + "hc_ffn", h)
        names = ("ffn_norm.weight", "ffn.gate.weight", "ffn.gate.bias", "ffn.w1", "ffn.w3", "ffn.w2")
        h, load = fn.moe(h, a_pre, *(w[p + n] for n in names), f_post, f_comb, s.draft_top_k, s.routed_scale, s.swiglu_limit)
        self.loads.append(load)
        return h, f_pre

    def markov(self, params: Params, previous: Tensor) -> Tensor:
        """Embedding of the previous token for the Markov and confidence heads, [..., rank] f32."""
        return F.embedding(previous, params[f"mtp.{self.b.shape.draft_stages - 1}.markov_head.embed.weight"])

    def logits(self, params: Params, base: Tensor, markov: Tensor) -> Tensor:
        return base + F.linear(markov, params[f"mtp.{self.b.shape.draft_stages - 1}.markov_head.head.weight"])

    def confidence(self, params: Params, hidden: Tensor, markov: Tensor) -> Tensor:
        """Raw confidence, [...] f32."""
        proj = params[f"mtp.{self.b.shape.draft_stages - 1}.confidence_head.proj.weight"]
        return F.linear(torch.cat((hidden.float(), markov), -1), proj)[..., 0]

    @torch.no_grad()
    def greedy(self, params: Params, drafted: Drafted, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Walk the Markov head with its own argmax: tokens [M, block], logits [M, block, V], confidences [M, block]."""
        previous, tokens, logits, confidences = first, [], [], []
        for i in range(self.b.shape.draft_block):
            markov = self.markov(params, previous)
            logits.append(self.logits(params, drafted.base[:, i], markov))
            confidences.append(self.confidence(params, drafted.hidden[:, i], markov))
            previous = logits[-1].argmax(-1)
            tokens.append(previous)
        return torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidences, 1)
