"""Ranks that reach each other's memory across processes, on one GPU."""

import subprocess
import sys

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_on_one_gpu_have_the_bits_of_a_rank_with_all_experts(tmp_path, ranks):
    command = [sys.executable, "-m", "tests.gpu.shared_gpu", str(tmp_path), "--ranks", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
