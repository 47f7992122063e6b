"""The text model: embedding, layers of attention and experts over hyper-connected streams, head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.loader import WeightSource
from engine.models.attention import Attention, window_keys
from engine.models.compressor import Compressor
from engine.models.config import TextConfig
from engine.models.engram import Engram
from engine.models.hyper_connections import first_mix, load_mixer
from engine.models.indexer import Indexer, Picks
from engine.models.inputs import NewEntries, Rows, StepInputs
from engine.models.moe import MoE
from engine.models.numerics import Numerics, WideLinear
from engine.models.packed_layers import PackedMoE
from engine.models.probe import Probe
from engine.models.shared_inputs import ContextShare
from engine.ops.hyper_boundary import Boundary, Mixer, Written, hyper_boundary
from engine.ops.hyper_streams import expand
from engine.parallel.expert_exchange import ExpertExchange


@dataclass(frozen=True, slots=True)
class Block:
    """What backbone layers and draft stages share: the two sublayers with their norms and mixes."""

    attention: Attention
    attn_norm: Tensor
    attn_mix: Mixer
    ffn: MoE | PackedMoE
    ffn_norm: Tensor
    ffn_mix: Mixer
    eps: float

    @staticmethod
    def load(
        source: WeightSource,
        prefix: str,
        ratio: int,
        experts: tuple[int, int],
        text: TextConfig,
        numerics: Numerics,
        exchange: ExpertExchange | None = None,
    ) -> Block:
        """prefix: `layers.3` or `mtp.0`. experts: how many there are, how many a token uses. exchange: when other ranks have some."""
        return Block(
            attention=Attention.load(source, f"{prefix}.attn", ratio, text, numerics),
            attn_norm=source.tensor(f"{prefix}.attn_norm.weight", numerics.dtype),
            attn_mix=load_mixer(source, f"{prefix}.hc_attn", text),
            ffn=(PackedMoE if numerics.packed_weights else MoE).load(source, f"{prefix}.ffn", text, numerics, *experts, exchange),
            ffn_norm=source.tensor(f"{prefix}.ffn_norm.weight", numerics.dtype),
            ffn_mix=load_mixer(source, f"{prefix}.hc_ffn", text),
            eps=text.rms_norm_eps,
        )

    def enter(self, streams: Streams) -> Boundary:
        """From the streams as the sublayer before left them to this block's attention input and mixes."""
        return hyper_boundary(streams.h, streams.written, self.attn_mix, streams.pre, self.attn_norm, self.eps)

    def feed_forward(self, y: Tensor, entered: Boundary, streams: Streams, layer: int, probe: Probe | None = None) -> None:
        """The second sublayer, behind the attention's output y [T, C]. Leaves its own output in `streams`, to be written back."""
        assert entered.pre is not None
        inner = hyper_boundary(entered.h, written(y, entered), self.ffn_mix, entered.pre, self.ffn_norm, self.eps)
        assert inner.pre is not None
        out = self.ffn(inner.x, layer, probe)
        streams.h, streams.pre, streams.written = inner.h, inner.pre, written(out, inner)
        if probe is not None:
            probe.record("ffn_out", layer, out)
            probe.record("hidden", layer, streams.settle())
            probe.record("pre_mix", layer, inner.pre)


def written(y: Tensor, boundary: Boundary) -> Written:
    """A sublayer's output with the weights that its own mixes give it."""
    assert boundary.post is not None and boundary.comb is not None  # noqa: PT018
    return Written(y, boundary.post, boundary.comb)


@dataclass(frozen=True, slots=True)
class Layer:
    """One backbone layer. compressor: KV sources only; indexer: index sources only; engram: engram layers only."""

    block: Block
    compressor: Compressor | None
    indexer: Indexer | None
    engram: Engram | None


@dataclass(frozen=True, slots=True)
class Output:
    """hidden: [T, C] normalised output of the kept rows. taps: [T, targets * C] inputs of the draft stages, None when not asked for.

    Of a step that several ranks share: hidden of the rows that this rank asks for, taps of its own sequences' rows.
    """

    hidden: Tensor
    taps: Tensor | None


@dataclass(slots=True)
class Streams:
    """What travels from layer to layer: streams [T, n, C], read weights [T, n], the rows they belong to, and the current picks.

    written: the last sublayer's output, which the next boundary writes back on the way; None when h has it already.
    share: how these rows meet those of other ranks; None when all rows are here.
    """

    h: Tensor
    pre: Tensor
    rows: Rows | None = None
    picks: Picks | None = None
    written: Written | None = None
    share: ContextShare | None = None

    def settle(self) -> Tensor:
        """The streams with everything written back."""
        if self.written is not None:
            self.h = expand(self.written.y, self.h, self.written.post, self.written.comb)
            self.written = None
        return self.h


