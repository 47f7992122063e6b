"""Draws the drafts of sampled sequences from the drafter's distribution after their own temperature and filters.

Sequences with a seed run the race that the target will run; the others draw numbers of their own, and what they draw from is kept for the
verification. Twice the same: `TorchDraws`, which defines it, on any device, and `compiled_drafts`, one call of the compiled step.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.choices import Choices, Drawing, pack_choice
from engine.distribution import probabilities
from engine.draws import fixed_point, inverse_cdf, race
from engine.models.draft import DraftSlice
from engine.ops.sample_rows import largest_rows
from engine.random_keys import MASK64, draws53, race_keys
from engine.request import Sequence
from engine.spec_decode import NO_PROPOSALS, HostTable, Proposals

# Draws of drafts by rejection must be independent of all others, also of the last round's draw for the same position: the number of
# drafts that are verified may depend on that one. So the seed moves with the place where the block starts.
_SEED_STEP = 1_000_000_007


@dataclass(frozen=True, slots=True)
class DraftPoint:
    """Where drafts of a sequence begin: behind `token_id`, the last of its `length` tokens. The sequence itself may not know it yet."""

    seq: Sequence
    token_id: int
    length: int

    @property
    def drawn(self) -> bool:
        return self.seq.request.params.temperature > 0.0

    @property
    def free(self) -> bool:
        """Whether it is drawn with numbers of its own, and judged by what it was drawn from."""
        return self.drawn and self.seq.request.params.seed is None

    @property
    def draft_seed(self) -> int:
        return (self.seq.seed + _SEED_STEP * self.length) & MASK64 if self.free else self.seq.seed


class TorchDraws:
    """Draws place after place, for a model that asks for every one (`Choose` of `engine/models/draft.py`)."""

    def __init__(self, points: list[DraftPoint], max_drafts: int) -> None:
        """points: at least one of them drawn."""
        self._max_drafts = max_drafts
        self._drawn = [i for i, point in enumerate(points) if point.drawn]
        self._everyone = len(self._drawn) == len(points)
        chosen = [points[i] for i in self._drawn]
        self._params = [point.seq.request.params for point in chosen]
        self._coupled = [k for k, point in enumerate(chosen) if not point.free]
        self._free = [k for k, point in enumerate(chosen) if point.free]
        # Random numbers of all places at once, [N, rows]: a call costs as much as the numbers.
        self._free_points, coupled = [chosen[k] for k in self._free], [chosen[k] for k in self._coupled]
        keys = race_keys([point.draft_seed for point in coupled] * max_drafts, _positions(coupled, max_drafts))
        seeds = [point.draft_seed for point in self._free_points]
        self._keys = keys.reshape(max_drafts, len(coupled))
        self._numbers = draws53(seeds * max_drafts, _positions(self._free_points, max_drafts)).reshape(max_drafts, len(seeds))
        self._probs: list[Tensor] = []

    @property
    def proposals(self) -> Proposals:
        """What the block was drawn from, when all places are."""
        return Proposals(_index(self._free_points), torch.stack(self._probs, 1) if self._probs else None)

    def choose(self, place: int, logits: Tensor) -> Tensor:
        """logits: [B, V]. Returns [B] int64; behind `max_drafts` places, which nobody uses, the most likely ids."""
        if place >= self._max_drafts:
            return largest_rows(logits)[0]
        device = logits.device
        index = None if self._everyone else torch.tensor(self._drawn, device=device)
        probs = probabilities(logits if index is None else logits[index], self._params)
        tokens = torch.empty(len(probs), dtype=torch.int64, device=device)
        if self._coupled:
            rows = _rows(self._coupled, probs)
            tokens[rows] = race(probs[rows], torch.from_numpy(self._keys[place]).to(device))
        if self._free:
            rows = _rows(self._free, probs)
            own = probs[rows]
            tokens[rows] = inverse_cdf(fixed_point(own), torch.from_numpy(self._numbers[place]).to(device))
            self._probs.append(own)
        if index is None:
            return tokens
        chosen = largest_rows(logits)[0]
        chosen[index] = tokens
        return chosen


class ProposalMemory:
    """Memory for what drafts are drawn from, kept from round to round: fresh pages, or torch's calls, would cost as much as the draws."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._tables: dict[tuple[int, int, int], tuple[Tensor, HostTable]] = {}

    def take(self, seqs: int, places: int, vocab_size: int) -> tuple[Tensor, HostTable]:
        """[seqs, places, V] fp32, contents unspecified; it holds until the next call."""
        shape = seqs, places, vocab_size
        taken = self._tables.get(shape)
        if taken is None:
            count = seqs * places * vocab_size
            if self._memory.numel() < count:
                self._memory = torch.empty(count)
                self._tables.clear()
            table = self._memory[:count].view(shape)
            taken = self._tables[shape] = table, HostTable.of(table)
        return taken


def compiled_drafts(
    drawing: Drawing, points: list[DraftPoint], slices: list[DraftSlice], max_drafts: int, memory: ProposalMemory
) -> tuple[list[list[int]], list[list[float]], Proposals]:
    """Ids, confidences and proposals of a block, as `TorchDraws` draws it."""
    free = [point for point in points if point.free]
    proposals = Proposals(_index(free), *memory.take(len(free), max_drafts, drawing.vocab_size)) if free else NO_PROPOSALS
    packed = [
        pack_choice(point.seq.request.params, point.draft_seed, point.length, 1, proposals.address(point.seq.seq_id) if point.free else 0)
        for point in points
    ]
    drafts, confidence = drawing.draft_drawn(slices, Choices(b"".join(packed), array("i"), proposals), max_drafts)
    return drafts, confidence, proposals


def _index(free: list[DraftPoint]) -> dict[int, int]:
    return {point.seq.seq_id: row for row, point in enumerate(free)}


def _positions(points: list[DraftPoint], max_drafts: int) -> list[int]:
    """Where the drafts of each place land, place after place."""
    return [point.length + place for place in range(max_drafts) for point in points]


def _rows(some: list[int], table: Tensor) -> Tensor | slice:
    """Index of some rows of a table, which costs nothing when they are all of them."""
    return slice(None) if len(some) == len(table) else torch.tensor(some, device=table.device)
