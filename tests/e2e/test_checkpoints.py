"""`dix model verify` on the golden vectors, and one clear line for every kind of broken checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import Dix

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "model"


@pytest.fixture(scope="module")
def tiny_dir(dix: Dix, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    dix.ok("model", "make-tiny", str(directory))
    return directory


def broken_copy(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "broken"))


@pytest.mark.parametrize("mode", ["fp32", "fp32-qdq"])
def test_verify_passes_on_the_golden_directory(dix: Dix, mode: str) -> None:
    report = dix.json("model", "verify", str(GOLDEN), "--mode", mode)
    assert report["passed"] is True
    assert {(run["chunk_size"], run["together"]) for run in report["runs"]} == {(c, t) for c in (0, 16, 64) for t in (False, True)}
    assert all(len(run["prompts"]) == 4 for run in report["runs"])


def test_verify_fails_when_the_vectors_differ(dix: Dix, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN, tmp_path / "golden"))
    prompts = json.loads((directory / "prompts.json").read_text())
    shutil.copy(directory / "vectors-fp32-qdq.safetensors", directory / "vectors-fp32.safetensors")
    assert prompts
    assert dix("model", "verify", str(directory), "--mode", "fp32").returncode == 1


def expect_one_line(dix: Dix, directory: Path, word: str, code: int = 2) -> None:
    done = dix("generate", "Hi", "--model", str(directory), "--max-tokens", "2")
    assert done.returncode == code, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(error) == 1, done.stderr
    assert word in error[0]
    assert "Traceback" not in done.stderr


def test_truncated_safetensors(dix: Dix, tiny_dir: Path, tmp_path: Path) -> None:
    directory = broken_copy(tiny_dir, tmp_path)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    expect_one_line(dix, directory, "model.safetensors")


def test_wrong_shapes(dix: Dix, tiny_dir: Path, tmp_path: Path) -> None:
    directory = broken_copy(tiny_dir, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["q_lora_rank"] = 96
    (directory / "config.json").write_text(json.dumps(config))
    expect_one_line(dix, directory, "wq_a")


def test_unknown_model(dix: Dix, tmp_path: Path) -> None:
    expect_one_line(dix, tmp_path / "nothing-here", "nothing-here")


def test_missing_encoder_refuses_to_serve(dix: Dix, tiny_dir: Path, tmp_path: Path) -> None:
    directory = broken_copy(tiny_dir, tmp_path)
    shutil.rmtree(directory / "encoding")
    done = dix("start", str(directory), "--name", "no-encoder", "--port", "0")
    assert done.returncode == 2, done.stderr
    assert "encoding.py" in done.stderr
