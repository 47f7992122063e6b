import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.loader import RandomWeights, model_fingerprint, open_checkpoint, random_tensors, write_checkpoint
from engine.models.config import load_config, parse_config
from engine.models.inventory import parameters
from tests.models.tiny_configs import GOLDEN, golden_config, small_config


def read_all(model_dir, dtype=torch.float32):
    config = load_config(model_dir)
    checkpoint = open_checkpoint(model_dir, config)
    return {name: checkpoint.tensor(name, dtype) for name in sorted(checkpoint.unread)}


@pytest.fixture(scope="module")
def golden_values():
    return read_all(GOLDEN / "tiny-a-bf16")


@pytest.fixture
def plain_copy(tmp_path):
    """A writable copy of the unquantised golden checkpoint and its raw tensors."""
    target = tmp_path / "model"
    target.mkdir()
    shutil.copy(GOLDEN / "tiny-a-bf16" / "config.json", target)
    return target, load_file(GOLDEN / "tiny-a-bf16" / "model.safetensors")


def test_quantised_golden_checkpoint_decodes_to_the_plain_one_exactly(golden_values):
    quantised = read_all(GOLDEN / "tiny-a-fp8")
    assert quantised.keys() == golden_values.keys()
    for name, value in quantised.items():
        assert torch.equal(value, golden_values[name]), name


def test_decoding_to_bf16_loses_nothing(golden_values):
    for name, value in read_all(GOLDEN / "tiny-a-fp8", torch.bfloat16).items():
        if golden_values[name].to(torch.bfloat16).float().equal(golden_values[name]):
            assert torch.equal(value.float(), golden_values[name]), name


@pytest.mark.parametrize("variant", ["tiny-a-bf16", "tiny-a-fp8"])
def test_written_checkpoint_reads_back_exactly(tmp_path, golden_values, variant):
    write_checkpoint(tmp_path, golden_config(variant), golden_values)
    for name, value in read_all(tmp_path).items():
        assert torch.equal(value, golden_values[name]), name


def test_random_tensors_survive_a_second_trip_unchanged(tmp_path):
    config = small_config()
    write_checkpoint(tmp_path / "a", config, random_tensors(parse_config(config), seed=3))
    first = read_all(tmp_path / "a")
    write_checkpoint(tmp_path / "b", config, first)
    for name, value in read_all(tmp_path / "b").items():
        assert torch.equal(value, first[name]), name
        assert value.abs().sum() > 0, name


def test_writer_names_missing_unknown_and_misshapen_tensors(tmp_path, golden_values):
    tensors = dict(golden_values)
    tensors["extra"] = tensors.pop("norm.weight")
    tensors["head.weight"] = tensors["head.weight"][:3]
    with pytest.raises(CheckpointError, match=r"3 tensors.*missing norm\.weight.*unknown extra.*head\.weight is \[3, 64\]"):
        write_checkpoint(tmp_path, golden_config(), tensors)


