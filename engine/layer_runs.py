"""Single layers of a loaded model on a batch of a chosen shape: what a layer costs, apart from all others.

The cache holds random rows in their storage format and every sequence has blocks of its own, so a layer reads what it would read in
service. Earlier layers run once to give a layer its picks; its streams are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.model_runner import ModelRunner
from engine.models.deepseek_v41 import Layer, Streams
from engine.models.indexer import Picks
from engine.models.inputs import StepInputs
from engine.models.static_inputs import StaticInputs
from engine.ops.hyper_boundary import Written

# Distinct blocks of random rows; the others repeat them, at addresses of their own.
_DISTINCT_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class LayerRun:
    """calls: the layer on several sets of streams. num_rows: query rows. touched: distinct experts that the rows of a call chose, on
    average. states, inputs: what the calls work on.
    """

    calls: list[Callable[[], Tensor]]
    num_rows: int
    touched: float
    states: list[Streams]
    inputs: StepInputs


class LayerRuns:
    """Runs layers of one runner. The runner's cache must hold the batches that are asked for."""

    def __init__(self, runner: ModelRunner, max_rows: int, max_len: int, seed: int = 0) -> None:
        self._runner, self.text = runner, runner.model_config.text
        self._device = runner.kv.blocks.device
        self._random = torch.Generator(self._device).manual_seed(seed)
        self._inputs = StaticInputs(self.text, runner.kv, runner.token_map, runner.frequencies, max_rows, max_len)
        self._fill_cache()

    @property
    def layers(self) -> list[Layer]:
        """The loaded layers."""
        return self._runner.backbone.layers

    @torch.inference_mode()
    def decode(self, layer: int, batch: int, context: int, copies: int = 4) -> LayerRun:
        """One new token for each of `batch` sequences of `context` tokens."""
        per_seq = -(-context // self._runner.kv.block_size)
        assert batch * per_seq < self._runner.kv.num_blocks, f"{batch} sequences of {context} tokens need {batch * per_seq} blocks"
        slices = [
            SequenceSlice(
                token_ids=[7 + i],
                start=context - 1,
                total_len=context,
                block_table=list(range(1 + i * per_seq, 1 + (i + 1) * per_seq)),
                state_slot=1 + i,
                history=(5,) * self.text.ngram_history,
            )
            for i in range(batch)
        ]
        self._inputs.load(Batch(StepKind.DECODE, slices), batch)
        return self._run(layer, self._inputs.step_inputs(batch), copies)

    @torch.inference_mode()
    def prefill(self, layer: int, num_tokens: int, copies: int = 1) -> LayerRun:
        """A prompt of `num_tokens` tokens in one step."""
        blocks = list(range(1, 1 + -(-num_tokens // self._runner.kv.block_size)))
        ids = torch.randint(5, self.text.vocab_size, (num_tokens,), device=self._device, generator=self._random).tolist()
        piece = SequenceSlice(ids, 0, num_tokens, blocks, 1, logit_rows=LogitRows.LAST)
        return self._run(layer, self._runner.build_inputs(Batch(StepKind.PREFILL, [piece])), copies)

    def _run(self, layer: int, inputs: StepInputs, copies: int) -> LayerRun:
        backbone, cache = self._runner.backbone, self._runner.kv
        rows = len(inputs.encoder)
        state = self._streams(inputs, None)
        for earlier in range(self.text.topk_owner(layer) if self.text.ratio(layer) else layer, layer):
            backbone.run_one_layer(earlier, state, inputs, cache)
        sets = [self._streams(inputs, state.picks) for _ in range(copies)]
        chosen = _Chosen()
        for streams in sets:
            backbone.run_one_layer(layer, replace(streams), inputs, cache, chosen)

        def run(streams: Streams) -> Tensor:
            # A copy: a layer leaves its results in the streams that it is given.
            after = replace(streams)
            backbone.run_one_layer(layer, after, inputs, cache)
            assert after.written is not None
            return after.written.y

        return LayerRun([partial(run, streams) for streams in sets], rows, chosen.mean, sets, inputs)

    def _streams(self, inputs: StepInputs, picks: Picks | None) -> Streams:
        """Streams near unit size behind a sublayer whose output is still to be written back, as inside a model."""
        rows, n, width = len(inputs.encoder), self.text.hc_mult, self.text.hidden_size
        post, pre, comb = (torch.rand(rows, *shape, device=self._device, generator=self._random) for shape in ((n,), (n,), (n, n)))
        y, h = self._normal(rows, width), self._normal(rows * n, width).view(rows, n, width)
        return Streams(h, pre, inputs.encoder, picks, Written(y, post, comb / n))

    @torch.inference_mode()
    def _fill_cache(self) -> None:
        kv, text = self._runner.kv, self.text
        some = min(_DISTINCT_BLOCKS, kv.num_blocks - 1)
        for layer in text.kv_source_layer_ids:
            per_block = kv.block_size // text.ratio(layer)
            count = some * per_block
            place = torch.arange(count, device=self._device)
            entries, keys = (self._normal(count, width) for width in (text.head_dim, text.index_head_dim))
            kv.fill_entries(layer, 1 + place // per_block, place % per_block, entries, keys)
        for first in range(1 + some, kv.num_blocks, some):
            last = min(first + some, kv.num_blocks)
            kv.blocks[first:last] = kv.blocks[1 : 1 + last - first]
        for partial_rows in kv.partials.values():
            partial_rows.normal_(generator=self._random)
        kv.rings.copy_(kv.window_rows(self._normal(kv.rings.shape[1], text.head_dim)).expand_as(kv.rings))

    def _normal(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, device=self._device, generator=self._random).to(self._runner.backbone.embed.dtype)


class _Chosen:
    """A probe that counts the distinct experts of each call."""

    def __init__(self) -> None:
        self._counts: list[int] = []

    def record(self, name: str, layer: int, value: Tensor) -> None:
        if name == "router_ids":
            self._counts.append(len(value.unique()))

    @property
    def mean(self) -> float:
        return sum(self._counts) / len(self._counts)
