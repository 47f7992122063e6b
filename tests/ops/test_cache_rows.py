import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.cache_rows import (
    entry_row_bytes,
    index_row_bytes,
    pack_entry_rows,
    pack_index_rows,
    pack_window_rows,
    unpack_entry_rows,
    unpack_index_rows,
    unpack_window_rows,
    window_row_bytes,
)
from engine.ops.q4_index import q4_index
from engine.ops.q4_kv import q4_kv
from engine.ops.q8 import q8

FORMATS = [
    (pack_window_rows, unpack_window_rows, q8, window_row_bytes),
    (pack_entry_rows, unpack_entry_rows, q4_kv, entry_row_bytes),
    (pack_index_rows, unpack_index_rows, q4_index, index_row_bytes),
]


def test_released_rows_have_the_documented_sizes():
    assert (window_row_bytes(512), entry_row_bytes(512), index_row_bytes(128)) == (528, 288, 68)


@pytest.mark.parametrize(("pack", "unpack", "round_trip", "size"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-6, 1e4, 0.0])
def test_a_packed_row_unpacks_to_the_round_trip(pack, unpack, round_trip, size, dtype, magnitude):
    torch.manual_seed(0)
    x = (torch.randn(3, 5, 64) * magnitude).to(dtype)
    rows = pack(x)
    assert rows.shape == (3, 5, size(64))
    assert torch.equal(unpack(rows, dtype), round_trip(x))
    assert pack(x[:0]).shape == (0, 5, size(64))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e4, 1e4, width=16), min_size=32, max_size=32))
def test_packing_a_rounded_row_again_changes_nothing(values):
    """Restored and recomputed rows must be the same bytes' numbers."""
    x = torch.tensor(values)[None]
    for pack, unpack, _, _ in FORMATS[::2]:
        once = unpack(pack(x), torch.float32)
        assert torch.equal(unpack(pack(once), torch.float32), once)


def test_the_even_element_is_the_low_nibble():
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6.0, -3.0
    assert pack_entry_rows(x)[0, 0].item() == 0x7 | 0xD << 4


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 300.0, 1e-20, 0.0])
def test_kernels_pack_the_same_bytes(device, number, dtype, magnitude):
    from engine.ops.triton.cache_rows import pack_entries, pack_index, pack_window

    torch.manual_seed(number)
    x = torch.randn(5, 3, 64) * magnitude * torch.logspace(-3, 3, 15).view(5, 3, 1)
    # Ties of every format, both signs, and both zeros.
    x[0, 0, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, -0.0, -0.25, -0.75, -1.25, -2.5, -5.0, -6.0])
    x[0, 1] = torch.tensor([448.0, 416.0, 432.0, 440.0, 17.0, 19.0, 2.0**-9, 3 * 2.0**-10]).repeat(8)
    reference, kernel = [(pack_window_rows, pack_window), (pack_entry_rows, pack_entries), (pack_index_rows, pack_index)][number]
    x = x.to(dtype).to(device)
    assert torch.equal(kernel(x), reference(x))
    assert kernel(x[:0]).shape == reference(x[:0]).shape
