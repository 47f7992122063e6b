"""Tests of native GPU code need a GPU; elsewhere they are reported as skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == Path(__file__).parent and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
