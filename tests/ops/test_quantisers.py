import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.number_formats import (
    E2M1_VALUES,
    ceil_power_of_two,
    e2m1_codes,
    e2m1_values,
    e8m0_values,
    pack_e2m1,
    round_e2m1,
    round_e4m3,
    unpack_e2m1,
)
from engine.ops.q4_index import q4_index
from engine.ops.q4_kv import q4_kv
from engine.ops.q8 import q8
from engine.ops.weight_formats import (
    decode_fp4_rows,
    decode_fp8_blocks,
    decode_table_rows,
    encode_fp4_rows,
    encode_fp8_blocks,
    encode_table_rows,
)

E4M3 = sorted({abs(v) for v in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist() if not math.isnan(v)})


def nearest(x, grid, even):
    """The nearest grid value by trying all of them; on a tie the one with an even mantissa (`even[i]`)."""
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(x)), not even[i]))
    return math.copysign(grid[best], x)


@settings(deadline=None, max_examples=200)
@given(st.floats(-500, 500, width=32))
def test_e4m3_rounds_to_the_nearest_value_and_saturates(x):
    clamped = max(-448.0, min(448.0, x))
    assert round_e4m3(torch.tensor(x)).float().item() == nearest(clamped, E4M3, [i % 2 == 0 for i in range(len(E4M3))])


@settings(deadline=None, max_examples=200)
@given(st.floats(-10, 10, width=32))
def test_e2m1_rounds_to_the_nearest_value_and_saturates(x):
    clamped = max(-6.0, min(6.0, x))
    assert round_e2m1(torch.tensor(x)).item() == nearest(clamped, E2M1_VALUES, [i % 2 == 0 for i in range(8)])


def test_e2m1_ties_go_where_the_release_puts_them():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])
    assert round_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, -2]


def test_e2m1_codes_and_nibbles_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1_codes(e2m1_values(codes)), codes)
    assert torch.equal(unpack_e2m1(pack_e2m1(codes)), codes)
    assert pack_e2m1(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21]


def test_scales_are_powers_of_two_rounded_up():
    x = torch.tensor([1.0, 1.0001, 0.75, 2.0**-126, 3e38])
    assert e8m0_values(ceil_power_of_two(x)).tolist()[:4] == [1.0, 2.0, 1.0, 2.0**-126]
    assert e8m0_values(torch.tensor([0, 127, 254], dtype=torch.uint8)).tolist() == [2.0**-127, 1.0, 2.0**127]


def test_documented_scale_examples():
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 1] = 3.0, 3 * 2.0**-11
    # Scale 2^-7: the smallest step near zero is 2^-9 * 2^-7.
    assert q8(row)[0, 1] == torch.round(row[0, 1] * 2**16) / 2**16
    assert q4_index(torch.tensor([[3.0, 0.3] + [0.0] * 30]))[0, :2].tolist() == [3.0, 0.25]
    assert q4_kv(torch.tensor([[1.0, 0.1] + [0.0] * 14]))[0, 0].item() == 6 * 0.171875


@pytest.mark.parametrize("quantiser", [q8, q4_kv, q4_index])
def test_zero_rows_stay_zero_and_results_are_exact_in_bf16(quantiser):
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 7)[:, None]
    x[3] = 0
    y = quantiser(x)
    assert (y[3] == 0).all()
    assert torch.equal(y.bfloat16().float(), y)
    assert quantiser(x.bfloat16()).dtype == torch.bfloat16
    assert quantiser(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("quantiser", [q8, q4_index])
def test_power_of_two_round_trips_are_stable(quantiser):
    y = quantiser(torch.randn(5, 64, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(quantiser(y), y)


@pytest.mark.parametrize("quantiser", [q8, q4_kv, q4_index])
def test_rows_are_independent(quantiser):
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(quantiser(x)[4:5], quantiser(x[4:5]))


@pytest.mark.parametrize("shape", [(32, 32), (33, 40), (5, 7), (64, 96)])
def test_fp8_blocks_of_any_size_keep_their_values(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 10
    codes, scale = encode_fp8_blocks(w)
    assert scale.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    once = decode_fp8_blocks(codes, scale, torch.float32)
    assert torch.equal(decode_fp8_blocks(*encode_fp8_blocks(once), torch.float32), once)
    assert (once - w).abs().max() <= w.abs().max() / 16
    assert torch.equal(decode_fp8_blocks(codes, scale, torch.bfloat16).float(), once)


@pytest.mark.parametrize(("encode", "decode"), [(encode_fp4_rows, decode_fp4_rows), (encode_table_rows, decode_table_rows)])
def test_row_formats_keep_their_values(encode, decode):
    w = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    w[2] = 0
    codes, scale = encode(w)
    assert scale.shape == (5, 2)
    once = decode(codes, scale, torch.float32)
    assert torch.equal(decode(*encode(once), torch.float32), once)
    assert torch.equal(decode(codes, scale, torch.bfloat16).float(), once)


def test_fp4_even_column_is_the_low_nibble():
    packed = torch.zeros(1, 16, dtype=torch.int8)
    packed[0, 0] = 0x71  # low nibble 1 (0.5), high nibble 7 (6.0)
    packed[0, 1] = -128  # byte 0x80: low 0, high 8 (minus zero)
    scale = torch.tensor([[128]], dtype=torch.uint8)
    assert decode_fp4_rows(packed, scale, torch.float32)[0, :3].tolist() == [1.0, 12.0, 0.0]
