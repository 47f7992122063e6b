import itertools

import pytest
import torch

from engine.cache_layout import BlockLayout, RowSizes
from engine.config import Precision
from engine.kv_cache import CacheShape, KVCache, block_bytes
from engine.models.config import parse_config
from engine.models.numerics import Numerics
from engine.models.released import excerpt, released_config
from engine.ops.cache_rows import unpack_entry_rows, unpack_window_rows
from engine.ops.compress_entries import IndexKeys, compress_entries
from engine.ops.q8 import q8
from engine.ops.rms_norm import rms_norm
from tests.models.tiny_configs import golden_config, small_config

FULL, ROUNDED = Numerics.of(Precision.F), Numerics.of(Precision.B)
PACKED, PACKED_FP32 = Numerics.of(Precision.B, packed_rows=True), Numerics.of(Precision.FQ, packed_rows=True)


def golden_cache(**changes):
    shape = CacheShape(**{"block_size": 16, "num_blocks": 5, "num_state_slots": 3, "backtracking_tokens": 5, "keep_tokens": 24} | changes)
    return KVCache(parse_config(golden_config()).text, FULL, shape)


@pytest.mark.parametrize("config", [golden_config(), released_config(), small_config()])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("numerics", [FULL, ROUNDED, PACKED])
def test_layers_of_a_block_never_overlap(config, block_size, numerics):
    text = parse_config(config).text
    sizes = RowSizes.of(text, numerics)
    layout = BlockLayout.of(text, block_size, sizes)
    kv, index = sizes.entry, 1 if sizes.packed else sizes.index
    used = []
    for layer in text.kv_source_layer_ids:
        entries = block_size // text.ratio(layer)
        first = layout.index_offset[layer] * index
        used.append((layout.kv_offset[layer] * kv, (layout.kv_offset[layer] + entries) * kv))
        used.append((first, first + entries * sizes.index))
    used.sort()
    assert used[0][0] == 0
    assert used[-1][1] <= layout.block_bytes
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(used))
    assert layout.block_bytes == layout.kv_stride * kv == layout.index_stride * index


def test_released_pages_have_the_documented_sizes():
    text = parse_config(released_config()).text
    assert block_bytes(text, FULL, 128) == 819_200
    assert block_bytes(text, ROUNDED, 128) == 409_600
    assert block_bytes(text, PACKED, 128) == 114_048
    layout = BlockLayout.of(text, 128, RowSizes.of(text, PACKED))
    used = max(layout.index_offset[layer] + layout.entries[layer] * 68 for layer in layout.entries)
    assert used == 128 * 890 == 113_920


def test_released_window_state_has_the_documented_size():
    text = parse_config(released_config()).text
    cache = KVCache(text, ROUNDED, CacheShape(block_size=128, num_blocks=2, num_state_slots=2, backtracking_tokens=6, keep_tokens=140))
    assert cache.state_bytes == 2_621_440
    packed = KVCache(text, PACKED, CacheShape(block_size=128, num_blocks=2, num_state_slots=2, backtracking_tokens=6, keep_tokens=140))
    assert packed.state_bytes == 1_351_680
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


def test_window_of_a_model_without_encoder_layers_is_empty():
    text = parse_config(excerpt([20, 21], stages=0)).text
    cache = KVCache(text, FULL, CacheShape(block_size=128, num_blocks=2, num_state_slots=3, backtracking_tokens=6))
    assert (cache.num_encoder_layers, cache.state_bytes) == (0, 0)
    out = torch.empty(0, dtype=torch.uint8)
    cache.save_window(1, 200, out)
    cache.load_window(2, 200, out)


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


