import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.verify import VerifyMode, verify_dir
from tests.models.tiny_configs import GOLDEN


@pytest.fixture
def altered(tmp_path):
    """A copy of the golden directory with one mode, whose vectors a test may change."""
    shutil.copytree(GOLDEN / "tiny-a-bf16", tmp_path / "tiny-a-bf16")
    prompts = json.loads((GOLDEN / "prompts.json").read_text())[:2]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    tensors = {k: v for k, v in load_file(GOLDEN / "vectors-fp32.safetensors").items() if k.startswith(("p0.", "p1."))}

    def write(change):
        change(tensors)
        save_file(tensors, tmp_path / "vectors-fp32.safetensors", metadata={"checkpoint": "tiny-a-bf16", "mode": "fp32"})
        return verify_dir(tmp_path, [VerifyMode.FP32], chunk_sizes=(16,), batch=(True,))

    return write


@pytest.mark.parametrize("block_size", [16, 32])
def test_golden_fp32_vectors_pass_alone_and_together(block_size):
    report = verify_dir(GOLDEN, [VerifyMode.FP32], chunk_sizes=(64,), block_size=block_size)
    assert report.passed
    assert [(run.chunk_size, run.together) for run in report.runs] == [(64, False), (64, True)]
    assert all(p.max_error <= 1e-4 and p.greedy_agree == p.greedy_steps == 32 for run in report.runs for p in run.prompts)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(VerifyMode))
def test_golden_vectors_pass_in_every_mode_and_chunking(mode):
    report = verify_dir(GOLDEN, [mode])
    assert [run.problems + [q for p in run.prompts for q in p.problems] for run in report.runs] == [[]] * 6
    assert report.passed


def test_correct_vectors_pass_and_progress_is_reported(altered):
    assert altered(lambda tensors: None).passed


def test_one_wrong_logit_fails_its_prompt_only(altered):
    def change(tensors):
        tensors["p1.logits"][3, 5] += 0.01

    report = altered(change)
    assert not report.passed
    good, bad = report.runs[0].prompts
    assert good.passed
    assert "largest logit error 1.00e-02" in bad.problems[0]


def test_wrong_greedy_token_is_reported_with_its_step(altered):
    def change(tensors):
        tensors["p0.gen_tokens"][31] += 1

    report = altered(change)
    assert report.runs[0].prompts[0].problems == ["greedy token differs at step 31 (1 of 32)"]


def test_nan_never_passes(altered):
    def change(tensors):
        tensors["p0.gen_logits"][2, 2] = float("nan")

    assert not altered(change).passed


def test_missing_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"prompts\.json is missing"):
        verify_dir(tmp_path)
    shutil.copy(GOLDEN / "prompts.json", tmp_path)
    with pytest.raises(CheckpointError, match="no vectors"):
        verify_dir(tmp_path)
    with pytest.raises(CheckpointError, match=r"vectors-bf16\.safetensors is missing"):
        verify_dir(tmp_path, [VerifyMode.BF16])
    (tmp_path / "vectors-bf16.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="cannot be read"):
        verify_dir(tmp_path)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ("[]", "holds no prompt"), ("{}", "holds no prompt"), ('[{"id": "p0", "token_ids": []}]', "without tokens"), ("[5]", "damaged"),
        ("[" * 100_000, "damaged"), ('[{"id": "p0", "token_ids": [1000000000]}]', "has token 1000000000"),
        ('[{"id": "p0", "token_ids": [-1]}]', "has token -1"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_are_one_clear_error(altered, tmp_path, prompts, says):
    (tmp_path / "prompts.json").write_text(prompts)
    with pytest.raises(CheckpointError, match=says):
        altered(lambda tensors: None)


def test_vectors_name_a_checkpoint_beside_them_only(altered, tmp_path):
    altered(lambda tensors: None)
    tensors = load_file(tmp_path / "vectors-fp32.safetensors")
    save_file(tensors, tmp_path / "vectors-fp32.safetensors", metadata={"checkpoint": "../elsewhere"})
    with pytest.raises(CheckpointError, match="not beside it"):
        verify_dir(tmp_path, [VerifyMode.FP32])
