import pytest
import torch

from engine.errors import ConfigError
from engine.ops import pool_pairs, registry
from engine.ops.packed_linear import PACKED_LINEAR
from engine.ops.registry import Op, check, explain, select
from engine.ops.rms_norm import RMS_NORM
from engine.ops.tolerance import Tolerance


@pytest.fixture(autouse=True)
def _restore():
    yield
    select("auto", "cpu")


def test_auto_on_cpu_means_the_reference_everywhere():
    table = select("auto", "cpu")
    assert table["rms_norm"] == "reference"
    assert set(table.values()) == {"reference"}


def test_missing_backend_is_an_error_that_lists_the_choices():
    with pytest.raises(ConfigError, match="op rms_norm has no backend 'warp'") as caught:
        select("rms_norm:warp", "cpu")
    assert "reference" in caught.value.hint
    with pytest.raises(ConfigError, match="unknown op 'nonsense'"):
        select("nonsense:reference", "cpu")
    with pytest.raises(ConfigError, match="no backend ''"):
        select("rms_norm", "cpu")


def test_selected_backend_is_the_one_that_runs():
    twin = Op("test_only", reference=lambda: "slow", tolerance=Tolerance(), triton="engine.ops.registry:check")
    assert twin() == "slow"
    assert "reference" in twin.backends()
    assert RMS_NORM.backends()[-1] == "reference"


def test_contract_violation_shows_shapes_and_dtypes():
    with pytest.raises(ValueError, match=r"norm: arguments do not fit its contract: x \[2, 3\] bfloat16"):
        check(False, "norm", x=torch.zeros(2, 3, dtype=torch.bfloat16))


def test_every_choice_has_its_reason(monkeypatch):
    monkeypatch.setattr(registry, "available_kernels", lambda: frozenset({"triton"}))
    why = {entry.op: (entry.backend, entry.why) for entry in explain("rms_norm:reference", "cpu")}
    assert why["rms_norm"] == ("reference", "asked for by engine.ops")
    assert why["packed_linear"] == ("reference", "kernels need a GPU")
    assert why[pool_pairs.POOL_PAIRS.name] == ("reference", "the only implementation")
    assert PACKED_LINEAR.missing() == ["nvcc is not in PATH, or triton is not installed"]
