"""One token per row: the largest logit, or a draw with a given random number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from engine.draws import fixed_point, inverse_cdf, race
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


class Mode(IntEnum):
    """How a row chooses; numbers shared with the kernel. RACE and INVERSE: `engine/draws.py`."""

    GREEDY = 0
    RACE = 1
    INVERSE = 2


@dataclass(frozen=True, slots=True)
class Filters:
    """Per row: top_p [R] int64 in fixed point (2 * FIXED_ONE for none), top_k [R] int32 (at least num_ids for none), min_p [R] fp32 (0)."""

    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Per row: temperature [R] fp32 (above 0 unless greedy), modes [R] int32, numbers [R] int64 (a race's key, or 53 random bits).

    filters: None where no row has one; greedy rows ignore theirs. kinds: the modes that occur, None where the host does not know them.
    """

    temperature: Tensor
    modes: Tensor
    numbers: Tensor
    filters: Filters | None = None
    kinds: frozenset[Mode] | None = None


def sample_rows(logits: Tensor, draws: Draws, num_ids: int) -> tuple[Tensor, Tensor]:
    """Token of every row, from the ids below `num_ids`. Ties of greedy rows go to the lower id, filters as in `engine/distribution.py`.

    logits: [R, V] fp32, rows may be strided. Returns ids [R] int64, always below `num_ids`, and the largest logit [R] fp32, NaN where a
    logit is NaN: what a row without a finite maximum chooses means nothing.
    """
    check(logits.ndim == 2 and draws.modes.shape == logits.shape[:1] and 0 < num_ids <= logits.shape[1], "sample_rows", logits=logits)
    result: tuple[Tensor, Tensor] = SAMPLE_ROWS(logits, draws, num_ids)
    return result


def largest_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Id of the largest logit of every row, the first of equals, and that logit. logits: [R, V]; as `sample_rows` of greedy rows.

    On a GPU by the kernel of `sample_rows`, where that op uses it, else by the library.
    """
    rows = len(logits)
    if not rows or not logits.is_cuda or SAMPLE_ROWS.backend == "reference" or logits.dtype != torch.float32:
        best, ids = logits.max(dim=-1)
        return ids, best
    # What greedy rows do not use, in any type; made anew, because memory of a recorded step belongs to its graph.
    zeros = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    draws = Draws(zeros.view(torch.float32)[:rows], zeros.view(torch.int32)[:rows], zeros, kinds=frozenset({Mode.GREEDY}))
    return sample_rows(logits, draws, logits.shape[1])


def _reference(logits: Tensor, draws: Draws, num_ids: int) -> tuple[Tensor, Tensor]:
    logits = logits[:, :num_ids]
    best, ids = logits.max(dim=-1)
    temperature = torch.where(draws.modes == Mode.GREEDY, 1.0, draws.temperature)
    probs = torch.softmax((logits - best[:, None]) / temperature[:, None], dim=-1)
    # Rows that are not drawn get some distribution: every row runs through both ways, and the host never asks which it wants.
    probs = torch.where(best.isfinite()[:, None], probs, 1.0 / num_ids)
    if draws.filters is not None:
        probs = _filtered(probs, draws.filters)
    ids = torch.where(draws.modes == Mode.RACE, race(probs, draws.numbers), ids)
    ids = torch.where(draws.modes == Mode.INVERSE, inverse_cdf(fixed_point(probs), draws.numbers & (2**53 - 1)), ids)
    return ids.clamp(0, num_ids - 1), best


def _filtered(probs: Tensor, filters: Filters) -> Tensor:
    """Zero what the filters drop: in the order of falling probability, ties by lower id, each keeps a prefix. Not renormalised."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    weights = fixed_point(ordered)
    keep = weights.cumsum(dim=-1) - weights <= filters.top_p[:, None]
    keep &= torch.arange(ordered.shape[-1], device=probs.device) < filters.top_k[:, None]
    keep &= ordered >= filters.min_p[:, None] * ordered[:, :1]
    return torch.zeros_like(probs).scatter_(-1, ids, torch.where(keep, ordered, 0.0))


SAMPLE_ROWS = Op("sample_rows", reference=_reference, cuda="engine.ops.cuda.sample_rows:launch", tolerance=Tolerance())
