"""The training kernels equal their slow twins, forward and backward (in Triton's interpreter where there is no GPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """Largest differences, measured by the recipe's self-check in a process that has the interpreter on from the start."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "recipes.tiny.selfcheck", "--small"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["attention", "attention.selected", "attention.window", "sinkhorn", "index_scores"])
def test_a_kernel_equals_its_slow_twin(errors: dict[str, float], name: str) -> None:
    measured = {key: value for key, value in errors.items() if key == name or key.startswith(name + "/")}
    assert measured
    assert max(measured.values()) < 2e-5, measured
