import itertools

import pytest
import torch

from engine.config import Precision
from engine.kv_cache import BlockLayout, CacheShape, KVCache, block_bytes
from engine.models.config import parse_config
from engine.models.numerics import Numerics
from engine.models.released import released_config
from tests.models.tiny_configs import golden_config, small_config

FULL, ROUNDED = Numerics.of(Precision.F), Numerics.of(Precision.B)


def golden_cache(**changes):
    shape = CacheShape(**{"block_size": 16, "num_blocks": 5, "num_state_slots": 3, "backtracking_tokens": 5, "keep_tokens": 24} | changes)
    return KVCache(parse_config(golden_config()).text, FULL, shape)


@pytest.mark.parametrize("config", [golden_config(), released_config(), small_config()])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_layers_of_a_block_never_overlap(config, block_size, element_bytes):
    text = parse_config(config).text
    layout = BlockLayout.of(text, block_size, element_bytes)
    kv, index = text.head_dim * element_bytes, text.index_head_dim * element_bytes
    used = []
    for layer in text.kv_source_layer_ids:
        entries = block_size // text.ratio(layer)
        used.append((layout.kv_offset[layer] * kv, (layout.kv_offset[layer] + entries) * kv))
        used.append((layout.index_offset[layer] * index, (layout.index_offset[layer] + entries) * index))
    used.sort()
    assert used[0][0] == 0
    assert used[-1][1] <= layout.block_bytes
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(used))
    assert layout.block_bytes == layout.kv_stride * kv == layout.index_stride * index


def test_released_pages_have_the_documented_sizes():
    text = parse_config(released_config()).text
    assert block_bytes(text, FULL, 128) == 819_200
    assert block_bytes(text, ROUNDED, 128) == 409_600


def test_released_window_state_has_the_documented_size():
    text = parse_config(released_config()).text
    cache = KVCache(text, ROUNDED, CacheShape(block_size=128, num_blocks=2, num_state_slots=2, backtracking_tokens=6, keep_tokens=140))
    assert cache.state_bytes == 2_621_440
    assert cache.ring_rows == 128 + 6 + 128 + 140
    assert cache.partial_rows == 7


def test_window_survives_a_round_trip_between_slots():
    cache = golden_cache()
    cache.rings[:, cache.ring_rows :] = torch.randn_like(cache.rings[:, cache.ring_rows :])
    out, again = (torch.empty(cache.state_bytes, dtype=torch.uint8) for _ in range(2))
    for position in (16, 100, 61, 1000):
        cache.save_window(1, position, out)
        cache.load_window(2, position, out)
        cache.save_window(2, position, again)
        assert torch.equal(out, again)
        rows = [p % cache.ring_rows for p in range(position - 16, position)]
        want = cache.rings[:5, cache.ring_rows :][:, rows]
        assert torch.equal(out.view(torch.float32).view(5, 16, 64), want)


def test_loading_a_window_touches_only_its_rows_of_encoder_layers():
    cache = golden_cache()
    cache.rings.fill_(7)
    cache.load_window(1, 32, torch.zeros(cache.state_bytes, dtype=torch.uint8))
    changed = (cache.rings != 7).any(-1)
    expected = torch.zeros_like(changed)
    expected[:5, [cache.ring_rows + p % cache.ring_rows for p in range(16, 32)]] = True
    assert torch.equal(changed, expected)


def test_window_before_the_sequence_starts_is_zero():
    cache = golden_cache()
    cache.rings.fill_(3)
    out = torch.empty(cache.state_bytes, dtype=torch.uint8)
    cache.save_window(1, 6, out)
    state = out.view(torch.float32).view(5, 16, 64)
    assert (state[:, :10] == 0).all()
    assert (state[:, 10:] == 3).all()


def test_reserved_slot_is_refused():
    cache = golden_cache()
    with pytest.raises(AssertionError, match="state slot 0"):
        cache.save_window(0, 16, torch.empty(cache.state_bytes, dtype=torch.uint8))


def test_format_names_what_decides_the_bytes():
    text = parse_config(golden_config()).text
    shape = CacheShape(block_size=16, num_blocks=2, num_state_slots=2, backtracking_tokens=5)
    ids = {KVCache(text, Numerics.of(p), shape).format_id for p in Precision}
    # B and R store the same bytes.
    assert len(ids) == 3
    other = parse_config(golden_config() | {"text_config": golden_config()["text_config"] | {"rope_theta": 20000}}).text
    assert KVCache(other, FULL, shape).format_id not in ids
