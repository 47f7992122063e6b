"""Which tokenizer and chat format a directory is served with, and what stands in beside random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.models.tiny import TOKENIZER_FILE, write_text_format
from hicache.config import HiCacheConfig
from server.config import ServerConfig
from server.launch import Launch
from server.text import Text, load_text

CHAT = {"messages": [{"role": "user", "content": "Hi <think>"}]}


def load(directory: Path, load_format: str = "dummy") -> Text:
    engine = EngineConfig(model=str(directory), load_format=load_format)
    return load_text(Launch("n", "0123456789", engine, HiCacheConfig(), ServerConfig(), str(directory), str(directory)))


def with_tokenizer(directory: Path, *, controls: bool = True) -> Path:
    data = json.loads(TOKENIZER_FILE.read_text(encoding="utf-8"))
    data["added_tokens"] = data["added_tokens"] if controls else []
    (directory / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return directory


def test_random_weights_with_a_tokenizer_alone_speak_the_embedded_format(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    write_text_format(tmp_path / "whole")
    whole = load(tmp_path / "whole", "auto").render_chat(CHAT)
    assert load(with_tokenizer(tmp_path)).render_chat(CHAT).token_ids == whole.token_ids


def test_weights_of_a_checkpoint_are_never_served_in_a_format_that_stands_in(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"exactly encoding\.py is expected"):
        load(with_tokenizer(tmp_path), "auto")


def test_missing_tokenizer_names_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing") as caught:
        load(tmp_path)
    assert f"dix model shapes {tmp_path}" in caught.value.hint


def test_tokenizer_without_the_control_tokens_of_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not fit its tokenizer: the tokenizer has no single token") as caught:
        load(with_tokenizer(tmp_path, controls=False))
    assert "copy encoding/" in caught.value.hint


def test_format_beside_random_weights_is_checked_like_any_other(tmp_path: Path) -> None:
    write_text_format(tmp_path)
    (tmp_path / "encoding" / "encoding.py").write_text("import os\n")
    with pytest.raises(CheckpointError, match="unknown code"):
        load(tmp_path)


def test_what_lies_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("mine")
    assert write_text_format(tmp_path) == ["encoding/"]
    assert (tmp_path / "tokenizer.json").read_text() == "mine"
    assert write_text_format(tmp_path) == []
