"""Triton kernels run in the interpreter where there is no GPU. It has to be asked for before a kernel is defined."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")


@pytest.fixture
def device():
    """Where kernels under test run: the GPU, or the CPU with the interpreter."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"
