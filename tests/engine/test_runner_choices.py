"""Why weights are decoded and why steps are not recorded, in words."""

import pytest

from engine.config import EngineConfig, Precision
from engine.errors import ConfigError
from engine.models.config import parse_config
from engine.models.numerics import Numerics
from engine.models.released import released_config
from engine.runner_choices import keeps_packed_rows, keeps_packed_weights, why_not_recorded

KERNELS = {"packed_experts": "cuda", "index_search": "triton", "row_attention": "triton"}
PACKED = Numerics.of(Precision.B, packed_weights=True, packed_rows=True)
RELEASED = parse_config(released_config())


@pytest.mark.parametrize(
    ("changes", "device", "numerics", "ops", "reason"),
    [
        ({}, "cuda", PACKED, KERNELS, ""),
        ({}, "cpu", PACKED, KERNELS, "the device is cpu"),
        ({"enforce_eager": True}, "cuda", PACKED, KERNELS, "engine.enforce_eager is set"),
        ({}, "cuda", Numerics.of(Precision.B), KERNELS, "weights or cache rows are not packed"),
        ({}, "cuda", PACKED, KERNELS | {"row_attention": "reference"}, "no kernel for row_attention"),
    ],
)
def test_steps_are_recorded_when_nothing_needs_the_host(changes, device, numerics, ops, reason):
    assert why_not_recorded(EngineConfig(**changes), RELEASED, numerics, device, ops) == reason


@pytest.mark.parametrize(
    ("weights", "precision", "device", "kept"),
    [("auto", "B", "cuda", True), ("auto", "R", "cuda", True), ("auto", "F", "cuda", False), ("auto", "B", "cpu", False),
     ("dense", "B", "cuda", False), ("packed", "B", "cpu", True)],
)  # fmt: skip
def test_weights_stay_packed_where_kernels_read_them(weights, precision, device, kept):
    assert keeps_packed_weights(EngineConfig(weights=weights), RELEASED, Precision(precision), device, KERNELS) is kept


def test_weights_are_decoded_without_a_kernel():
    assert not keeps_packed_weights(EngineConfig(), RELEASED, Precision.B, "cuda", {"packed_experts": "reference"})


@pytest.mark.parametrize(
    ("rows", "precision", "device", "kept"),
    [("auto", "B", "cuda", True), ("auto", "F", "cuda", False), ("auto", "B", "cpu", False), ("packed", "Fq", "cpu", True),
     ("plain", "B", "cuda", False)],
)  # fmt: skip
def test_cache_rows_are_packed_where_the_profile_rounds_to_them(rows, precision, device, kept):
    assert keeps_packed_rows(EngineConfig(cache_rows=rows), Precision(precision), device) is kept


def test_formats_that_a_profile_has_not_are_refused_when_asked_for():
    with pytest.raises(ConfigError, match=r"engine\.cache_rows is packed but precision F"):
        keeps_packed_rows(EngineConfig(cache_rows="packed"), Precision.F, "cuda")
    with pytest.raises(ConfigError, match=r"engine\.weights is packed but precision F"):
        keeps_packed_weights(EngineConfig(weights="packed"), RELEASED, Precision.F, "cuda", KERNELS)
