"""One choice of a request: engine outputs in, pieces of the answer out. Streamed and complete answers share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import Output, TokenLogprob
from server.errors import ApiError
from server.output_parser import Delta, DeltaKind, OutputParser
from server.rank_pool import finish_error

SMALLEST_LOGPROB = -9999.0  # JSON has no -infinity
ENTRY_BYTES = 340  # what a token, or an alternative to it, takes as the value that becomes JSON (measured)
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EndRules:
    """When the server ends a choice itself. With `ignore_eos` it never does, and EOS in the middle has no text."""

    eos_id: int
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(slots=True)
class WrittenCall:
    """A tool call as it was given out; `arguments` in pieces."""

    id: str
    name: str
    arguments: list[str]


class Choice:
    """`finish_reason` is set when it is over; `stopped_early` tells that the engine has to be told."""

    def __init__(
        self,
        index: int,
        parser: OutputParser,
        rules: EndRules,
        token_bytes: Callable[[int], bytes] | None = None,
        *,
        streamed: bool = True,
    ) -> None:
        """token_bytes: given when log-probabilities were asked for. streamed: what `logprobs` gives out is not kept to the end."""
        self.index = index
        self.parser = parser
        self.rules = rules
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.stopped_early = False
        self.token_ids: list[int] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[WrittenCall] = []
        self.held_bytes = 0  # of log-probabilities: those of tokens without text, and without a stream all
        self._streamed = streamed
        self._token_bytes = token_bytes
        self._entries: dict[int, Entry] = {}  # by the parser's token index, until the token's text is sent
        self._num_parsed = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def feed(self, output: Output) -> list[Delta]:
        """Pieces that an output adds.

        Raises:
            ApiError: the engine ended the request abnormally.
        """
        if self.finish_reason is not None:
            return []
        error: ApiError | None = finish_error(output)
        if error is not None:
            raise error
        pieces: list[Delta] = []
        # One by one: what stands behind a stop string in the same step was never asked for and is not counted.
        for one in _single_tokens(output) if len(output.token_ids) > 1 else (output,):
            pieces += self._feed(one)
            if self.finish_reason is not None:
                self.stopped_early = output.finish_reason is None
                break
        for piece in pieces:
            self._note(piece)
        return pieces

    def _note(self, piece: Delta) -> None:
        """What the answer says so far, in pieces."""
        match piece.kind:
            case DeltaKind.CONTENT:
                self.content.append(piece.text)
            case DeltaKind.REASONING:
                self.reasoning.append(piece.text)
            case DeltaKind.TOOL_START:
                self.calls.append(WrittenCall(piece.call_id, piece.text, []))
            case DeltaKind.TOOL_ARGUMENTS:
                self.calls[piece.call_index].arguments.append(piece.text)

    def _feed(self, output: Output) -> list[Delta]:
        self.token_ids += output.token_ids
        pieces = self.parser.push(self._shown(output))
        if output.finish_reason is not None:
            pieces += self.parser.finish(output.finish_reason)
            self._end(output.stop_token_id)
        elif self._over:
            pieces += self.parser.finish()
            self._end(None)
        return pieces

    @property
    def _over(self) -> bool:
        if self.parser.stopped_by is not None:
            return True
        return self.parser.done and not self.rules.ignore_eos and self.num_tokens >= self.rules.min_tokens

    def _end(self, stop_token_id: int | None) -> None:
        self.finish_reason = self.parser.finish_reason
        if self.parser.stopped_by is not None:
            self.stop_reason = self.parser.stopped_by
        elif stop_token_id != self.rules.eos_id:
            self.stop_reason = stop_token_id

    def _shown(self, output: Output) -> list[int]:
        """The tokens that have a text: a stop token has none, nor has an EOS that was to be ignored."""
        ids: Sequence[int] = output.token_ids
        if output.stop_token_id is not None and output.stop_token_id != self.rules.eos_id:
            ids = ids[:-1]
        shown = []
        for position, token_id in enumerate(ids):
            if self.rules.ignore_eos and token_id == self.rules.eos_id:
                continue
            if self._token_bytes is not None and position < len(output.logprobs):
                self._entries[self._num_parsed] = self._entry(token_id, output.logprobs[position])
                self.held_bytes += ENTRY_BYTES * (1 + len(output.logprobs[position].top))
            self._num_parsed += 1
            shown.append(token_id)
        return shown

    def _entry(self, token_id: int, logprob: TokenLogprob) -> Entry:
        return {**self._value(token_id, logprob.logprob), "top_logprobs": [self._value(other, value) for other, value in logprob.top]}

    def _value(self, token_id: int, logprob: float) -> Entry:
        assert self._token_bytes is not None
        data = self._token_bytes(token_id)
        value = logprob if math.isfinite(logprob) else SMALLEST_LOGPROB
        return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}

    def logprobs(self, piece: Delta) -> list[Entry]:
        """Entries of the tokens whose text begins in a piece; each is given out once."""
        given = [self._entries.pop(index) for index in piece.tokens if index in self._entries]
        if self._streamed:
            self.held_bytes -= sum(ENTRY_BYTES * (1 + len(entry["top_logprobs"])) for entry in given)
        return given


def _single_tokens(output: Output) -> Iterator[Output]:
    """An output of several tokens as outputs of one; the last carries how it ended."""
    last = len(output.token_ids) - 1
    for i, token_id in enumerate(output.token_ids):
        end = (output.finish_reason, output.stop_token_id) if i == last else (None, None)
        yield Output(output.request_id, [token_id], *end, output.logprobs[i : i + 1])
