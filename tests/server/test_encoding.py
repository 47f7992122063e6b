from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.models import tiny_encoding
from engine.tokenizer import Tokenizer
from server.checkpoint_code import PUBLISHED_SHA256, allowed_hashes
from server.encoding import control_ids, load_encoder
from tests.server.vectors import loaded, write_text_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_text_files(tmp_path)
    return tmp_path


def edit(model: Path, old: str, new: str) -> None:
    path = model / "encoding" / "encoding.py"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def refusal(model: Path, trust: bool = False) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_encoder(model, trust)
    assert caught.value.hint
    return caught.value


def test_own_encoder_is_on_the_allow_list_and_reproduces_its_cases(model: Path) -> None:
    encoder = load_encoder(model)
    assert encoder.sha256 in allowed_hashes()
    assert PUBLISHED_SHA256 in allowed_hashes()
    assert encoder.dialect.efforts == {"low": 50, "high": 75, "max": 100}
    assert encoder.dialect.header_thinking == "<｜Assistant｜><think>"
    assert encoder.dialect.spell(encoder.dialect.tags.calls_open) == "<｜DSML｜ calls>"


def test_loading_leaves_no_trace_in_the_process_and_on_disk(model: Path) -> None:
    before, path = set(sys.modules), list(sys.path)
    load_encoder(model)
    assert sys.path == path
    assert not {name for name in set(sys.modules) - before if "checkpoint" in name or "encoding" in name}
    assert list(model.rglob("*.pyc")) == []


def test_changed_encoder_needs_trust(model: Path) -> None:
    edit(model, '"low": 50', '"low": 25')
    assert "--trust-checkpoint-code" in refusal(model).hint
    # Trusted, it is still held to the cases that came with it.
    assert "test_input_2.json" in str(refusal(model, trust=True))
    expected = model / "encoding" / "tests" / "test_output_2.txt"
    expected.write_text(expected.read_text(encoding="utf-8").replace("Effort: 50", "Effort: 25"), encoding="utf-8")
    assert load_encoder(model, trust=True).dialect.efforts["low"] == 25


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "from subprocess import run",
        "from . import x",
        "import json, socket",
        "open('/etc/hostname')",
        "eval('1')",
        "exec('1')",
        "__import__('os')",
        "reader = open",
        "().__class__.__bases__",
        "def helper():\n    import os",
    ],
)
def test_unsafe_code_is_refused_even_when_trusted(model: Path, line: str) -> None:
    with (model / "encoding" / "encoding.py").open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    assert "encoding.py:" in str(refusal(model, trust=True))


@pytest.mark.parametrize("content", ["def", "raise ValueError('no')", "x = 1", "\0"])
def test_broken_file_is_refused_in_one_line(model: Path, content: str) -> None:
    (model / "encoding" / "encoding.py").write_text(content)
    assert "\n" not in str(refusal(model, trust=True))


def test_missing_or_ambiguous_encoder_is_refused(model: Path) -> None:
    (model / "encoding" / "encoding_dsv4.py").write_text("")
    assert "encoding.py, encoding_dsv4.py" in str(refusal(model))
    for path in (model / "encoding").glob("*.py"):
        path.unlink()
    assert "holds nothing" in str(refusal(model))


def test_other_model_types_are_refused(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "deepseek_v4"}')
    assert "deepseek_v4" in str(refusal(model))


def test_checkpoint_without_cases_is_refused(model: Path) -> None:
    for path in (model / "encoding" / "tests").iterdir():
        path.unlink()
    assert "test_input" in str(refusal(model))


@pytest.mark.parametrize("change", ["output", "input", "missing output"])
def test_case_that_differs_is_named(model: Path, change: str) -> None:
    tests = model / "encoding" / "tests"
    if change == "output":
        with (tests / "test_output_3.txt").open("a") as file:
            file.write(" ")
    elif change == "input":
        (tests / "test_input_3.json").write_text('{"messages": [{"role": "developer"}]}')
    else:
        (tests / "test_output_3.txt").unlink()
    assert "test_input_3.json" in str(refusal(model))


def test_python_without_assertions_is_refused(model: Path) -> None:
    code = f"from server.encoding import load_encoder; load_encoder({str(model)!r})"
    result = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert "python -O" in result.stderr


def test_tokenizer_of_another_release_is_refused(model: Path) -> None:
    encoder, tokenizer = loaded()
    assert control_ids(encoder.dialect, tokenizer).dsml == 9
    data = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != tiny_encoding.dsml_token]
    with pytest.raises(CheckpointError, match="DSML"):
        control_ids(encoder.dialect, Tokenizer(data))


def test_rendering_and_parsing_load_no_torch() -> None:
    code = "import sys, server.rendering, server.output_parser, server.encoding; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
