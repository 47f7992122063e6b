"""Keeping drafts by count instead of by verification: the accept length is then known. For measurements with random weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.random_keys import DRAW_BITS, Purpose, draws53
from engine.request import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForcedAccept:
    """length: mean tokens that a sequence gets of a step that verifies drafts, the one behind the kept drafts included; 1 or more.

    Of `length - 1` drafts the whole part is always kept and the fraction as often as it says, by a number of the sequence's seed and
    position: the same request keeps the same drafts whatever runs beside it. Where fewer are verified than that, all of them.
    """

    length: float

    def counts(self, seqs: list[Sequence], drafts: list[list[int]]) -> list[int]:
        """Drafts that each sequence keeps, at most as many as it has."""
        numbers = draws53([seq.seed for seq in seqs], [len(seq.token_ids) for seq in seqs], Purpose.ACCEPT).tolist()
        return [min(self.drafts_kept(number), len(ids)) for number, ids in zip(numbers, drafts, strict=True)]

    def drafts_kept(self, number: int) -> int:
        """number: of 53 bits."""
        always = int(self.length) - 1
        return always + (number < (self.length - 1 - always) * 2**DRAW_BITS)

    def apply(self, seqs: list[Sequence], drafts: list[list[int]], tokens: list[int], allowed: list[bool]) -> list[int]:
        """Put the kept drafts into `tokens`, the tokens of all rows of a verification. Returns how many each sequence keeps.

        allowed: by row, whether the row's draft may be a token there. One that may not (an id without a token, a banned one) is replaced by
        the row's own token, which changes no count; but under a grammar, which has no rule for what follows, the kept drafts end before it.
        """
        counts = self.counts(seqs, drafts)
        begin = 0
        for k, (seq, ids) in enumerate(zip(seqs, drafts, strict=True)):
            for place in range(counts[k]):
                if allowed[begin + place]:
                    tokens[begin + place] = ids[place]
                elif seq.matcher is not None:
                    counts[k] = place
                    break
            begin += len(ids) + 1
        return counts


def make_forced_accept(config: EngineConfig, max_drafts: int) -> ForcedAccept | None:
    """max_drafts: what this model drafts at most, 0 for none.

    Raises:
        ConfigError: fewer than the accept length needs.
    """
    length = config.force_accept_length
    if not length:
        return None
    if length > 1 + max_drafts:
        raise ConfigError(
            f"engine.force_accept_length is {length:g} but this model drafts {max_drafts} tokens",
            hint=f"at most {1 + max_drafts}, 0 is off",
        )
    log.warning("acceptance is forced for measurements: %g tokens per verification, and outputs mean nothing", length)
    return ForcedAccept(length)
