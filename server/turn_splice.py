"""The place of an assistant turn in a rendered prompt, so that the ids it was sampled with can stand there."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.tokenizer import Tokenizer
from server.conversation import Message
from server.dialect import Dialect
from server.turn_memory import Turn, Turns, turn_of

Ranges = Sequence[tuple[int, int]]
_LONGEST_OPENING = 32  # tokens between the header and the end of a prompt: the opening of a calls block, when one is forced


@dataclass(frozen=True, slots=True)
class Region:
    """Code points [begin, end) of a prompt that stand for `token_ids`: a whole turn between its header and its end token."""

    begin: int
    end: int
    token_ids: Sequence[int]


def sampled_ids_of_turn(
    dialect: Dialect, tokenizer: Tokenizer, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> tuple[str, array[int]]:
    """(header, ids) of a turn: what its prompt had opened already, then the answer. ("", none) when that is not a whole turn with calls."""
    nothing = "", array("I")
    eos = tokenizer.token_id(dialect.eos)
    answer = list(answer_ids[:-1] if answer_ids and answer_ids[-1] == eos else answer_ids)
    if eos in answer:
        return nothing
    close = dialect.spell(dialect.tags.calls_close)
    tail = b"".join(map(tokenizer.token_bytes, answer[-len(close.encode()) :]))
    if not tail.endswith(close.encode()):
        return nothing
    for header in (dialect.header_thinking, dialect.header_chat):
        opening = tokenizer.encode(header)
        for at in range(len(prompt_ids) - len(opening), max(-1, len(prompt_ids) - len(opening) - _LONGEST_OPENING), -1):
            if list(prompt_ids[at : at + len(opening)]) == opening:
                return header, array("I", [*prompt_ids[at + len(opening) :], *answer])
    return nothing


def find_regions(prompt: str, ranges: Ranges, messages: Sequence[Message], dialect: Dialect, turns: Turns) -> list[Region]:
    """Where the remembered `turns` stand among the rendered `messages`. ranges: of the control tokens in `prompt`.

    The k-th end token of a prompt ends its k-th closed assistant turn. Anything that is not as expected there leaves the rendering.
    """
    ends = [i for i, (begin, end) in enumerate(ranges) if prompt[begin:end] == dialect.eos]
    closed = [message for message in messages if message["role"] == "assistant" and not message.get("wo_eos")]
    if not turns or len(ends) != len(closed):
        return []
    regions, previous = [], 0
    for at, message in zip(ends, closed, strict=True):
        turn = turn_of(message, turns)
        begin = _begin(prompt, ranges[previous:at], turn.header) if turn is not None and turn.token_ids else None
        if turn is not None and begin is not None and _is_rendering(prompt[begin : ranges[at][0]], turn, message, dialect):
            regions.append(Region(begin, ranges[at][0], turn.token_ids))
        previous = at + 1
    return regions


def _begin(prompt: str, ranges: Ranges, header: str) -> int | None:
    """Where the turn behind the last `header` among the control tokens `ranges` begins."""
    controls = {begin for begin, _ in ranges}
    starts = [begin for begin, end in ranges if prompt.startswith(header, begin) and (end - begin == len(header) or end in controls)]
    return starts[-1] + len(header) if starts else None


def _is_rendering(text: str, turn: Turn, message: Message, dialect: Dialect) -> bool:
    """Whether `text` is how the encoder writes the turn: nothing else was put in, and nothing was left out."""
    thinks = turn.header == dialect.header_thinking
    if thinks and (message.get("reasoning_content") or "") != turn.reasoning:
        return False
    lead = (turn.reasoning + dialect.think_end if thinks else "") + turn.content
    return text.startswith(lead + dialect.spell(f"\n\n{dialect.tags.calls_open}")) and text.endswith(
        dialect.spell(dialect.tags.calls_close)
    )


def encode_around(
    tokenizer: Tokenizer,
    prompt: str,
    ranges: Ranges,
    regions: Sequence[Region],
    known: Callable[[str], Sequence[int] | None],
) -> list[int]:
    """Ids of a prompt in which `regions` carry their own; see `Tokenizer.encode_ranges` for the rest. Regions end at control tokens, so
    nothing around them merges differently."""
    begins = [begin for begin, _ in ranges]
    token_ids: list[int] = []
    at = 0
    for region in [*regions, Region(len(prompt), len(prompt), ())]:
        inside = ranges[bisect_left(begins, at) : bisect_left(begins, region.begin)]
        token_ids += tokenizer.encode_ranges(prompt[at : region.begin], [(a - at, b - at) for a, b in inside], known)
        token_ids += region.token_ids
        at = region.end
    return token_ids
