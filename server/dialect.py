"""Spellings of one chat format: control tokens, tags and headers, read from the checkpoint's encoder and never assumed.

Inside the server a control token is one lone surrogate: decoded UTF-8 cannot hold one, so generated text never looks like a control.
"""

from __future__ import annotations

from dataclasses import dataclass

THINK_START = "\ud800"
THINK_END = "\ud801"
DSML = "\ud802"


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags around tool calls, with `DSML` standing for the control token inside them."""

    calls_open: str
    calls_close: str
    invoke_open: str
    invoke_close: str
    parameter_open: str
    parameter_close: str

    @classmethod
    def of(cls, calls: str, invoke: str, parameter: str) -> Tags:
        """From the tag words, leading blanks included."""
        return cls(
            calls_open=f"<{DSML}{calls}>",
            calls_close=f"</{DSML}{calls}>",
            invoke_open=f'<{DSML}{invoke} name="',
            invoke_close=f"</{DSML}{invoke}>",
            parameter_open=f'<{DSML}{parameter} name="',
            parameter_close=f"</{DSML}{parameter}>",
        )


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the adapter and the output parser need to know about a chat format.

    user: the control token that opens a user turn. header_thinking/header_chat: the text that opens an assistant turn.
    tasks: task name -> control token.
    efforts: effort name -> number.
    """

    bos: str
    eos: str
    think_start: str
    think_end: str
    dsml: str
    image: str
    user: str
    header_thinking: str
    header_chat: str
    tasks: dict[str, str]
    efforts: dict[str, int]
    default_effort: int
    tags: Tags

    def spell(self, text: str) -> str:
        """Text with control characters replaced by their spellings."""
        if text.isascii():  # as most text is; control characters are not
            return text
        return text.replace(DSML, self.dsml).replace(THINK_START, self.think_start).replace(THINK_END, self.think_end)

    @property
    def controls(self) -> dict[str, str]:
        """Spelling -> control character, of the tokens that steer the output parser."""
        return {self.think_start: THINK_START, self.think_end: THINK_END, self.dsml: DSML}
