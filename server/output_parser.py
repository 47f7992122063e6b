"""Generated tokens to the parts of an answer: reasoning, content, tool calls. Incremental, lossless, linear in the output.

Control tokens are recognised by id and everything else by text. Model output is untrusted: any input gives an answer, none an error.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum, StrEnum, auto

import msgspec

from engine.request import FinishReason
from engine.tokenizer import IncrementalDetokenizer, Tokenizer
from server.call_writer import CallWriter, ParseCounts
from server.dialect import DSML, THINK_END, THINK_START, Dialect
from server.rendering import ParseStart
from server.scanner import Markers, Scanner, markers
from server.stop_stage import StopStage
from server.token_ledger import TokenLedger


class DeltaKind(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_START = "tool_start"
    TOOL_ARGUMENTS = "tool_arguments"


class Delta(msgspec.Struct, frozen=True, gc=False):
    """One piece of an answer. `text` is the text, the next part of a call's arguments, or the name of a call that begins.

    tokens: indexes of the generated tokens (from 0, control tokens left out) whose text begins in this piece; calls have none.
    """

    kind: DeltaKind
    text: str
    call_index: int = 0
    call_id: str = ""
    tokens: tuple[int, ...] = ()


class _Draft(msgspec.Struct, gc=False):
    """A delta in the making; pieces are joined once."""

    kind: DeltaKind
    call_index: int
    call_id: str
    pieces: list[str]
    tokens: list[int]


class _State(IntEnum):  # keys of tables that every token looks into: an integer hashes at once, a plain member calls Python
    REASONING = auto()
    CONTENT = auto()
    BLOCK = auto()
    CALL_NAME = auto()
    CALL = auto()
    PARAMETER_NAME = auto()
    PARAMETER_TYPE = auto()
    STRING_VALUE = auto()
    HELD_VALUE = auto()
    DONE = auto()


_SECTIONS = {_State.REASONING: DeltaKind.REASONING, _State.CONTENT: DeltaKind.CONTENT}
_STARTS = {ParseStart.REASONING: _State.REASONING, ParseStart.CONTENT: _State.CONTENT, ParseStart.BLOCK: _State.BLOCK}
_NAME_END = '">'
_TYPE_START = '" string='
_CONTROL_CHARS = re.compile(f"([{THINK_START}{THINK_END}{DSML}])")


class OutputParser:
    """Parser of one choice.

    tokenizer: None when only `push_text` is used. parse_calls: tools are declared and no choice or task forbids them.
    stops: stop strings, matched in content only. one_call: nothing behind the first complete call counts.
    raw: no structure at all; every token's spelling is content.
    """

    def __init__(
        self,
        dialect: Dialect,
        tokenizer: Tokenizer | None = None,
        *,
        start: ParseStart = ParseStart.CONTENT,
        parse_calls: bool = False,
        stops: Sequence[str] = (),
        tool_names: Collection[str] = (),
        one_call: bool = False,
        raw: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self.counts = ParseCounts()
        self.complete_calls = 0
        self.finish_reason: str | None = None
        self._dialect = dialect
        self._tags = dialect.tags
        self._raw = raw
        self._one_call = one_call
        self._tool_names = frozenset(tool_names)
        self._new_id = new_id or (lambda: f"call_{secrets.token_urlsafe(18)}")
        self._state = _State.CONTENT if raw else _STARTS[start]
        self._markers = self._state_markers(parse_calls and not raw)
        self._scanner = Scanner()
        self._stop = StopStage(stops)
        self._out: list[_Draft] = []
        self._ended = False
        # Of one call and one parameter
        self._num_calls = 0
        self._writer = CallWriter(self.counts)
        self._name = ""
        self._held: list[str] = []
        self._type = ""
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer is not None else None
        self._control_of = {} if tokenizer is None else {tokenizer.token_id(s): char for s, char in dialect.controls.items()}
        self._eos = None if tokenizer is None else tokenizer.token_id(dialect.eos)
        self._tokens = TokenLedger()
        self._reasoning_tokens: int | None = None if self._state is _State.REASONING else 0
        self._spellings = markers(*dialect.controls)
        self._text = Scanner()

    def _state_markers(self, parse_calls: bool) -> dict[_State, Markers]:
        tags = self._tags
        openers = [lead + tag for tag in (tags.calls_open, tags.invoke_open) for lead in ("", "\n\n")] if parse_calls else []
        return {
            _State.REASONING: markers(THINK_END, *openers),
            _State.CONTENT: markers(*openers),
            _State.BLOCK: markers(tags.invoke_open, tags.calls_close),
            _State.CALL_NAME: markers(_NAME_END),
            _State.CALL: markers(tags.parameter_open, tags.invoke_close, tags.invoke_open, tags.calls_close),
            _State.PARAMETER_NAME: markers(_TYPE_START, _NAME_END),
            _State.PARAMETER_TYPE: markers(_NAME_END),
            _State.STRING_VALUE: markers(tags.parameter_close),
            _State.HELD_VALUE: markers(tags.parameter_close),
        }

    @property
    def stopped_by(self) -> str | None:
        """The stop string that matched; then the choice is over."""
        return self._stop.matched

    @property
    def done(self) -> bool:
        """Nothing that follows can change the answer: generation may be stopped."""
        return self._finished() or self._ended

    def _finished(self) -> bool:
        return self._state is _State.DONE

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens before the end of the reasoning; all of them while it lasts."""
        return self._tokens.num_tokens if self._reasoning_tokens is None else self._reasoning_tokens

    @property
    def section(self) -> DeltaKind | None:
        """What a token pushed now belongs to; None inside calls and behind them."""
        return _SECTIONS.get(self._state)

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Parse generated tokens. Everything behind EOS is ignored."""
        assert self._detokenizer is not None, "this parser was made without a tokenizer"
        parts: list[str] = []
        offset = self._scanner.end
        for token_id in token_ids:
            if self._ended:
                break
            control = self._control_of.get(token_id)
            is_control = control is not None or token_id == self._eos
            # A control ends a character that was never finished; its replacement belongs to the tokens before.
            piece = self._detokenizer.flush() if is_control else self._detokenizer.push((token_id,))
            if is_control:
                parts.append(piece)
                offset += len(piece)
                piece = control or ""
            self._tokens.add(offset, is_control)
            parts.append(piece)
            offset += len(piece)
            self._ended = token_id == self._eos
        self._parse("".join(parts))
        return self._take()

    def push_text(self, text: str) -> list[Delta]:
        """Parse text in which control tokens are spelled out, for tests and for outputs without ids."""
        self._text.push(text)
        parts: list[str] = []
        marker = "-"
        while marker:
            piece, marker = self._text.until(self._spellings)
            parts += (piece, self._dialect.controls.get(marker, ""))
        self._parse("".join(parts))
        return self._take()

    def finish(self, reason: FinishReason = FinishReason.STOP) -> list[Delta]:
        """The engine ended the sequence. Releases what turned out to be text and sets `finish_reason`."""
        if self.finish_reason is not None:
            return []
        tail = self._text.rest() + (self._detokenizer.flush() if self._detokenizer is not None else "")
        self._parse(tail)
        closed = self._finished()
        if not closed:
            self._end(reason)
        if reason is FinishReason.STOP or closed:
            self.finish_reason = "tool_calls" if self.complete_calls and self.stopped_by is None else "stop"
        else:
            self.finish_reason = str(reason)
        self._state = _State.DONE
        return self._take()

    def _end(self, reason: FinishReason) -> None:
        rest_offset = self._scanner.offset
        rest = self._scanner.rest()
        # Held-back text with a control token in it is a truncated tag and may not show up anywhere.
        rest = "" if DSML in rest else rest
        if self._state is _State.REASONING:
            self._emit(DeltaKind.REASONING, rest_offset, rest)
        elif self._state is _State.CONTENT:
            self._emit(DeltaKind.CONTENT, rest_offset, rest)
            self._flush_stop()
        elif self._state is _State.STRING_VALUE:
            self._argue(CallWriter.string_piece(rest))
        if self._state is _State.CALL and reason is FinishReason.STOP:
            self._close_call()
        elif reason is FinishReason.STOP and self.section is None and self._state is not _State.BLOCK:
            self.counts.malformed_calls += 1

    def _parse(self, text: str) -> None:
        if self._finished():
            return
        self._scanner.push(text)
        marker = "-"
        while marker and not self._finished():
            offset = self._scanner.offset
            text, marker = self._scanner.until(self._markers[self._state])
            self._handle(offset, text, marker)

    def _handle(self, offset: int, text: str, marker: str) -> None:
        """One run of text and the marker behind it, which may be missing."""
        if self._state is _State.REASONING:
            self._emit(DeltaKind.REASONING, offset, text)
            if marker:
                self._end_reasoning(offset + len(text), marker)
        elif self._state is _State.CONTENT:
            self._emit(DeltaKind.CONTENT, offset, text)
            if marker and not self._finished():
                self._open(marker)
        elif self._state is _State.STRING_VALUE:
            self._argue(CallWriter.string_piece(self._dialect.spell(text)) + ('"' if marker else ""))
            if marker:
                self._state = _State.CALL
        elif self._state in (_State.BLOCK, _State.CALL):
            self._follow(marker)
        else:
            self._hold(text, marker)

    def _end_reasoning(self, offset: int, marker: str) -> None:
        self._tokens.claim(offset)
        self._reasoning_tokens = self._tokens.num_claimed
        self._state = _State.CONTENT
        if marker != THINK_END:
            self._open(marker)

    def _open(self, marker: str) -> None:
        self._flush_stop()
        self._state = _State.CALL_NAME if marker.endswith(self._tags.invoke_open) else _State.BLOCK

    def _follow(self, marker: str) -> None:
        """Between tags; text there has no meaning."""
        if marker == self._tags.parameter_open:
            self._state = _State.PARAMETER_NAME
            return
        if marker and self._state is _State.CALL:
            if marker != self._tags.invoke_close:
                self.counts.malformed_calls += 1
            self._close_call()
        if not self._finished() and marker == self._tags.invoke_open:
            self._state = _State.CALL_NAME
        elif marker == self._tags.calls_close:
            self._state = _State.DONE

    def _hold(self, text: str, marker: str) -> None:
        """A name, a type or a value that counts only when it is complete."""
        self._held.append(text)
        if not marker:
            return
        held = self._dialect.spell("".join(self._held))
        self._held = []
        if self._state is _State.CALL_NAME:
            self._start_call(held)
        elif self._state is _State.PARAMETER_NAME:
            self._name = held
            self._type = ""
            self._state = _State.PARAMETER_TYPE if marker == _TYPE_START else _State.HELD_VALUE
        elif self._state is _State.PARAMETER_TYPE:
            self._type = held
            self._state = _State.HELD_VALUE
            if held == '"true':
                self._argue(self._writer.string_start(self._name))
                self._state = _State.STRING_VALUE
        else:
            self._argue(self._writer.value(self._name, held, self._type))
            self._state = _State.CALL

    def _start_call(self, name: str) -> None:
        if name not in self._tool_names:
            self.counts.undeclared_calls += 1
        self._out.append(_Draft(DeltaKind.TOOL_START, self._num_calls, self._new_id(), [name], []))
        self._num_calls += 1
        self._writer = CallWriter(self.counts)
        self._state = _State.CALL

    def _close_call(self) -> None:
        self._argue(self._writer.close())
        self.complete_calls += 1
        self._state = _State.DONE if self._one_call else _State.BLOCK

    def _argue(self, text: str) -> None:
        self._add(DeltaKind.TOOL_ARGUMENTS, text, [], self._num_calls - 1)

    def _emit(self, kind: DeltaKind, offset: int, text: str) -> None:
        """Show a run of text that begins at `offset`. Think tokens vanish, a DSML token shows its spelling."""
        for part in _CONTROL_CHARS.split(text) if not text.isascii() else [text]:
            tokens = [(max(start - offset, 0), index) for start, index in self._tokens.claim(offset + len(part))]
            offset += len(part)
            shown = "" if part in (THINK_START, THINK_END) and not self._raw else self._dialect.spell(part)
            if kind is DeltaKind.CONTENT:
                shown, indexes = self._stop.push(shown, tokens)
            else:
                indexes = [index for _, index in tokens]
            self._add(kind, shown, indexes)
        if self._stop.matched is not None:
            self._state = _State.DONE

    def _flush_stop(self) -> None:
        self._add(DeltaKind.CONTENT, *self._stop.flush())

    def _add(self, kind: DeltaKind, text: str, tokens: list[int], call_index: int = 0) -> None:
        if not text:
            return
        last = self._out[-1] if self._out else None
        if last is None or (last.kind, last.call_index) != (kind, call_index):
            last = _Draft(kind, call_index, "", [], [])
            self._out.append(last)
        last.pieces.append(text)
        last.tokens += tokens

    def _take(self) -> list[Delta]:
        # Tokens of tags and calls are behind us; nobody asks for them any more.
        if self.section is None:
            self._tokens.claim(self._scanner.offset)
        drafts, self._out = self._out, []
        return [Delta(d.kind, "".join(d.pieces), d.call_index, d.call_id, tuple(d.tokens)) for d in drafts]
