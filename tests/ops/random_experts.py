"""Packed experts for tests: normal weights of deviation 1/sqrt(columns), through our own quantisers."""

import torch

from engine.ops.packed_experts import PackedExperts
from engine.ops.packed_weights import Format, PackedWeights, pack_fp8, pack_gate_up
from engine.ops.weight_formats import encode_fp4_rows, encode_fp8_blocks


def random_experts(num, inner, hidden, device="cpu"):
    """`num` routed experts in FP4 and the shared one in FP8."""

    def draw(encode, rows, columns):
        return encode(torch.randn(rows, columns, device=device) * columns**-0.5)

    w13 = PackedWeights.empty(Format.FP4, num, 2 * inner, hidden, device)
    w2 = PackedWeights.empty(Format.FP4, num, hidden, inner, device)
    for e in range(num):
        both = pack_gate_up(draw(encode_fp4_rows, inner, hidden), draw(encode_fp4_rows, inner, hidden), Format.FP4)
        w13.codes[e], w13.scales[e] = both.codes[0], both.scales[0]
        w2.fill(e, *draw(encode_fp4_rows, hidden, inner))
    shared = pack_gate_up(draw(encode_fp8_blocks, inner, hidden), draw(encode_fp8_blocks, inner, hidden), Format.FP8)
    return PackedExperts(w13, w2, shared, pack_fp8(*draw(encode_fp8_blocks, hidden, inner)))