@dataclass(frozen=True, slots=True)
class DeepseekV41:
    """The backbone. embed [V, C]. Stateless: all state of sequences is in the `KVCache` that is passed in."""

    text: TextConfig
    embed: Tensor
    layers: list[Layer]
    norm: Tensor
    head: WideLinear

    @staticmethod
    def load(
        source: WeightSource, text: TextConfig, numerics: Numerics, engram_pad_id: int, exchange: ExpertExchange | None = None
    ) -> DeepseekV41:
        """Take every backbone tensor from `source`; with an exchange, only this rank's share of the experts, which is attached to it."""
        embed = source.tensor("embed.weight", numerics.dtype)
        layers = [_load_layer(source, layer, text, numerics, engram_pad_id, exchange) for layer in range(text.num_hidden_layers)]
        if exchange is not None:
            for number, layer in enumerate(layers):
                exchange.attach(number, layer.block.ffn)
        norm, head = source.tensor("norm.weight", numerics.dtype), WideLinear.load(source, "head.weight", numerics)
        return DeepseekV41(text, embed, layers, norm, head)

    def __call__(self, inputs: StepInputs, cache: KVCache, *, want_taps: bool = False, probe: Probe | None = None) -> Output:
        """Run all layers over one step, reading and extending the cache."""
        h = self.embed[inputs.token_ids][:, None].expand(-1, self.text.hc_mult, -1).contiguous()
        state = Streams(h, first_mix(len(h), self.text.hc_mult, h.device), inputs.encoder, share=inputs.share)
        taps = []
        for number, layer in enumerate(self.layers):
            if layer.engram is not None:
                state.h = layer.engram(state.settle(), inputs.grams, number, probe)
            if number == self.text.boundary and inputs.kept is not None and not self._enter_decoder(layer, number, state, inputs, cache):
                return Output(state.h.new_zeros(0, self.text.hidden_size), None)
            entered = layer.block.enter(state)
            if (want_taps or probe is not None) and number in self.text.dspark_target_layer_ids:
                tap = entered.h.float().mean(1).to(entered.h.dtype)
                taps.append(tap if state.share is None else state.share.own(tap))
            self._run_layer(layer, number, entered, state, inputs, cache, probe)
        if probe is not None and taps:
            probe.record("main_hidden", -1, torch.cat(taps, 1))
        hidden = hyper_boundary(state.h, state.written, None, state.pre, self.norm, self.text.rms_norm_eps).x
        if state.share is not None:
            hidden = state.share.outputs(hidden)
        return Output(hidden, torch.cat(taps, 1) if taps else None)

    def run_one_layer(self, number: int, state: Streams, inputs: StepInputs, cache: KVCache, probe: Probe | None = None) -> None:
        """One layer alone, on and in `state`. For measurements; decoder truncation does not apply."""
        layer = self.layers[number]
        if layer.engram is not None:
            state.h = layer.engram(state.settle(), inputs.grams, number, probe)
        self._run_layer(layer, number, layer.block.enter(state), state, inputs, cache, probe)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, C] normalised output -> [R, V] fp32, into `out` when given."""
        return self.head(hidden, out)

    def _enter_decoder(self, layer: Layer, number: int, state: Streams, inputs: StepInputs, cache: KVCache) -> bool:
        """Compress ALL rows of the chunk, then drop the rows that decoder layers do not see. False when no row is left."""
        assert layer.compressor is not None
        assert inputs.kept is not None
        block, state.h = layer.block, state.settle()
        x = hyper_boundary(state.h, None, None, state.pre, block.attn_norm, block.eps).x
        self._compress(layer.compressor, x, inputs.entries[self.text.ratio(number)], state, cache)
        if state.share is None:
            state.h, state.pre = state.h.index_select(0, inputs.kept), state.pre.index_select(0, inputs.kept)
        else:
            assert state.share.kept is not None
            state.h, state.pre = state.share.kept(state.h), state.share.kept(state.pre)
            state.share = None  # from here on every rank has all kept rows of its own sequences
        return len(inputs.kept) > 0

    def _compress(self, compressor: Compressor, x: Tensor, entries: NewEntries, state: Streams, cache: KVCache) -> None:
        projected = compressor.project(x)
        compressor.store(projected if state.share is None else state.share.keys(projected), entries, cache)

    def _run_layer(
        self, layer: Layer, number: int, entered: Boundary, state: Streams, inputs: StepInputs, cache: KVCache, probe: Probe | None
    ) -> None:
        text, block, ratio, x = self.text, layer.block, self.text.ratio(number), entered.x
        if number == text.boundary:
            state.rows = inputs.decoder
        rows = state.rows
        assert rows is not None
        rot = rows.rotations.of(ratio)
        ring = cache.rings[number]
        if rows.history is None and rows.store_rows is None:
            latent, _ = block.attention.project(x, rot, cache, ring, rows.store_slots)
            keys = ring
        else:
            latent, stored = block.attention.project(x, rot, cache)
            if state.share is not None:
                stored = state.share.keys(stored)
            keys = window_keys(stored, ring, rows)
        compressed = number == text.boundary and inputs.kept is not None
        if layer.compressor is not None and not compressed:
            self._compress(layer.compressor, x, inputs.entries[ratio], state, cache)
        if layer.indexer is not None:
            state.picks = layer.indexer(x, latent, rows, inputs, cache, state.picks, probe)
        sources = [(keys, rows.window)]
        if ratio and state.picks is not None:
            sources.append((cache.kv_rows, state.picks.selection))
        y = block.attention.attend(latent, rot, rows.rotations.inverse_of(ratio), sources)
        if probe is not None:
            probe.record("attn_out", number, y)
        block.feed_forward(y, entered, state, number, probe)


def _load_layer(
    source: WeightSource, layer: int, text: TextConfig, numerics: Numerics, engram_pad_id: int, exchange: ExpertExchange | None
) -> Layer:
    experts = (text.n_routed_experts, text.num_experts_per_tok)
    return Layer(
        block=Block.load(source, f"layers.{layer}", text.ratio(layer), experts, text, numerics, exchange),
        compressor=Compressor.load(source, layer, text, numerics) if layer in text.kv_source_layer_ids else None,
        indexer=Indexer.load(source, layer, text, numerics) if layer in text.index_source_layer_ids else None,
        engram=Engram.load(source, layer, text, numerics, engram_pad_id) if layer in text.engram_layer_ids else None,
    )
