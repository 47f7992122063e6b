"""The inputs of a prompt step that several ranks compute together, each its share of the rows (balanced context parallelism).

All ranks have the same batch, the prompts of all of them, and complete caches of its sequences: every rank stores every new key and
entry. Queries, experts and streams stay with the rank that has the row. With compact truncation the decoder layers run on the rank
that the sequence belongs to, for its kept rows alone: they are few, and dividing them would not divide the weights that they read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.batch import Batch
from engine.config import EngineConfig, TruncationMode
from engine.distributed import Group
from engine.kv_cache import KVCache
from engine.models.config import TextConfig
from engine.models.inputs import InputBuilder, Ints, Rows, Span, StepInputs, Truncation, entries_start, logit_rows
from engine.parallel.context_split import ContextSplit, key_ranges, split_context
from engine.parallel.prompt_exchange import PromptExchange
from engine.parallel.row_gather import RowGather
from engine.parallel.tensor_group import TensorGroup


@dataclass(frozen=True, slots=True)
class ContextShare:
    """How one rank's rows of a step come together with those of the others.

    keys: all rows, for what every rank stores. kept: the rows that this rank's decoder layers see; None when all layers are shared.
    outputs: the rows whose logits this rank wants. own: all rows of this rank's own sequences; own_rows describes them where asked for.
    """

    keys: RowGather
    kept: RowGather | None
    outputs: RowGather
    own: RowGather
    own_rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """Who computes and who asks for which rows of a shared step.

    span, slots, floor, rect: of the whole batch, see `InputBuilder`. mine: [B] the sequences of this rank. kept: the rows that this rank's
    decoder layers see, None when all layers are shared. wanted: the rows whose logits any rank wants; own_wanted: those that this one does.
    """

    span: Span
    slots: Ints
    floor: Ints
    rect: Ints
    split: ContextSplit
    mine: np.typing.NDArray[np.bool_]
    kept: Ints | None
    wanted: Ints
    own_wanted: Ints

    def rows(self, rank: int) -> tuple[int, int]:
        """Rows of a rank's share in encoder and in decoder layers."""
        encoder = len(self.split.rows(rank))
        return encoder, encoder if self.kept is None else len(self.kept)