def test_taps_of_every_slot_have_their_room_from_the_start():
    text = parse_config(golden_config()).text
    taps = golden_cache(num_draft_stages=text.num_stages).taps
    assert taps is not None
    assert taps.dtype is torch.float32
    assert taps.shape == (3, text.sliding_window + text.dspark_block_size + 1, len(text.dspark_target_layer_ids) * text.hidden_size)
    assert golden_cache().taps is None
    assert KVCache(text, ROUNDED, CacheShape(16, 5, 3, 5, num_draft_stages=text.num_stages)).taps is None


def test_format_names_what_decides_the_bytes():
    text = parse_config(golden_config()).text
    shape = CacheShape(block_size=16, num_blocks=2, num_state_slots=2, backtracking_tokens=5)
    ids = {KVCache(text, Numerics.of(p), shape).format_id for p in Precision}
    ids |= {KVCache(text, n, shape).format_id for n in (PACKED, PACKED_FP32)}
    # B and R store the same bytes.
    assert len(ids) == 5
    other = parse_config(golden_config() | {"text_config": golden_config()["text_config"] | {"rope_theta": 20000}}).text
    assert KVCache(other, FULL, shape).format_id not in ids


@pytest.mark.parametrize("numerics", [PACKED, PACKED_FP32])
def test_packed_entries_and_keys_read_back_as_their_round_trips(numerics):
    text = parse_config(golden_config()).text
    shape = CacheShape(block_size=16, num_blocks=5, num_state_slots=3, backtracking_tokens=5)
    packed, plain = (KVCache(text, n, shape) for n in (numerics, Numerics(numerics.dtype, False, True)))
    block, place = torch.tensor([3, 1, 3, 4]), torch.tensor([0, 7, 5, 2])
    entries = torch.randn(4, text.head_dim, dtype=numerics.dtype)
    weight = torch.randn(text.index_head_dim, text.head_dim, dtype=numerics.dtype) * text.head_dim**-0.5
    still = torch.ones(4, 1, dtype=torch.complex64)
    for cache in (packed, plain):
        cache.blocks.zero_()
    for layer in text.kv_source_layer_ids:
        ones = [torch.full((width,), layer + 1.0, dtype=numerics.dtype) for width in (text.head_dim, text.index_head_dim)]
        rows = packed.entry_rows(layer, block, place)
        keys = IndexKeys(weight, ones[1], packed.index_places(layer, block, place))
        compress_entries(entries, None, ones[0], 1e-20, still, packed.kv_rows, rows, keys)
        latent = rms_norm(entries, ones[0], 1e-20)
        plain.store_entries(layer, block, place, latent, rms_norm(latent @ weight.T, ones[1], 1e-20))
    table = torch.tensor([[3, 1], [4, 2]])
    for layer in text.kv_source_layer_ids:
        rows = [c.kv_rows[block * c.layout.kv_stride + place + c.layout.kv_offset[layer]] for c in (packed, plain)]
        assert torch.equal(unpack_entry_rows(rows[0], numerics.dtype), rows[1])
        assert torch.equal(packed.index_keys(layer, table, 15), plain.index_keys(layer, table, 15))


def test_packed_window_survives_a_round_trip_between_slots():
    text = parse_config(golden_config()).text
    shape = CacheShape(block_size=16, num_blocks=2, num_state_slots=3, backtracking_tokens=5)
    cache = KVCache(text, PACKED, shape)
    keys = torch.randn(cache.ring_rows, text.head_dim, dtype=torch.bfloat16)
    cache.rings[:, cache.ring_rows : 2 * cache.ring_rows] = cache.window_rows(keys)
    out = torch.empty(cache.state_bytes, dtype=torch.uint8)
    cache.save_window(1, 40, out)
    cache.load_window(2, 40, out)
    rows = torch.arange(24, 40) % cache.ring_rows
    moved = cache.rings[: cache.num_encoder_layers, 2 * cache.ring_rows + rows]
    assert torch.equal(unpack_window_rows(moved[0], torch.bfloat16), q8(keys[rows]))
    assert torch.equal(moved, cache.rings[: cache.num_encoder_layers, cache.ring_rows + rows])
