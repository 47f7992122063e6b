"""The checkpoint's text format as the routes use it: rendering, tokenisation, and parsers for what the model writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.tokenizer import Tokenizer
from server.encoding import Encoder, load_encoder
from server.launch import Launch
from server.output_parser import OutputParser
from server.rendering import RenderedPrompt, RenderOptions, render_chat

MAX_EFFORT = 100


@dataclass(frozen=True, slots=True)
class Text:
    """Thread-safe. Rendering and tokenisation run in worker threads; a parser belongs to one choice."""

    tokenizer: Tokenizer
    encoder: Encoder
    options: RenderOptions
    eos_id: int

    def render_chat(self, body: dict[str, Any]) -> RenderedPrompt:
        """Raises BadRequest with the field that is wrong."""
        return render_chat(self.encoder, self.tokenizer, body, self.options)

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

    def plain_parser(self, stops: Sequence[str]) -> OutputParser:
        return OutputParser(self.encoder.dialect, self.tokenizer, stops=stops, raw=True)


def load_text(launch: Launch) -> Text:
    """Load tokenizer and encoder of the checkpoint; the encoder reproduces the checkpoint's own cases first.

    Raises:
        CheckpointError, ConfigError: a file is missing, malformed or not trusted.
    """
    directory = Path(launch.engine.model)
    tokenizer = Tokenizer.from_dir(directory)
    encoder = load_encoder(directory, launch.server.trust_checkpoint_code)
    options = RenderOptions(default_thinking=launch.server.default_thinking)
    return Text(tokenizer, encoder, options, tokenizer.token_id(encoder.dialect.eos))
