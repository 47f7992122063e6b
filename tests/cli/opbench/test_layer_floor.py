"""Bytes and operations of a layer, against the figures that follow from the released shapes."""

import pytest

from deepinfer_cli.opbench.layer_floor import layer_floor
from engine.models.config import parse_config
from engine.models.released import released_config

RELEASED = parse_config(released_config())


def test_follower_layer_reads_170_megabytes_and_18_8_per_expert() -> None:
    floor = layer_floor(RELEASED, 21, 8_192)
    assert floor.dense_bytes / 1e6 == pytest.approx(170, rel=0.01)
    assert floor.expert_bytes / 1e6 == pytest.approx(18.8, rel=0.003)
    assert floor.row_bytes == 128 * 528 + 512 * 288


@pytest.mark.parametrize(("rows", "touched", "gigabytes"), [(1, 6.0, 0.283), (8, 45.5, 1.026), (64, 243.8, 4.77), (256, 377.2, 7.32)])
def test_layer_bytes_grow_with_the_experts_that_are_touched(rows: int, touched: float, gigabytes: float) -> None:
    assert layer_floor(RELEASED, 21, 8_192).num_bytes(rows, touched) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_operations_of_an_encoder_layer_add_up() -> None:
    # 0.837 GFLOP per token and layer at 4,096 tokens, of which routed experts are about half.
    assert layer_floor(RELEASED, 3, 2_048).flops(1) / 1e9 == pytest.approx(0.837, rel=0.03)


def test_index_sources_read_every_visible_key_and_restricted_ones_only_candidates() -> None:
    follower, source, restricted = (layer_floor(RELEASED, layer, 65_536).row_bytes for layer in (21, 20, 24))
    assert source - follower == 65_536 * 68
    assert restricted - follower == 2_048 * 8 * 68