def test_sharded_checkpoint_with_model_prefix_reads_the_same(plain_copy, golden_values):
    target, tensors = plain_copy
    names = sorted(tensors)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2])):
        file = f"model-{shard}.safetensors"
        save_file({f"model.{n}": tensors[n] for n in part}, target / file)
        weight_map |= {f"model.{n}": file for n in part}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, value in read_all(target).items():
        assert torch.equal(value, golden_values[name]), name
    (target / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing: model-1\.safetensors"):
        open_checkpoint(target, load_config(target))


def test_missing_and_unknown_tensors_are_named_and_counted(plain_copy):
    target, tensors = plain_copy
    tensors["layers.0.attn.mystery"] = tensors.pop("layers.0.attn.attn_sink")
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: layers\.0\.attn\.attn_sink; 1 unknown: layers\.0\.attn\.mystery"):
        open_checkpoint(target, load_config(target))


def test_wrong_shape_and_dtype_are_named(plain_copy):
    target, tensors = plain_copy
    tensors["norm.weight"] = tensors["norm.weight"][:32].clone()
    tensors["layers.0.hc_attn_fn"] = tensors["layers.0.hc_attn_fn"].bfloat16()
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2 misfits: norm\.weight is BF16 \[32\].*hc_attn_fn is BF16"):
        open_checkpoint(target, load_config(target))


def test_scales_without_quantisation_config_are_refused():
    with pytest.raises(CheckpointError, match=r"unquantised config: .* unknown: .*\.scale"):
        open_checkpoint(GOLDEN / "tiny-a-fp8", load_config(GOLDEN / "tiny-a-bf16"))
    with pytest.raises(CheckpointError, match=r"quantised config: .* missing: .*\.scale"):
        open_checkpoint(GOLDEN / "tiny-a-bf16", load_config(GOLDEN / "tiny-a-fp8"))


@pytest.mark.parametrize("keep", [4, 200, 200_000])
def test_truncated_file_is_one_clear_line(plain_copy, keep):
    target, _ = plain_copy
    content = (GOLDEN / "tiny-a-bf16" / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        open_checkpoint(target, load_config(target))
    assert "\n" not in str(caught.value)


def test_directory_without_weights_is_refused(plain_copy):
    target, _ = plain_copy
    with pytest.raises(CheckpointError, match="has neither"):
        open_checkpoint(target, load_config(target))


def test_vision_tensors_are_skipped_as_a_group_and_refused_in_part(tmp_path):
    data = small_config()
    config = parse_config(data)
    tensors = random_tensors(config, seed=0)
    vision = {p.name: torch.ones(p.shape) for p in parameters(config) if p.vision}
    write_checkpoint(tmp_path / "full", data, tensors | vision)
    write_checkpoint(tmp_path / "text", data, tensors)
    assert read_all(tmp_path / "full").keys() == read_all(tmp_path / "text").keys()
    stored = load_file(tmp_path / "full" / "model.safetensors")
    del stored["image_start"]
    save_file(stored, tmp_path / "full" / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 missing: image_start"):
        open_checkpoint(tmp_path / "full", config)


def test_every_tensor_is_read_exactly_once():
    config = load_config(GOLDEN / "tiny-a-fp8")
    checkpoint = open_checkpoint(GOLDEN / "tiny-a-fp8", config)
    checkpoint.tensor("norm.weight", torch.float32)
    with pytest.raises(AssertionError, match=r"norm\.weight"):
        checkpoint.tensor("norm.weight", torch.float32)


def test_progress_ends_at_one():
    seen = []
    config = load_config(GOLDEN / "tiny-a-bf16")
    checkpoint = open_checkpoint(GOLDEN / "tiny-a-bf16", config, lambda what, share: seen.append((what, share)))
    for name in sorted(checkpoint.unread):
        checkpoint.tensor(name, torch.float32)
    assert seen[-1] == ("weights", 1.0)
    assert [share for _, share in seen] == sorted(share for _, share in seen)


def test_random_weights_do_not_depend_on_the_order_of_loading():
    config = parse_config(small_config())
    one, two = RandomWeights(config, 1), RandomWeights(config, 1)
    two.tensor("embed.weight", torch.float32)
    assert torch.equal(one.tensor("norm.weight", torch.float32), two.tensor("norm.weight", torch.float32))
    assert RandomWeights(config, 2).tensor("norm.weight", torch.float32).ne(random_tensors(config, 1)["norm.weight"]).any()


def test_fingerprint_follows_content_and_not_the_path(plain_copy, tmp_path):
    target, _ = plain_copy
    shutil.copy(GOLDEN / "tiny-a-bf16" / "model.safetensors", target)
    assert model_fingerprint(target) == model_fingerprint(GOLDEN / "tiny-a-bf16")
    assert model_fingerprint(target) != model_fingerprint(GOLDEN / "tiny-a-fp8")
    assert model_fingerprint(target, "dummy", 0) != model_fingerprint(target, "dummy", 1)
