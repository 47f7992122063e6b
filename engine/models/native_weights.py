"""A loaded model in the form of the native CPU code: packed matrices, and structures that point to them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.models import native_layout as c
from engine.models.attention import Attention
from engine.models.compressor import Compressor
from engine.models.config import TextConfig
from engine.models.deepseek_v41 import Block, DeepseekV41
from engine.models.draft import DraftModel
from engine.models.engram import Engram
from engine.models.indexer import Indexer
from engine.models.moe import MoE
from engine.models.numerics import Numerics
from engine.models.packed_layers import AnyBlockLinear, AnyLinear, PackedLinear, PackedMoE
from engine.ops.hyper_boundary import Mixer
from engine.parallel.expert_exchange import ExpertExchange

LARGE_PAGE = 2**21
ARENA = 8 * LARGE_PAGE
_LINE = 64  # of the CPU's caches

# Heads that share a vector; the query projections are packed so that they come out side by side.
LANES = 8
# Formats of packed matrices from the narrowest to the one that holds everything: fp4, bf16, fp32.
_GENERALITY = (2, 0, 1)


@dataclass(frozen=True, slots=True)
class Tables:
    """Inputs that are no weights. plain, scaled: rotary frequencies [R/2] fp32. token_map: raw id -> compressed id."""

    plain: Tensor
    scaled: Tensor
    token_map: list[int]


def unsupported(text: TextConfig, numerics: Numerics, device: str) -> str:
    """Why the native code cannot run a model; "" when it can."""
    if device != "cpu":
        return f"the device is {device}"
    if numerics.dtype is not torch.float32 or numerics.quantize_inputs:
        return "the precision is neither F nor Fq"
    if numerics.packed_rows:
        return "cache rows are packed"
    if text.hc_mult != 4:
        return f"the model has {text.hc_mult} residual streams, not 4"
    if max(text.n_routed_experts, text.dspark_n_routed_experts) > 1024:
        return f"the model has {text.n_routed_experts} experts, more than 1024"
    return ""


class PackedMemory:
    """Memory of packed matrices: few large pieces on large pages, since every step reads most of it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """[size] uint8 that starts at a cache line. Whoever holds it keeps its piece alive."""
        if size > len(self._free):
            self._free = self._reserve(max(ARENA, size + -size % LARGE_PAGE))
        taken, self._free = self._free[:size], self._free[size + -size % _LINE :]
        return taken

    def _reserve(self, size: int) -> Tensor:
        room = torch.empty(size + LARGE_PAGE, dtype=torch.uint8)
        aligned = room[-room.data_ptr() % LARGE_PAGE :][:size]
        self._library.dix_large_pages(aligned.data_ptr(), size)
        return aligned


