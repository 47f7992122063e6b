"""When a group of ranks runs a prompt step: intervals counted in decode steps, and votes.

All ranks run the same kind of step. `decode_step` counts decode steps since the last prompt step and is equal on all ranks by
construction, so every rank knows on its own when a vote counts:

- ANY point (`decode_step` is a positive multiple of the any-interval): one rank that wants a prompt step is enough;
- ALL point (a multiple of the attempt-interval, 0 included): every rank must want one. Both at once count as ANY.

A second vote asks whether any rank obtained work. If none did, everyone decodes and the count goes on: a full engine would
otherwise vote and fail for ever.

That is the rule `reference`, under which every chunk of a long prompt waits for a vote of its own. The rule `intervals` lets only the
first one wait: a prompt in progress goes on without a vote, `DECODE_PAUSE` decode steps after the last prompt step while somebody
decodes, else at once. The rule `urgent` needs no interval: a prompt step comes when every rank wants one, or one rank urgently, with the
same pause.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.errors import ConfigError

# While somebody decodes, at most this many prompt steps follow each other, then this many decode steps come in between.
# Without the bound an ALL point follows every prompt step, and a queue of prompts stops all decoding (always so with one rank).
MAX_PROMPT_STREAK = 4
DECODE_PAUSE = 2

_INTERVAL_BITS = 20  # an interval change travels as one integer: sequence number, attempt-interval, any-interval
MAX_INTERVAL = 2**_INTERVAL_BITS - 1


class Voters(Protocol):
    """What a vote needs of a group of ranks, see `engine.distributed.Group`."""

    def max(self, values: list[int]) -> list[int]: ...


class VoteRule(StrEnum):
    """What decides about a prompt step."""

    INTERVALS = "intervals"
    REFERENCE = "reference"
    URGENT = "urgent"


class Point(StrEnum):
    """Which vote the current step allows."""

    NONE = "none"
    ALL = "all"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Ballot:
    """What the group said: somebody has work, somebody decodes, and whether the prompt vote passed."""

    unfinished: bool
    decoding: bool
    prefill: bool


class PrefillGate:
    """Counts steps and takes the votes. Every rank of the group calls the same methods in the same order."""

    def __init__(self, group: Voters, attempt_interval: int, any_interval: int, rule: VoteRule = VoteRule.INTERVALS) -> None:
        self.group = group
        self.rule = rule
        self.attempt_interval = attempt_interval
        self.any_interval = any_interval
        self.decode_step = 0
        self._decoded_since = DECODE_PAUSE  # decode steps since the last prompt step
        self._prompt_streak = 0
        self._paused_steps = 0
        self._decoding = False
        self._change_number = 0
        self._proposal = 0
        self._leaving = False
        self.left = False

    def propose(self, attempt_interval: int | None, any_interval: int | None) -> None:
        """Ask the group to use other intervals from the next vote on; None keeps the present value.

        Raises:
            ConfigError: an interval outside [1, MAX_INTERVAL].
        """
        attempt = self.attempt_interval if attempt_interval is None else attempt_interval
        any_ = self.any_interval if any_interval is None else any_interval
        for name, value in (("prefill_attempt_interval", attempt), ("prefill_any_interval", any_)):
            if not 1 <= value <= MAX_INTERVAL:
                raise ConfigError(f"engine.{name} is {value}", hint=f"allowed: 1 to {MAX_INTERVAL} decode steps")
        self._proposal = ((self._change_number + 1) << 2 * _INTERVAL_BITS) | (attempt << _INTERVAL_BITS) | any_

    def leave(self) -> None:
        """Ask the group to end: after the step of the next vote `left` is True on all ranks, so that none waits for one that has gone."""
        self._leaving = True

    def said(self, *, unfinished: bool, wants: bool, decoding: bool, begun: bool = False, urgent: bool = False) -> list[int]:
        """What a rank gives to a vote; the group takes the maximum of each."""
        presses = wants and (urgent if self.rule is VoteRule.URGENT else begun)
        return [int(unfinished), int(decoding), int(wants), int(not wants), self._proposal, int(presses), int(self._leaving)]

    def vote(self, *, unfinished: bool, wants: bool, decoding: bool, begun: bool = False, urgent: bool = False) -> Ballot:
        """One packed all-reduce per step: who has work, who decodes, who wants a prompt step, who has one in progress (`begun`) or cannot
        wait for one (`urgent`), a change of intervals, and whether to end."""
        anyone, someone_decodes, any_wants, someone_declines, change, any_presses, any_leaves = self.group.max(
            self.said(unfinished=unfinished, wants=wants, decoding=decoding, begun=begun, urgent=urgent)
        )
        self.left = bool(any_leaves)
        if change:
            self._apply(change)
        self._decoding = bool(someone_decodes)
        rested = not self._decoding or self._decoded_since >= DECODE_PAUSE
        if self.rule is VoteRule.URGENT:
            return Ballot(bool(anyone), self._decoding, rested and bool(any_presses or not someone_declines))
        point = self.point()
        passed = point is not Point.NONE and bool(any_wants if point is Point.ANY else not someone_declines)
        if self.rule is VoteRule.INTERVALS:
            passed = passed or (rested and bool(any_presses))
        return Ballot(bool(anyone), self._decoding, passed)

    def obtained_work(self, mine: bool) -> bool:
        """Second vote: did any rank find a prompt that it can run?"""
        return bool(self.group.max([int(mine)])[0])

    def point(self) -> Point:
        """The vote of the present `decode_step`."""
        if self._pausing:
            return Point.NONE
        if self.decode_step != 0 and self.decode_step % self.any_interval == 0:
            return Point.ANY
        return Point.ALL if self.decode_step % self.attempt_interval == 0 else Point.NONE

    def count_prompt_step(self) -> None:
        self.decode_step = self._decoded_since = 0
        self._prompt_streak += 1
        self._paused_steps = 0

    def count_decode_step(self) -> None:
        self._decoded_since += 1
        if not self._pausing:
            self.decode_step += 1
            self._prompt_streak = 0
            return
        # The pause leaves decode_step at 0: the vote that it interrupted is taken right after it, not an interval later.
        self._paused_steps += 1
        if self._paused_steps == DECODE_PAUSE:
            self._prompt_streak = 0
            self._paused_steps = 0

    @property
    def _pausing(self) -> bool:
        return self._decoding and self._prompt_streak >= MAX_PROMPT_STREAK

    def _apply(self, change: int) -> None:
        """Take over the change that won (the largest); a proposal that lost the same vote is dropped on its rank."""
        mask = MAX_INTERVAL
        self._change_number = change >> 2 * _INTERVAL_BITS
        self.attempt_interval = (change >> _INTERVAL_BITS) & mask
        self.any_interval = change & mask
        self._proposal = 0