class SharedInputBuilder(InputBuilder):
    """Also builds the inputs of one rank's share. group: the ranks that compute prompts together."""

    def __init__(
        self, text: TextConfig, cache: KVCache, token_map: list[int], plain: torch.Tensor, scaled: torch.Tensor, group: TensorGroup
    ) -> None:
        super().__init__(text, cache, token_map, plain, scaled)
        self._group = group

    def divide(self, batch: Batch, own: range, truncation: Truncation) -> Division:
        """batch: the prompts of all ranks, not empty. own: which of its slices belong to this rank."""
        span, slots, floor, rect = self._spans(batch, truncation)
        mine = np.isin(np.arange(len(span.lens)), own)
        kept = None
        if truncation.mode is TruncationMode.COMPACT and rect.any():
            # Sequences of other ranks keep no row here.
            kept = (span.positions >= np.where(mine, rect, span.ends)[span.seq]).nonzero()[0]
        wanted = logit_rows(batch, span, None)
        own_wanted = wanted[mine[span.seq[wanted]]]
        return Division(span, slots, floor, rect, split_context(span.lens, self._group.size), mine, kept, wanted, own_wanted)

    def build_share(self, batch: Batch, own: range, truncation: Truncation, *, drafting: bool) -> StepInputs:
        """What the torch path reads. batch, own: as of `divide`. drafting: draft stages want rows."""
        part = self.divide(batch, own, truncation)
        span, slots, floor, rect, split, kept = part.span, part.slots, part.floor, part.rect, part.split, part.kept
        pick = _asked_rows(split, self._group.rank)
        # Stages that read decoder layers find their rows there. Describing all own rows costs the host more than the share itself.
        behind = drafting and kept is not None and self._text.dspark_target_layer_ids[0] >= self._text.boundary
        own_rows = self._own_rows(span, part.mine, slots, floor) if drafting and not behind else None
        decoder = encoder = self._share_rows(span, slots, floor, np.zeros_like(rect), split)
        if kept is not None:
            decoder, _ = self._decoder_rows(span, slots, floor, np.where(part.mine, rect, span.ends), truncation.mode)
        elif rect.any():
            decoder = self._share_rows(span, slots, floor, rect, split)
        table = self._block_table([s.block_table for s in batch.slices])
        token_ids = np.concatenate([np.array(s.token_ids, dtype=np.int64) for s in batch.slices])
        own_wanted = part.own_wanted
        return StepInputs(
            token_ids=self._tensor(token_ids[pick]),
            grams=self._grams(batch).index_select(0, self._tensor(pick)),
            block_table=self._tensor(table),
            encoder=encoder,
            decoder=decoder,
            kept=None if kept is None else self._tensor(kept),
            entries={r: self._entries(r, span, slots, table, entries_start(batch)) for r in self._ratios},
            max_visible={r: int(span.ends.max()) // r for r in self._ratios},
            logit_rows=self._tensor(np.arange(len(own_wanted)) if kept is None else np.searchsorted(kept, own_wanted)),
            share=replace(self.gathers(part), own_rows=own_rows),
        )

    def _share_rows(self, span: Span, slots: Ints, floor: Ints, rect: Ints, split: ContextSplit) -> Rows:
        """The query rows of this rank's share; keys and stores are those of the whole batch."""
        rank = self._group.rank
        rows = self._rows(span, slots, floor, rect, in_place=False, pick=_asked_rows(split, rank))
        if len(split.rows(rank)) == 0:
            return rows
        visible = {}
        for ratio in self._ratios:
            start, end = key_ranges(split, rank, span.lens, span.ends, ratio)
            visible[ratio] = self._tensor(end - start)
        return replace(rows, visible=visible)

    def gathers(self, part: Division) -> ContextShare:
        """Where rows of all ranks meet, `own_rows` left out."""

        def gather(rows: Ints, here: Ints) -> RowGather:
            return RowGather.of(self._group, part.split, rows, here, self._device)

        span = part.span
        everything = np.arange(len(span.positions))
        return ContextShare(
            keys=gather(everything, everything),
            kept=None if part.kept is None else gather(everything[span.positions >= part.rect[span.seq]], part.kept),
            outputs=gather(part.wanted, part.own_wanted),
            own=gather(everything, everything[part.mine[span.seq]]),
        )

    def _own_rows(self, span: Span, mine: np.typing.NDArray[np.bool_], slots: Ints, floor: Ints) -> Rows:
        own = Span.of(np.where(mine, span.starts, span.ends), span.ends)
        return self._rows(own, slots, floor, np.zeros_like(slots), in_place=False)


def _asked_rows(split: ContextSplit, rank: int) -> Ints:
    """Batch rows that a rank computes. One whose share is empty computes the first row as well, for nobody: operations need a row."""
    rows = split.rows(rank)
    return rows if len(rows) else np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SharedPrefill:
    """Prompt steps that the ranks of a group compute together."""

    exchange: PromptExchange
    builder: SharedInputBuilder

    def join(self, batch: Batch) -> tuple[Batch, range]:
        """What all ranks prefill now, and which of its slices belong to this rank. batch: this rank's prompts. The caches agree then."""
        everything, owners = self.exchange.join(batch)
        self.exchange.copy_restored(everything, owners)
        return everything, owners[self.exchange.group.rank]


def make_shared_prefill(
    config: EngineConfig,
    group: Group | None,
    text: TextConfig,
    kv: KVCache,
    token_map: list[int],
    frequencies: tuple[torch.Tensor, torch.Tensor],
) -> SharedPrefill | None:
    """None when every rank prefills alone. All ranks of `group` call it together."""
    if config.cp == 1:
        return None
    assert group is not None, f"engine.cp is {config.cp} without a group"
    assert group.size == config.dp, f"engine.dp is {config.dp} in a group of {group.size}"
    tensors = group.split(config.cp, kv.blocks.device.type)
    return SharedPrefill(PromptExchange(tensors, kv), SharedInputBuilder(text, kv, token_map, *frequencies, tensors))
