"""Golden encodings, and the embedded model's encoder and tokenizer without its weights."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.models import tiny
from engine.tokenizer import Tokenizer
from server.encoding import Encoder, load_encoder
from server.output_parser import Delta, DeltaKind, OutputParser

FOLDER = Path(__file__).parents[1] / "golden" / "encoding"


def vectors(letter: str) -> list[Any]:
    """Vectors whose file name begins with `letter`, for parametrisation by id."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob(f"{letter}[0-9]*.json"))]


def divergences() -> list[Any]:
    return list(json.loads((FOLDER / "divergences.json").read_text(encoding="utf-8")))


def vector_id(vector: Any) -> str:
    return str(vector["id"])


def write_text_files(folder: Path) -> None:
    """A model directory without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.tiny_config()))
    (folder / "tokenizer.json").write_bytes(tiny.TOKENIZER_FILE.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny.tokenizer_config()))
    tiny.write_encoding(folder / "encoding")


@lru_cache(maxsize=1)
def loaded() -> tuple[Encoder, Tokenizer]:
    with tempfile.TemporaryDirectory() as name:
        write_text_files(Path(name))
        return load_encoder(Path(name)), Tokenizer.from_dir(name)


class Answer:
    """Deltas put together as a client does, with the rules that hold for every stream."""

    def __init__(self, thinking: bool) -> None:
        self.message: dict[str, Any] = {"role": "assistant", "content": ""} | ({"reasoning_content": ""} if thinking else {})
        self.tokens: dict[str, list[int]] = {"reasoning": [], "content": []}
        self.deltas: list[Delta] = []

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.text or delta.kind is DeltaKind.TOOL_START, "an empty delta"
            delta.text.encode("utf-8")
            self.deltas.append(delta)
            calls = self.message.setdefault("tool_calls", []) if delta.kind.startswith("tool") else []
            match delta.kind:
                case DeltaKind.REASONING:
                    self.message["reasoning_content"] = self.message.get("reasoning_content", "") + delta.text
                case DeltaKind.CONTENT:
                    self.message["content"] += delta.text
                case DeltaKind.TOOL_START:
                    assert delta.call_index == len(calls), "call indexes have a gap"
                    calls.append({"type": "function", "function": {"name": delta.text, "arguments": ""}})
                case DeltaKind.TOOL_ARGUMENTS:
                    assert delta.call_index == len(calls) - 1, "a piece of a call that is over"
                    calls[-1]["function"]["arguments"] += delta.text
            if delta.kind in self.tokens:
                self.tokens[delta.kind] += delta.tokens


def parse_text(parser: OutputParser, pieces: list[str], thinking: bool = False, reason: Any = None) -> Answer:
    answer = Answer(thinking)
    for piece in pieces:
        answer.add(parser.push_text(piece))
    answer.add(parser.finish() if reason is None else parser.finish(reason))
    return answer
