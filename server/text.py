"""The checkpoint's text format as the routes use it: rendering, tokenisation, and parsers for what the model writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.tokenizer import Tokenizer
from server.constraints import Constraint, chat_constraint, plain_constraint
from server.dialect import Dialect
from server.encoding import ControlIds, Encoder, control_ids, load_chat_format
from server.grammar_check import grammars_available
from server.launch import Launch
from server.output_parser import OutputParser
from server.rendering import RenderedPrompt, RenderOptions, render_chat
from server.sampled_ids import Known
from server.turn_memory import Turns

MAX_EFFORT = 100


@dataclass(frozen=True, slots=True)
class Text:
    """Thread-safe. Rendering and tokenisation run in worker threads; a parser belongs to one choice. turn_ids: tokens that open turns."""

    tokenizer: Tokenizer
    encoder: Encoder
    options: RenderOptions
    controls: ControlIds
    turn_ids: frozenset[int] = frozenset()

    @property
    def eos_id(self) -> int:
        return self.controls.eos

    def render_chat(self, body: dict[str, Any], known: Known | None = None, turns: Turns | None = None) -> RenderedPrompt:
        """known, turns: ids with which history was sampled. Raises BadRequest with the field that is wrong."""
        return render_chat(self.encoder, self.tokenizer, body, self.options, known, turns)

    def chat_parser(self, rendered: RenderedPrompt, stops: Sequence[str], one_call: bool) -> OutputParser:
        return OutputParser(
            self.encoder.dialect,
            self.tokenizer,
            start=rendered.start,
            parse_calls=rendered.parse_tools,
            stops=stops,
            tool_names=rendered.tools.names,
            one_call=one_call,
        )

    def chat_constraint(self, body: dict[str, Any], rendered: RenderedPrompt) -> Constraint | None:
        """Raises BadRequest with the field that is wrong."""
        return chat_constraint(body, rendered, self.encoder.dialect, self.controls, constrained=self.options.constrained)

    def plain_constraint(self, body: dict[str, Any]) -> Constraint | None:
        """Raises BadRequest with the field that is wrong."""
        return plain_constraint(body, constrained=self.options.constrained)

    def plain_parser(self, stops: Sequence[str]) -> OutputParser:
        return OutputParser(self.encoder.dialect, self.tokenizer, stops=stops, raw=True)


def load_text(launch: Launch) -> Text:
    """Load tokenizer and encoder of the checkpoint; the encoder reproduces the checkpoint's own cases first.

    Raises:
        CheckpointError, ConfigError: a file is missing, malformed or not trusted.
    """
    directory = Path(launch.engine.model)
    tokenizer, encoder = load_chat_format(directory, launch.server.trust_checkpoint_code, dummy=launch.engine.load_format == "dummy")
    # A replaced engine (tests) follows no grammar.
    constrained = grammars_available() and not launch.engine_factory
    options = RenderOptions(
        default_thinking=launch.server.default_thinking,
        constrained=constrained,
        lenient_tool_history=launch.server.lenient_tool_history,
    )
    return Text(tokenizer, encoder, options, control_ids(encoder.dialect, tokenizer), turn_ids(encoder.dialect, tokenizer))


def turn_ids(dialect: Dialect, tokenizer: Tokenizer) -> frozenset[int]:
    """The control tokens that steer neither thinking, calls nor tasks: those that open a turn."""
    others = {dialect.bos, dialect.eos, dialect.think_start, dialect.think_end, dialect.dsml, dialect.image, *dialect.tasks.values()}
    return frozenset(token_id for spelling, token_id in tokenizer.added.items() if spelling not in others)
