"""How rows choose their tokens, as numbers for compiled code: `Choice` of `csrc/include/cpu_draws.h`, one for each sequence.

What the numbers mean is defined elsewhere: `engine/random_keys.py`, `engine/distribution.py`, `engine/draws.py`, `engine/spec_decode.py`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.distribution import filter_numbers
from engine.models.draft import DraftSlice
from engine.models.native_layout import CHOICE
from engine.ops.sample_rows import Mode
from engine.request import SamplingParams, Sequence
from engine.spec_decode import Proposals

_MOST = torch.finfo(torch.float32).max  # a larger temperature flattens as well as this one


@dataclass(frozen=True, slots=True)
class Choices:
    """What the rows of some sequences choose with.

    packed: a `CHOICE` for each sequence. judged: for every row the draft that it judges, -1 for none; drafts of greedy and seeded requests
    need no judge. proposals: holds what the judged drafts were drawn from; `packed` points into it.
    """

    packed: bytes
    judged: array[int]
    proposals: Proposals

    @property
    def num_seqs(self) -> int:
        return len(self.packed) // CHOICE.size


class Drawing(Protocol):
    """Chooses tokens in compiled code."""

    vocab_size: int

    def choose(self, logits: Tensor, choices: Choices) -> list[int]:
        """The token of every row. logits: [R, V] fp32 on the host, rows may be strided. A row without a finite maximum gets some id."""

    def draft_drawn(self, slices: list[DraftSlice], choices: Choices, places: int) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and raw confidences of every slice's block; drawn in the first `places`, the most likely ones behind them."""


def drawing_of(runner: Any) -> Drawing | None:
    """None where torch chooses: there is no compiled step, or not yet, or it is not to draw. Runners that never draw need not say so."""
    drawing: Drawing | None = getattr(runner, "drawing", None)
    return drawing


def row_choices(rows: list[Sequence], positions: list[int], drafts: list[int], places: list[int], proposals: Proposals) -> Choices:
    """Rows by themselves: of each its sequence, the position of its token, the draft that it judges or -1, and that draft's place."""
    packed, judged = [], array("i")
    for seq, position, draft, place in zip(rows, positions, drafts, places, strict=True):
        judges = draft >= 0 and _judged(seq.request.params)
        packed.append(pack_choice(seq.request.params, seq.seed, position, 1, proposals.address(seq.seq_id, place) if judges else 0))
        judged.append(draft if judges else -1)
    return Choices(b"".join(packed), judged, proposals)


def step_choices(seqs: list[Sequence], positions: list[int], drafts: list[list[int]], proposals: Proposals) -> Choices:
    """The rows of a step: of each sequence the one behind its last token, then those behind its drafts.

    positions: where the first row's token comes to stand. Not the lengths of the sequences, which may lack the tokens of a step in flight.
    drafts: empty when there are none.
    """
    packed, judged = [], array("i")
    for seq, position, ids in zip(seqs, positions, drafts or [[]] * len(seqs), strict=True):
        judges = bool(ids) and _judged(seq.request.params)
        address = proposals.address(seq.seq_id) if judges else 0
        packed.append(pack_choice(seq.request.params, seq.seed, position, len(ids) + 1, address))
        judged.extend(ids if judges else [-1] * len(ids))
        judged.append(-1)
    return Choices(b"".join(packed), judged, proposals)


def pack_choice(params: SamplingParams, seed: int, position: int, rows: int, proposal: int = 0) -> bytes:
    """position: of the first row's token. proposal: address of the distributions [places, V] fp32 of a sequence's drafts, 0 for none."""
    mode = Mode.GREEDY if params.temperature == 0.0 else Mode.INVERSE if params.seed is None else Mode.RACE
    top_p, top_k, min_p = filter_numbers(params)
    return CHOICE.pack(proposal, seed, position, top_p, min(params.temperature, _MOST), min_p, top_k, mode, rows, 0)


def _judged(params: SamplingParams) -> bool:
    """Whether drafts are kept or refused by what they were drawn from; others are kept where the row draws the same token."""
    return params.temperature > 0.0 and params.seed is None
