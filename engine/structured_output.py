"""Output that must match a grammar: a matcher per sequence, and token masks for the rows of a step.

A matcher reads a sequence's output tokens, so it can be made at any time and follows recomputation without help. It can go back, so
that drafts are walked first and committed later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.grammar_library import load_xgrammar
from engine.request import Grammar, Sequence

SLOWEST_STEP_S = 0.5  # processor time of one mask; ordinary grammars take a thousandth
_BITS = 32  # ids per mask word


class GrammarError(Exception):
    """The output cannot go on under its grammar. Concerns one request only."""


class Matcher:
    """Where one output stands in its grammar: free text before the trigger, inside the grammar, or behind its end.

    Behind the end only stop tokens are accepted, any number of them.
    """

    def __init__(self, compiled: Any, grammar: Grammar, stop_token_ids: Ids[int], vocab_size: int) -> None:
        """compiled: a `xgrammar.CompiledGrammar` over the same vocabulary."""
        xgrammar = load_xgrammar()
        self.num_tokens = 0
        self._trigger = grammar.trigger_token_ids
        self._reserved = frozenset(grammar.reserved_token_ids)
        self._fallback = _failure_table(self._trigger)
        self._progress: list[int] = []  # matched length of the trigger after each free token
        self._num_trailing = 0
        self._stop = frozenset(stop_token_ids)
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))
        self._free_mask = pack_ids(vocab_size, self._reserved, allowed=False)
        self._stop_mask = pack_ids(vocab_size, self._stop, allowed=True)

    @property
    def started(self) -> bool:
        """Whether the grammar applies to the next token."""
        return not self._trigger or (bool(self._progress) and self._progress[-1] == len(self._trigger))

    def accept(self, token_id: int) -> bool:
        """Move on by one token. False, and no move, when the grammar does not allow it here."""
        if not self.started:
            if token_id in self._reserved:
                return False
            self._progress.append(self._advance(token_id))
        elif self._matcher.is_terminated():
            if token_id not in self._stop:
                return False
            self._num_trailing += 1
        elif not self._matcher.accept_token(token_id):
            return False
        self.num_tokens += 1
        return True

    def roll_back(self, count: int) -> None:
        """Take back the last `count` accepted tokens, across the end and the trigger where they lie there."""
        assert 0 <= count <= self.num_tokens, f"{count} of {self.num_tokens} tokens cannot be taken back"
        num_inside = self.num_tokens - len(self._progress) - self._num_trailing
        self.num_tokens -= count
        trailing = min(count, self._num_trailing)
        inside = min(count - trailing, num_inside)
        free = count - trailing - inside
        self._num_trailing -= trailing
        if inside:
            self._matcher.rollback(inside)
        if free:
            del self._progress[-free:]

    def fill(self, out: Tensor) -> bool:
        """Write the ids that may come next. out: [W] int32 on the CPU, bit b of word w is id 32*w + b. False: every id may.

        Raises:
            GrammarError: nothing may come next.
        """
        if not self.started:
            out.copy_(self._free_mask)
            return bool(self._reserved)
        if self._matcher.is_terminated():
            out.copy_(self._stop_mask)
            return True
        try:
            needed = bool(self._matcher.fill_next_token_bitmask(out[None, :], 0))
        except RuntimeError as error:
            raise GrammarError(f"the grammar failed behind {self.num_tokens} tokens: {error}") from error
        if needed and not bool(out.any()):
            raise GrammarError(f"the grammar allows no token behind {self.num_tokens} tokens")
        return needed

    def follow(self, token_ids: Ids[int]) -> None:
        """Accept the output tokens that are new since the last call. token_ids: the whole output.

        Raises:
            GrammarError: one of them is not allowed.
        """
        for position in range(self.num_tokens, len(token_ids)):
            if not self.accept(token_ids[position]):
                raise GrammarError(f"output token {token_ids[position]} at position {position} is not in the grammar")

    def fill_drafts(self, drafts: Ids[int], out: Tensor) -> int:
        """Masks for a verification: row 0 for the next token, row k+1 for the one behind draft k. out: [>= len(drafts) + 1, W] int32.

        Stops at the first draft that the grammar refuses, since its row gives that draft probability 0 and verification ends there.
        Leaves the matcher where it was. Returns the number of rows written.

        Raises:
            GrammarError: nothing may come next at the first row.
        """
        out[0].fill_(-1)
        self.fill(out[0])
        walked = 0
        for draft in drafts:
            if not self.accept(draft):
                break
            walked += 1
            try:
                out[walked].fill_(-1)
                self.fill(out[walked])
            except GrammarError:
                out[walked].zero_()
                break
        self.roll_back(walked)
        return walked + 1

    def _advance(self, token_id: int) -> int:
        """Matched length of the trigger with one more token."""
        length = self._progress[-1] if self._progress else 0
        while length and self._trigger[length] != token_id:
            length = self._fallback[length - 1]
        return length + 1 if self._trigger[length] == token_id else 0


@contextmanager
def _limited_time(matcher: Matcher) -> Iterator[None]:
    """Ends a request whose grammar has become too ambiguous to go on; all other sequences wait while it is worked on.

    Raises:
        GrammarError: the block took too long.
    """
    started_s = time.thread_time()
    yield
    took_s = time.thread_time() - started_s
    if took_s > SLOWEST_STEP_S:
        raise GrammarError(f"the grammar took {took_s:.1f} s behind {matcher.num_tokens} tokens: it is too ambiguous")


def _failure_table(pattern: Ids[int]) -> list[int]:
    """For every prefix of `pattern` the length of its longest proper border (Knuth, Morris, Pratt)."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[length] != pattern[i]:
            length = table[length - 1]
        length += pattern[length] == pattern[i]
        table[i] = length
    return table


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks for some rows of a step. rows: their indexes. bits: [G, W] int32 on the CPU. errors: rows whose matcher is at its end."""

    rows: list[int]
    bits: Tensor
    errors: dict[int, str] = field(default_factory=dict)


def row_masks(rows: list[Sequence], vocab_size: int) -> RowMasks | None:
    """Follow the output of every row with a matcher and collect the masks that exclude something. None: no row has a matcher."""
    constrained = [(i, seq, seq.matcher) for i, seq in enumerate(rows) if seq.matcher is not None]
    if not constrained:
        return None
    bits = torch.full((len(constrained), num_words(vocab_size)), -1, dtype=torch.int32)
    masked: list[int] = []
    errors: dict[int, str] = {}
    for i, seq, matcher in constrained:
        try:
            with _limited_time(matcher):
                matcher.follow(seq.token_ids[seq.prompt_len :])
                needed = matcher.fill(bits[len(masked)])
            if needed:
                masked.append(i)
        except GrammarError as error:
            errors[i] = str(error)
    return RowMasks(masked, bits[: len(masked)], errors)


def draft_masks(seqs: list[Sequence], drafts: list[list[int]], vocab_size: int) -> RowMasks | None:
    """As `row_masks` for a verification: sequence i has a row behind its last token and one behind each of drafts[i]."""
    if all(seq.matcher is None for seq in seqs):
        return None
    bits = []
    masked: list[int] = []
    errors: dict[int, str] = {}
    begin = 0
    for seq, ids in zip(seqs, drafts, strict=True):
        if seq.matcher is not None:
            out = torch.empty(len(ids) + 1, num_words(vocab_size), dtype=torch.int32)
            try:
                with _limited_time(seq.matcher):
                    seq.matcher.follow(seq.token_ids[seq.prompt_len :])
                    count = seq.matcher.fill_drafts(ids, out)
                masked.extend(range(begin, begin + count))
                bits.append(out[:count])
            except GrammarError as error:
                errors[begin] = str(error)
        begin += len(ids) + 1
    return RowMasks(masked, torch.cat(bits) if bits else torch.empty(0, num_words(vocab_size), dtype=torch.int32), errors)


def apply_masks(logits: Tensor, masks: RowMasks) -> None:
    """Set what the masks exclude to -inf, in place. logits: [R, V] fp32; rows without a mask are not touched."""
    if not masks.rows:
        return
    index = torch.tensor(masks.rows, device=logits.device)
    allowed = unpack(masks.bits.to(logits.device), logits.shape[1])
    logits[index] = logits[index].masked_fill_(~allowed, float("-inf"))


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """[G, W] int32 to [G, vocab_size] bool."""
    shifts = torch.arange(_BITS, dtype=torch.int32, device=bits.device)
    return (bits[:, :, None] >> shifts & 1).bool().flatten(1)[:, :vocab_size]


def num_words(vocab_size: int) -> int:
    """Words of one mask."""
    return -(-vocab_size // _BITS)


def pack_ids(vocab_size: int, token_ids: frozenset[int], *, allowed: bool) -> Tensor:
    """[W] int32 mask in which exactly `token_ids` are allowed, or exactly they are not."""
    flags = torch.full((num_words(vocab_size) * _BITS,), not allowed, dtype=torch.int64)
    flags[list(token_ids)] = int(allowed)
    words = (flags.view(-1, _BITS) << torch.arange(_BITS)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
