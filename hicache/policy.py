"""Where to keep window states, where a prompt may resume, and what to evict. Pure functions of integers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from hicache.index import StateReason


class Miss(StrEnum):
    """Why a request restored nothing."""

    BYPASS = "bypass"  # the request asked for no lookup
    SHORT = "short"  # too short to keep its last tokens and still resume
    NO_PAGE = "no_page"  # nothing of it is stored
    NO_STATE = "no_state"  # pages are stored, but no state among them
    KEEP_CAP = "keep_cap"  # the only states lie inside the tokens that must be recomputed
    TENANT = "tenant"  # it is stored under another salt of the same API key
    ABORTED = "aborted"  # the prefill that would have left a state for it was cut off
    AUDIT = "audit"  # stored bytes failed their checksum
    COPY_ERROR = "copy_error"  # the copy failed, or the cache was switched off after several that did


class Victim(StrEnum):
    """What an eviction removes."""

    PAGE = "page"
    STATE = "state"
    NOTHING = "nothing"


def align_down(tokens: int, page_tokens: int) -> int:
    """The last page end at or before `tokens`; 0 for negative values."""
    return max(0, tokens) // page_tokens * page_tokens


def align_up(tokens: int, page_tokens: int) -> int:
    """The first page end at or behind `tokens`."""
    return -(-tokens // page_tokens) * page_tokens


def restore_cap(num_tokens: int, keep_tokens: int, page_tokens: int) -> int:
    """The deepest position at which a prompt of `num_tokens` may resume: its last `keep_tokens` are always recomputed.

    Source: decoder truncation rebuilds the decoder windows from exactly these tokens.
    """
    return align_down(num_tokens - max(keep_tokens, 1), page_tokens)


def resend_position(num_tokens: int, keep_tokens: int, page_tokens: int) -> int:
    """s0: where an identical prompt may resume. Mandatory: without it a resend recomputes everything."""
    return restore_cap(num_tokens, keep_tokens, page_tokens)


def tail_position(num_tokens: int, page_tokens: int) -> int:
    """s1: the last page end inside a prompt. Saves up to `keep_tokens` more once the prompt has grown by that much."""
    return align_down(num_tokens - 1, page_tokens)


def prefill_states(num_tokens: int, keep_tokens: int, page_tokens: int) -> list[tuple[int, StateReason]]:
    """(position, reason) of the states to keep at the end of a prefill, the indispensable one first."""
    resend, tail = resend_position(num_tokens, keep_tokens, page_tokens), tail_position(num_tokens, page_tokens)
    states = [(resend, StateReason.RESEND)] if resend > 0 else []
    if tail > max(resend, 0):
        states.append((tail, StateReason.TAIL))
    return states


def chunk_states(
    restored: int, matched: int, num_tokens: int, anchor_tokens: int, interval: int, keep_tokens: int, page_tokens: int
) -> dict[int, StateReason]:
    """Positions inside a prefill where a chunk must end so that a state can be kept, with their reasons.

    restored: where the prefill starts. matched: end of the stored pages. A fork state pays where a prompt left a stored path well
    beyond its last state: within two pages the states of the prefill's own end are as good. interval: 0 for none.
    """
    last = resend_position(num_tokens, keep_tokens, page_tokens)
    wanted = dict.fromkeys(range(interval, last, interval), StateReason.INTERVAL) if interval else {}
    if matched - restored > 2 * page_tokens:
        wanted[matched] = StateReason.FORK
    wanted[align_down(anchor_tokens, page_tokens)] = StateReason.ANCHOR
    return {p: reason for p, reason in wanted.items() if restored < p < last}


def surplus_fork(states: Sequence[tuple[int, StateReason]], most: int) -> int | None:
    """Index of the fork state to give up when a path, shallowest first, has `most` of them: the one that saves least. None: room."""
    forks = [i for i, (_, reason) in enumerate(states) if reason in (StateReason.FORK, StateReason.ASKED)]
    if len(forks) < most:
        return None
    return min(forks, key=lambda i: states[i][0] - (states[i - 1][0] if i else 0))


def dispensable_intervals(states: Sequence[tuple[int, StateReason]], interval: int) -> list[int]:
    """Interval states of a path, shallowest first, that are not the nearest to a power-of-two distance from its end. Indices."""
    if not states or not interval:
        return []
    end = states[-1][0]
    kept: set[int] = set()
    dispensable = []
    for i in reversed(range(len(states))):
        if states[i][1] is not StateReason.INTERVAL:
            continue
        octave = max(1, (end - states[i][0]) // interval).bit_length()
        if octave in kept:
            dispensable.append(i)
        kept.add(octave)
    return sorted(dispensable)


def superseded(states: Sequence[tuple[int, StateReason]]) -> list[int]:
    """Which (position, reason) of a path, shallowest first, later prefills made dispensable: all but the last two `RESEND`, all but
    the last `TAIL`, for which an answer's `DECODE` counts as well. Returns indices. They are given up only when frames are short, since
    an older prompt may still come back.
    """
    resends = [i for i, (_, reason) in enumerate(states) if reason is StateReason.RESEND]
    tails = [i for i, (_, reason) in enumerate(states) if reason in (StateReason.TAIL, StateReason.DECODE)]
    return sorted(resends[:-2] + tails[:-1])


def victim(page_age: int | None, state_age: int | None, state_worth: int, full_worth: int) -> Victim:
    """Which of the two least recent entries goes: a leaf page, or a state that saves `state_worth` tokens.

    Ages in ticks of the index clock, None when there is no such entry. `full_worth`: tokens that a state's memory would hold as
    pages. A state of that worth is never evicted alone; a cheaper one counts as older in proportion.
    """
    cheap = state_age is not None and state_worth < full_worth
    if page_age is None:
        return Victim.STATE if cheap else Victim.NOTHING
    if cheap and state_age is not None and page_age < page_goes_from(state_age, state_worth, full_worth):
        return Victim.STATE
    return Victim.PAGE


def page_goes_from(state_age: int, state_worth: int, full_worth: int) -> int:
    """The least age at which a leaf page is evicted before a cheap state of `state_age`."""
    return -(-state_age * full_worth // state_worth)
