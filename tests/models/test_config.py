import copy

import pytest

from engine.errors import CheckpointError
from engine.models.config import load_config, parse_config
from engine.models.engram_tables import column_offsets, compress_vocabulary, hash_multipliers, token_map
from engine.models.inventory import parameters, stored_inventory
from engine.models.released import released_config
from tests.models.tiny_configs import GOLDEN, golden_config, small_config


def test_released_config_lists_every_tensor_and_byte_of_the_release():
    inventory = stored_inventory(parse_config(released_config()))
    assert len(inventory) == 96_085
    assert sum(t.num_bytes for t in inventory.values()) == 510_286_023_000


def test_released_layers_read_from_the_documented_owners():
    text = parse_config(released_config()).text
    assert text.boundary == 20
    assert [text.kv_owner(layer) for layer in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [text.topk_owner(layer) for layer in (19, 23, 24, 35, 39)] == [14, 20, 24, 32, 36]
    assert [layer for layer in range(40) if text.uses_candidates(layer)] == [24, 28, 32, 36]


def test_released_bucket_primes_add_up_to_the_table_sizes():
    text = parse_config(released_config()).text
    first, second = text.engram_primes()
    assert first[:3] == (16000057, 16000079, 16000081)
    assert (first[8], first[16], first[23]) == (16000189, 16000339, 16000463)
    assert second[:3] == (16000477, 16000487, 16000499)
    assert (second[8], second[16], second[23]) == (16000667, 16000781, 16000889)
    assert (sum(first), sum(second)) == (384006168, 384016682)
    assert column_offsets((3, 5, 7)) == (0, 3, 8)


def test_hash_multipliers_match_the_published_ones():
    assert hash_multipliers(1, 4, 99092) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert hash_multipliers(14, 4, 99092) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


def test_small_config_gives_the_shapes_that_follow_from_it():
    config = parse_config(small_config())
    shapes = {name: (t.dtype, t.shape) for name, t in stored_inventory(config).items()}
    assert shapes["layers.0.attn.wo_a.weight"] == ("F8_E4M3", (64, 128))
    assert shapes["layers.0.hc_attn_fn"] == ("F32", (24, 512))
    assert shapes["layers.2.attn.indexer.wq_b.weight"] == ("F8_E4M3", (256, 64))
    assert shapes["layers.1.engram.wkv.weight"] == ("F8_E4M3", (640, 192))
    assert shapes["layers.0.ffn.experts.0.w1.weight"] == ("I8", (64, 64))
    assert shapes["layers.0.ffn.experts.0.w2.scale"] == ("F8_E8M0", (128, 2))
    assert shapes["mtp.0.main_proj.weight"] == ("F8_E4M3", (128, 384))
    assert shapes["mtp.1.confidence_head.proj.weight"] == ("BF16", (1, 160))
    assert "layers.5.attn.compressor.wgate.weight" not in shapes


def test_unquantised_inventory_has_no_scales():
    data = small_config()
    del data["quantization_config"]
    inventory = stored_inventory(parse_config(data))
    assert not [name for name in inventory if name.endswith(".scale")]
    assert inventory["layers.0.ffn.experts.0.w1.weight"].shape == (64, 128)


def test_text_only_config_lists_no_vision_tensors():
    data = small_config()
    data["vision_config"]["num_hidden_layers"] = 0
    assert not [p for p in parameters(parse_config(data)) if p.vision]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 2, 2, 3, 1, 1, 1, 0, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 1]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 1, 2, 2, 1, 1, 1, 0, 0]}, "compress_ratios"),
        ({"kv_source_layer_ids": [2]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 5, 6]}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [1, 2, 5, 7]}, "index_source_layer_ids"),
        ({"candidate_source_layer_id": 7}, "candidate_source_layer_id"),
        ({"candidate_topk_blocks": 1}, "candidate_topk_blocks"),
        ({"candidate_block_size": 0}, "candidate_block_size"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"o_groups": 3}, "num_attention_heads"),
        ({"hidden_size": 100}, "hidden_size"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim"),
        ({"engram_num_embeddings": [630, 835]}, "engram_num_embeddings"),
        ({"dspark_target_layer_ids": [4, 5, 6]}, "dspark_target_layer_ids"),
        ({"engram_layer_ids": [1, 5]}, "engram_layer_ids"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"q_head_norm": True}, "q_head_norm"),
        ({"rope_scaling": None}, "rope_scaling"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hc_mult": 0}, "hc_mult"),
    ],
)
def test_broken_rule_names_the_field_and_its_value(change, field):
    with pytest.raises(CheckpointError, match=field):
        parse_config(small_config(**change))


def test_missing_required_field_is_named():
    data = small_config()
    del data["text_config"]["head_dim"]
    with pytest.raises(CheckpointError, match=r"text_config\.head_dim is missing"):
        parse_config(data)


def test_other_architecture_is_refused():
    with pytest.raises(CheckpointError, match="architectures is \\['LlamaForCausalLM'\\]"):
        parse_config(small_config() | {"architectures": ["LlamaForCausalLM"]})


def test_other_quantisation_is_refused():
    data = copy.deepcopy(small_config())
    data["quantization_config"]["weight_block_size"] = [128, 128]
    with pytest.raises(CheckpointError, match="weight_block_size"):
        parse_config(data)


def test_fields_without_effect_may_be_missing():
    data = small_config()
    for name in ("attention_bias", "use_cache", "initializer_range", "tie_word_embeddings"):
        del data["text_config"][name]
    del data["vision_config"]
    assert parse_config(data).vision is None


def test_golden_configs_load():
    assert load_config(GOLDEN / "tiny-a-fp8").quantized
    assert not load_config(GOLDEN / "tiny-a-bf16").quantized


def test_missing_or_damaged_config_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_config(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        load_config(tmp_path / "nowhere")


def test_token_map_of_the_golden_tokenizer_matches_its_checksum():
    text = parse_config(golden_config()).text
    found = token_map(GOLDEN / "tiny-a-bf16", text.vocab_size, text.engram_compressed_vocab_size)
    assert found == compress_vocabulary(GOLDEN / "tiny-a-bf16" / "tokenizer.json")
    with pytest.raises(CheckpointError, match="engram_compressed_vocab_size says 429"):
        token_map(GOLDEN / "tiny-a-bf16", text.vocab_size, 429)


def test_identity_token_map_serves_a_checkpoint_without_tokenizer(tmp_path):
    assert token_map(tmp_path, 4, 4) == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        token_map(tmp_path, 4, 3)