class NativeWeights:
    """Owns packed matrices and everything else that `model` points to. Keeps the torch model alive for what is used as it is."""

    def __init__(
        self,
        library: ctypes.CDLL,
        backbone: DeepseekV41,
        draft: DraftModel | None,
        cache: KVCache,
        numerics: Numerics,
        tables: Tables,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """draft: only when its windows are kept up to date. exchange: for backbone layers whose experts are on several ranks, which all
        call this together."""
        self._library, self._cache, self._memory = library, cache, PackedMemory(library)
        self._kept: list[Any] = [backbone, draft, tables]
        self._taps = backbone.text.dspark_target_layer_ids if draft is not None else ()
        self.expert_stores: list[list[Tensor]] = []
        self._exchange = exchange
        self.model = self._model(backbone, draft, numerics, tables)

    def _model(self, backbone: DeepseekV41, draft: DraftModel | None, numerics: Numerics, tables: Tables) -> c.Model:
        text, cache = backbone.text, self._cache
        layers = [self._backbone_layer(backbone, number) for number in range(text.num_hidden_layers)]
        stages = [] if draft is None else [self._stage(draft, number) for number in range(text.num_stages)]
        return c.Model(
            layers=self._keep((c.Layer * len(layers))(*layers)),
            stages=self._keep((c.Layer * len(stages))(*stages)) if stages else None,
            draft=None if draft is None else ctypes.pointer(self._draft(draft)),
            embed=self._floats(backbone.embed),
            norm=self._floats(backbone.norm),
            head=self._pack(backbone.head.weight),
            plain_frequencies=self._floats(tables.plain),
            scaled_frequencies=self._floats(tables.scaled),
            token_map=self._pointer(torch.tensor(tables.token_map, dtype=torch.int32)),
            exchange=None,
            kv_rows=cache.kv_rows.data_ptr(),
            index_rows=cache.index_rows.data_ptr(),
            kv_stride=cache.layout.kv_stride,
            index_stride=cache.layout.index_stride,
            rms_eps=text.rms_norm_eps,
            hc_eps=text.hc_eps,
            swiglu_limit=text.swiglu_limit,
            routed_scale=text.routed_scaling_factor,
            gate_temperature=text.gate_temp,
            num_layers=text.num_hidden_layers,
            num_stages=len(stages),
            boundary=text.boundary,
            hidden=text.hidden_size,
            vocab=text.vocab_size,
            heads=text.num_attention_heads,
            head_dim=text.head_dim,
            rope_dim=text.qk_rope_head_dim,
            q_rank=text.q_lora_rank,
            groups=text.o_groups,
            group_rank=text.o_lora_rank,
            inner=text.moe_intermediate_size,
            index_heads=text.index_n_heads,
            index_dim=text.index_head_dim,
            index_topk=text.index_topk,
            candidate_blocks=text.candidate_topk_blocks,
            candidate_size=text.candidate_block_size,
            sinkhorn_iters=text.hc_sinkhorn_iters,
            ngrams=text.ngram_history + 1,
            engram_columns=text.engram_columns,
            engram_dim=text.engram_head_dim,
            window=cache.window,
            ring_rows=cache.ring_rows,
            partial_rows=cache.partial_rows,
            block_size=cache.block_size,
            quantize_kv=numerics.quantize_kv,
        )

    def _backbone_layer(self, backbone: DeepseekV41, number: int) -> c.Layer:
        layer, text = backbone.layers[number], backbone.text
        result = self._layer(layer.block, number)
        result.ratio = text.ratio(number)
        result.tap = number in self._taps
        if layer.compressor is not None:
            result.compressor = ctypes.pointer(self._compressor(layer.compressor))
        if layer.indexer is not None:
            result.indexer = ctypes.pointer(self._indexer(layer.indexer, text))
        if layer.engram is not None:
            result.engram = ctypes.pointer(self._engram(layer.engram))
        return result

    def _stage(self, draft: DraftModel, number: int) -> c.Layer:
        stage = draft.stages[number]
        result = self._layer(stage, draft.text.num_hidden_layers + number)
        result.attention.wkv = self._pack(dense(stage.attention.wq_a_wkv)[draft.text.q_lora_rank :])
        return result

    def _layer(self, block: Block, ring: int) -> c.Layer:
        return c.Layer(
            attention=self._attention(block.attention),
            experts=self._experts(block.ffn),
            attn_mix=self._mix(block.attn_mix),
            ffn_mix=self._mix(block.ffn_mix),
            attn_norm=self._floats(block.attn_norm),
            ffn_norm=self._floats(block.ffn_norm),
            ring=self._cache.rings[ring].data_ptr(),
        )

    def _attention(self, attention: Attention) -> c.Attention:
        text = attention.text
        return c.Attention(
            wq_a_wkv=self._pack(dense(attention.wq_a_wkv)),
            wq_b=self._pack(_side_by_side(dense(attention.wq_b), text.num_attention_heads)),
            wo_a=self._pack(dense(attention.wo_a)),
            wo_b=self._pack(dense(attention.wo_b)),
            q_norm=self._floats(attention.q_norm),
            kv_norm=self._floats(attention.kv_norm),
            sink=self._floats(torch.nn.functional.pad(attention.sink, (0, -text.num_attention_heads % LANES))),
        )

    def _experts(self, moe: MoE | PackedMoE) -> c.Experts:
        assert isinstance(moe, MoE), "the compiled step reads no packed experts"
        shared = moe.exchange is not None
        w13, packed_w13 = self._pack_stack(moe.w13[:-1], agree=shared)
        w2, packed_w2 = self._pack_stack(moe.w2[:-1], agree=shared)
        layer = -1
        if shared:
            layer = len(self.expert_stores)
            self.expert_stores.append([packed_w13, packed_w2])
        return c.Experts(
            gate=self._pack(moe.gate),
            w13=w13,
            w2=w2,
            shared_w13=self._pack(moe.w13[-1]),
            shared_w2=self._pack(moe.w2[-1]),
            bias=self._floats(moe.bias),
            count=len(moe.gate),
            chosen=moe.num_chosen,
            held=len(moe.w13) - 1,
            layer=layer,
        )

    def _mix(self, mix: Mixer) -> c.Mix:
        return c.Mix(fn=self._pack(mix.fn), base=self._floats(mix.base), scale=self._floats(mix.scale))

    def _compressor(self, compressor: Compressor) -> c.Compressor:
        partial = self._cache.partials.get(compressor.layer)
        return c.Compressor(
            wkv=self._pack(compressor.wkv.weight),
            wk=self._pack(compressor.wk.weight),
            norm=self._floats(compressor.norm),
            k_norm=self._floats(compressor.k_norm),
            partial=None if partial is None else partial.data_ptr(),
            kv_offset=self._cache.layout.kv_offset[compressor.layer],
            index_offset=self._cache.layout.index_offset[compressor.layer],
        )

    def _indexer(self, indexer: Indexer, text: TextConfig) -> c.Indexer:
        owner = text.kv_owner(indexer.layer)
        return c.Indexer(
            wq_b=self._pack(_side_by_side(dense(indexer.wq_b), text.index_n_heads)),
            weights=self._pack(indexer.weights_proj.weight),
            kv_offset=self._cache.layout.kv_offset[owner],
            index_offset=self._cache.layout.index_offset[owner],
            publishes=indexer.layer == text.candidate_source_layer_id,
            restricted=text.uses_candidates(indexer.layer),
        )

    def _engram(self, engram: Engram) -> c.Engram:
        formats = {torch.float8_e4m3fn: 0, torch.uint8: 0, torch.bfloat16: 1, torch.float32: 2}
        return c.Engram(
            wkv=self._pack(dense(engram.wkv)),
            table=self._pointer(engram.table),
            scale=None if engram.scale is None else self._pointer(engram.scale),
            weight=self._floats(engram.weight),
            multipliers=self._pointer(engram.multipliers),
            primes=self._pointer(engram.primes),
            offsets=self._pointer(engram.offsets),
            format=formats[engram.table.dtype],
            pad_id=engram.pad_id,
        )

    def _draft(self, draft: DraftModel) -> c.Draft:
        taps = self._cache.taps
        assert taps is not None, "drafts on a cache without taps"
        return c.Draft(
            main_proj=self._pack(dense(draft.main_proj)),
            markov_head=self._pack(draft.markov_head.weight),
            main_norm=self._floats(draft.main_norm),
            norm=self._floats(draft.norm),
            markov_embed=self._floats(draft.markov_embed),
            confidence=self._floats(draft.confidence),
            markov_rank=draft.text.dspark_markov_rank,
            block_size=draft.text.dspark_block_size,
            noise_id=draft.text.dspark_noise_token_id,
            taps=taps.data_ptr(),
            tap_places=taps.shape[1],
        )

    def _pack(self, weights: Tensor) -> c.Matrix:
        """weights: fp32 [rows, cols], or a stack [N, rows, cols] of which the result describes the first."""
        return self._pack_stack(weights)[0]

    def _pack_stack(self, weights: Tensor, agree: bool = False) -> tuple[c.Matrix, Tensor]:
        """Also the packed bytes [N, bytes of one]. agree: use a format that serves the other ranks' matrices too, so that they can move."""
        stack = weights.reshape(-1, *weights.shape[-2:]).contiguous()
        count, rows, cols = stack.shape
        form = self._library.dix_format(stack.data_ptr(), stack.numel())
        if agree:
            assert self._exchange is not None
            [general] = self._exchange.group.max([_GENERALITY.index(form)])
            form = _GENERALITY[general]
        size = self._library.dix_packed_bytes(rows, cols, form)
        packed = self._memory.take(count * size).view(count, size)
        self._library.dix_pack(stack.data_ptr(), count, rows, cols, form, packed.data_ptr())
        return c.Matrix(data=self._pointer(packed), bytes=size, rows=rows, cols=cols, format=form), packed

    def _floats(self, values: Tensor) -> int:
        assert values.dtype is torch.float32, f"expected fp32, got {values.dtype}"
        return self._pointer(values)

    def _pointer(self, values: Tensor) -> int:
        self._kept.append(values.contiguous())
        return int(self._kept[-1].data_ptr())

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value


def dense(layer: AnyLinear | AnyBlockLinear) -> Tensor:
    """The weight of a layer that is not packed; the compiled step runs in fp32, where none is."""
    assert not isinstance(layer, PackedLinear), "the compiled step reads no packed weights"
    return layer.weight


def _side_by_side(weight: Tensor, heads: int) -> Tensor:
    """[H*D, K] -> rows in the order (group of LANES heads, channel, head in the group), heads padded with zeros to whole groups."""
    per_head = weight.unflatten(0, (heads, -1))
    padded = torch.nn.functional.pad(per_head, (0, 0, 0, 0, 0, -heads % LANES))
    return padded.unflatten(0, (-1, LANES)).transpose(1, 2).flatten(0, 2)
