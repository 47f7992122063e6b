from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import MachineError
from engine.loader import checkpoint_files, open_checkpoint
from engine.models import tiny, tiny_encoding
from engine.models.config import load_config, parse_config
from engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.ensure_tiny(tmp_path_factory.mktemp("cache"))


def test_config_is_valid_and_has_the_documented_shape() -> None:
    text = parse_config(tiny.tiny_config()).text
    assert (text.sliding_window, text.boundary, text.num_stages, text.vocab_size) == (128, 5, 2, 4096)
    assert text.engram_num_embeddings == (12436, 12672)


def test_checkpoint_is_complete_and_of_the_released_format(made: Path) -> None:
    config = load_config(made)
    open_checkpoint(made, config)
    assert config.quantized
    size = sum(file.stat().st_size for file in checkpoint_files(made))
    assert size < 20 * 2**20
    assert len(Tokenizer.from_dir(made)) == config.text.vocab_size
    assert (made / "encoding" / "encoding.py").read_bytes() == Path(tiny_encoding.__file__).read_bytes()


def test_second_call_finds_the_first_ones_directory(made: Path) -> None:
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert tiny.ensure_tiny(made.parent) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp


def test_finding_an_existing_checkpoint_loads_no_torch(made: Path) -> None:
    code = f"import pathlib, sys, engine.models.tiny as t; t.ensure_tiny(pathlib.Path({str(made.parent)!r})); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_callers_at_the_same_time_get_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def make(out: Path, seed: int = 0, on_progress: object = None) -> None:
        calls.append(out)
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(tiny, "make_tiny", make)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: tiny.ensure_tiny(tmp_path), range(4)))
    assert len(set(found)) == 1
    assert len(calls) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [found[0].name]


def test_failed_attempt_leaves_nothing_and_leftovers_are_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(out: Path, seed: int = 0, on_progress: object = None) -> None:
        raise OSError("disk full")

    (tmp_path / ".tiny-killed").mkdir()
    monkeypatch.setattr(tiny, "make_tiny", fail)
    with pytest.raises(MachineError, match="disk full"):
        tiny.ensure_tiny(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_shipped_trained_weights_are_used_for_seed_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "config.json").write_text('{"trained": true}')
    (trained / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(tiny, "TRAINED_DIR", trained)
    tiny.make_tiny(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"trained": True}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.slow
def test_seeds_give_different_weights_and_equal_seeds_equal_ones(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tiny.make_tiny(tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
