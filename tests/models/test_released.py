"""Excerpts of the released configuration: valid models with the released shapes."""

import pytest

from engine.errors import ConfigError
from engine.models.config import load_config, parse_config
from engine.models.inventory import stored_inventory
from engine.models.released import EVERY_KIND, excerpt, released_config, write_excerpt


def test_every_layer_is_an_excerpt_equal_to_the_release_apart_from_tables_and_vision():
    whole, found = released_config(), excerpt(range(40), stages=3, engram_rows=16_000_000)
    assert found["text_config"] == whole["text_config"]


def test_excerpt_of_every_kind_has_the_roles_of_the_release(tmp_path):
    config = load_config(write_excerpt(tmp_path / "few", excerpt(engram_rows=997)))
    text = config.text
    assert EVERY_KIND == (1, 2, 3, 20, 21, 22, 24)
    assert text.compress_ratios == (0, 2, 2, 1, 1, 1, 1, 0)
    assert text.kv_source_layer_ids == (1, 3)
    assert text.index_source_layer_ids == (1, 3, 6)
    assert text.boundary == text.candidate_source_layer_id == 3
    assert text.engram_layer_ids == (0,)
    assert text.dspark_target_layer_ids == (4, 5, 6)
    assert [layer for layer in range(7) if text.uses_candidates(layer)] == [6]
    assert config.vision is None


def test_excerpt_keeps_the_shapes_and_bytes_of_its_layers():
    few, whole = (stored_inventory(parse_config(data)) for data in (excerpt([2, 3], stages=0), released_config()))
    assert few["layers.0.attn.wq_b.weight"] == whole["layers.2.attn.wq_b.weight"].__class__(
        "layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1280)
    )
    size = sum(t.num_bytes for name, t in few.items() if name.startswith("layers.1."))
    assert size == sum(t.num_bytes for name, t in whole.items() if name.startswith("layers.3."))


def test_fewer_experts_stand_for_one_rank_of_eight():
    text = parse_config(excerpt([20, 21], experts=48)).text
    assert (text.n_routed_experts, text.num_experts_per_tok, text.dspark_n_routed_experts) == (48, 6, 48)


def test_follower_may_read_an_earlier_source_of_its_ratio():
    assert parse_config(excerpt([2, 9])).text.kv_source_layer_ids == (0,)


@pytest.mark.parametrize(("layers", "named"), [([3], "add 2"), ([2, 21], "add 20")])
def test_follower_without_its_source_is_refused_by_name(layers, named):
    with pytest.raises(ConfigError) as caught:
        excerpt(layers)
    assert named in caught.value.hint


@pytest.mark.parametrize("layers", [[], [3, 2], [40], [1, 1]])
def test_impossible_layers_are_refused(layers):
    with pytest.raises(ConfigError):
        excerpt(layers)
