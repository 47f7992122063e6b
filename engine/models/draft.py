"""DSpark: a few stages that draft the next tokens in one block from taps of the backbone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv_cache import KVCache
from engine.loader import WeightSource
from engine.models.attention import store_window
from engine.models.config import TextConfig
from engine.models.deepseek_v41 import Block, DeepseekV41, Streams
from engine.models.hyper_connections import first_mix
from engine.models.inputs import Rows
from engine.models.numerics import Numerics, WideLinear
from engine.models.packed_layers import AnyLinear, load_linear
from engine.ops.dense_linear import dense_linear
from engine.ops.hyper_streams import collapse
from engine.ops.rms_norm import rms_norm
from engine.ops.rope import rotation
from engine.ops.sample_rows import largest_rows
from engine.ops.sparse_attention import Selection

# Chooses the proposals of one place in the block: (place, logits [B, V] fp32) -> [B] int64.
Choose = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DraftSlice:
    """Where to draft: `token_id` was chosen for position `position` + 1, whose predecessor is the last one with stored taps."""

    token_id: int
    position: int
    state_slot: int
    valid_start: int = 0


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """token_ids [B, N] int64: proposals for positions position + 2 ...; confidence [B, N] fp32, raw; logits [B, N, V] fp32."""

    token_ids: Tensor
    confidence: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The stages and the sequential head. Embedding and output head are the backbone's."""

    text: TextConfig
    numerics: Numerics
    stages: list[Block]
    main_proj: AnyLinear
    main_norm: Tensor
    norm: Tensor
    markov_embed: Tensor
    markov_head: WideLinear
    confidence: Tensor

    @staticmethod
    def load(source: WeightSource, text: TextConfig, numerics: Numerics) -> DraftModel | None:
        """Take every draft tensor from `source`; None for a checkpoint without stages."""
        if text.num_stages == 0:
            return None
        experts = (text.dspark_n_routed_experts, text.dspark_num_experts_per_tok)
        last = f"mtp.{text.num_stages - 1}"
        return DraftModel(
            text=text,
            numerics=numerics,
            stages=[Block.load(source, f"mtp.{stage}", 0, experts, text, numerics) for stage in range(text.num_stages)],
            main_proj=load_linear(source, ["mtp.0.main_proj.weight"], numerics, numerics.quantize_inputs),
            main_norm=source.tensor("mtp.0.main_norm.weight", numerics.dtype),
            norm=source.tensor(f"{last}.norm.weight", numerics.dtype),
            markov_embed=source.tensor(f"{last}.markov_head.embed.weight", numerics.dtype),
            markov_head=WideLinear.load(source, f"{last}.markov_head.head.weight", numerics),
            confidence=source.tensor(f"{last}.confidence_head.proj.weight", torch.float32),
        )

    def store_taps(self, taps: Tensor, rows: Rows, cache: KVCache) -> None:
        """Extend every stage's window ring. taps: [T, targets * C] of the rows in `rows`."""
        x = rms_norm(self.main_proj(taps), self.main_norm, self.text.rms_norm_eps)
        for ring, stage in enumerate(self.stages, start=self.text.num_hidden_layers):
            _, stored = stage.attention.project(x, rows.rotations.plain, cache)
            store_window(stored, cache.rings[ring], rows)

    def __call__(
        self, slices: list[DraftSlice], backbone: DeepseekV41, cache: KVCache, frequencies: Tensor, choose: Choose | None = None
    ) -> DraftOutput:
        """Draft for several sequences, greedily without `choose`. frequencies: [R/2] of the plain rotary table."""
        columns = torch.from_numpy(draft_columns(slices)).to(frequencies.device).t().long()
        x, logits = self.stages_output(columns, backbone, cache, frequencies)
        return self.propose(x, columns[0], logits, choose or most_likely)

    def stages_output(self, columns: Tensor, backbone: DeepseekV41, cache: KVCache, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """The drafted blocks before their tokens are chosen: states [B*N, C] and logits [B*N, V]. columns: [4, B], see `draft_columns`."""
        size, device = self.text.dspark_block_size, frequencies.device
        token, position, slot, lowest = columns
        ids = torch.full((len(token), size), self.text.dspark_noise_token_id, device=device)
        ids[:, 0] = token
        rot = rotation((position[:, None] + torch.arange(1, size + 1, device=device)).flatten(), frequencies)
        block = torch.arange(len(token) * size, device=device).view(-1, size)
        seen = (self._window(position, slot, lowest, cache), Selection.of(block.repeat_interleave(size, 0)))
        h = backbone.embed[ids.flatten()][:, None].expand(-1, self.text.hc_mult, -1).contiguous()
        streams = Streams(h, first_mix(len(h), self.text.hc_mult, device))
        for number, stage in enumerate(self.stages):
            self._run_stage(stage, streams, rot, cache, self.text.num_hidden_layers + number, seen)
        x = collapse(streams.settle(), streams.pre)
        return x, backbone.logits(rms_norm(x, self.norm, self.text.rms_norm_eps))

    def _window(self, position: Tensor, slot: Tensor, lowest: Tensor, cache: KVCache) -> Selection:
        """The same window of main keys for all queries of a block: the last W positions up to `position`."""
        keys = position[:, None] + torch.arange(1 - cache.window, 1, device=position.device)
        index = (slot[:, None] * cache.ring_rows + keys % cache.ring_rows).masked_fill_(keys < lowest[:, None], -1)
        return Selection.of(index.repeat_interleave(self.text.dspark_block_size, 0))

    def _run_stage(self, stage: Block, streams: Streams, rot: Tensor, cache: KVCache, ring: int, seen: tuple[Selection, Selection]) -> None:
        entered = stage.enter(streams)
        latent, stored = stage.attention.project(entered.x, rot, cache)
        sources = [(cache.rings[ring], seen[0]), (stored, seen[1])]
        y = stage.attention.attend(latent, rot, rot.conj_physical(), sources)
        stage.feed_forward(y, entered, streams, -1)

    def propose(self, x: Tensor, first: Tensor, logits: Tensor, choose: Choose) -> DraftOutput:
        """Walk through the block: each proposal shifts the logits of the next position. x: [B*N, C], first: [B], logits: [B*N, V]."""
        size = self.text.dspark_block_size
        base = logits.unflatten(0, (-1, size))
        states = x.unflatten(0, (-1, size)).float()
        previous, ids, shifted, confidence = first, [], [], []
        for i in range(size):
            markov = self.markov_embed[previous]
            shifted.append(base[:, i] + self.markov_head(markov))
            confidence.append(dense_linear(torch.cat((states[:, i], markov.float()), 1), self.confidence)[:, 0])
            previous = choose(i, shifted[-1])
            ids.append(previous)
        return DraftOutput(torch.stack(ids, 1), torch.stack(confidence, 1), torch.stack(shifted, 1))


def draft_columns(slices: list[DraftSlice]) -> NDArray[np.int32]:
    """What the stages need to know of every sequence, one row each: token, position, state slot, lowest position with a window row."""
    return np.array([(s.token_id, s.position, s.state_slot, max(0, s.valid_start)) for s in slices], dtype=np.int32)


def most_likely(place: int, logits: Tensor) -> Tensor:
    """Greedy choice. logits: [B, V]; returns [B] int64."""
    return largest_rows(logits)[0]
