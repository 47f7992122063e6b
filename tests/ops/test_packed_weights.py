"""Packing moves bits and changes no value."""

import pytest
import torch

from engine.errors import ConfigError
from engine.ops.packed_weights import Format, PackedWeights, pack_fp4, pack_fp8, pack_gate_up, split_gate_up, unpack
from engine.ops.weight_formats import decode_fp4_rows, decode_fp8_blocks, encode_fp4_rows, encode_fp8_blocks

FORMATS = {
    Format.FP4: (encode_fp4_rows, decode_fp4_rows, pack_fp4),
    Format.FP8: (encode_fp8_blocks, decode_fp8_blocks, pack_fp8),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("shape", [(16, 256), (1, 32), (40, 96), (64, 512), (24, 288)])
def test_unpacked_weights_are_the_decoded_ones(format, shape):
    encode, decode, pack = FORMATS[format]
    stored = encode(torch.randn(shape))
    packed = pack(*stored)
    assert torch.equal(unpack(packed, 0, torch.bfloat16), decode(*stored, torch.bfloat16))
    assert (packed.rows, packed.columns) == shape


@pytest.mark.parametrize("format", Format)
def test_gate_and_up_of_a_channel_share_a_tile(format):
    encode, decode, _ = FORMATS[format]
    gate, up = encode(torch.randn(40, 96)), encode(torch.randn(40, 96) * 0.01)
    both = unpack(pack_gate_up(gate, up, format), 0, torch.bfloat16)
    assert torch.equal(both[:8], decode(*gate, torch.bfloat16)[:8])
    assert torch.equal(both[8:16], decode(*up, torch.bfloat16)[:8])
    for got, want in zip(split_gate_up(both), (gate, up), strict=True):
        assert torch.equal(got, decode(*want, torch.bfloat16))


def test_a_layer_is_filled_matrix_by_matrix():
    stored = [encode_fp4_rows(torch.randn(32, 64)) for _ in range(3)]
    layer = PackedWeights.empty(Format.FP4, 3, 32, 64, "cpu")
    for group, matrix in enumerate(stored):
        layer.fill(group, *matrix)
    for group, matrix in enumerate(stored):
        assert torch.equal(unpack(layer, group, torch.float32), decode_fp4_rows(*matrix, torch.float32))


def test_every_code_survives_with_every_scale_that_fits():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)[None].expand(129, -1).contiguous()  # both nibbles take all values
    scale = torch.arange(129, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    assert torch.equal(unpack(pack_fp4(codes, scale), 0, torch.float32), decode_fp4_rows(codes, scale, torch.float32))


@pytest.mark.parametrize(("format", "byte"), [(Format.FP4, 129), (Format.FP8, 135)])
def test_a_scale_that_no_factor_expresses_is_refused(format, byte):
    encode, _, pack = FORMATS[format]
    values, scale = encode(torch.randn(32, 32))
    scale[0, 0] = byte
    with pytest.raises(ConfigError, match=rf"2\^{byte - 127} is above 2\^{byte - 128}"):
        pack(values, scale)
