"""Unit-level pairs computed by independent code, bit for bit where its notes say so."""

import pytest
import torch
from safetensors.torch import load_file

from engine.models.engram_tables import bucket_primes, column_offsets, hash_multipliers, token_map
from engine.models.numerics import Linear
from engine.ops.candidate_blocks import candidate_blocks
from engine.ops.engram_hash import DEAD, engram_hash
from engine.ops.hyper_mixes import hyper_mixes, spread_scale
from engine.ops.number_formats import pack_e2m1
from engine.ops.q4_index import q4_index, q4_index_codes
from engine.ops.q4_kv import q4_kv, q4_kv_codes
from engine.ops.q8 import q8, q8_codes
from engine.ops.rope import plain_frequencies, rotation, yarn_frequencies
from engine.ops.sparse_attention import Selection, sparse_attention
from engine.ops.weight_formats import decode_fp4_rows, decode_fp8_blocks
from tests.models.tiny_configs import GOLDEN


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "components.safetensors")


def within_one_ulp_of_row_maximum(ours, theirs):
    """bf16 results may differ by one step of the largest element of their row."""
    largest = theirs.float().abs().amax(-1, keepdim=True)
    ulp = torch.exp2(largest.clamp(min=2.0**-100).log2().floor() - 7)
    return bool(((ours.float() - theirs.float()).abs() <= ulp).all())


def test_window_key_quantiser(golden):
    codes, scale = q8_codes(golden["quant.x"])
    assert torch.equal(codes.view(torch.uint8), golden["quant.fp8.codes_u8"])
    assert torch.equal(scale, golden["quant.fp8.scale_e8m0_u8"])
    assert torch.equal(q8(golden["quant.x"]), golden["quant.fp8.dequant"])


def test_compressed_entry_quantiser(golden):
    codes, scale = q4_kv_codes(golden["quant.x"])
    assert torch.equal(pack_e2m1(codes), golden["quant.kvfp4.packed_u8"])
    assert torch.equal(scale.view(torch.uint8), golden["quant.kvfp4.scale_e4m3_u8"])
    assert torch.equal(q4_kv(golden["quant.x"]), golden["quant.kvfp4.dequant"])


def test_index_quantiser(golden):
    codes, scale = q4_index_codes(golden["quant.x"])
    assert torch.equal(pack_e2m1(codes), golden["quant.mxfp4.packed_u8"])
    assert torch.equal(scale, golden["quant.mxfp4.scale_e8m0_u8"])
    assert torch.equal(q4_index(golden["quant.x"]), golden["quant.mxfp4.dequant"])


def test_hyper_connection_split(golden):
    pre, post, comb = hyper_mixes(golden["hc.mixes"], spread_scale(golden["hc.scale"], 4), golden["hc.base"], 20, 1e-6)
    for name, ours in (("pre", pre), ("post", post), ("comb", comb)):
        assert (ours - golden[f"hc.{name}"]).abs().max() <= 1e-6, name


def test_attention_with_sink(golden):
    selection = Selection.of(golden["attn.idx"][0].long())
    q, kv = golden["attn.q"][0], golden["attn.kv"][0]
    exact = sparse_attention(q.float(), [(kv.float(), selection)], golden["attn.sink"], q.shape[-1] ** -0.5)
    assert (exact - golden["attn.out_fp32"][0]).abs().max() <= 1e-6
    assert (exact[2] == 0).all()
    rounded = sparse_attention(q, [(kv, selection)], golden["attn.sink"], q.shape[-1] ** -0.5)
    assert within_one_ulp_of_row_maximum(rounded, golden["attn.out_bf16"][0])


def test_candidate_blocks(golden):
    count = golden["cand.lens"][:, 0].long()
    scores = golden["cand.logits"][0].masked_fill(torch.arange(45) >= count[:, None], float("-inf"))
    kept = candidate_blocks(scores, count, 3, 8).repeat_interleave(8, 1)[:, :45]
    assert torch.equal(kept, golden["cand.mask_blocks3_size8"][0].bool())


def test_fp8_product(golden):
    weight = decode_fp8_blocks(golden["gemm.fp8.w_u8"].view(torch.float8_e4m3fn), golden["gemm.fp8.s_u8"], torch.bfloat16)
    assert within_one_ulp_of_row_maximum(Linear(weight, quantize_input=True)(golden["gemm.a"]), golden["gemm.fp8.y"])


def test_fp4_product(golden):
    weight = decode_fp4_rows(golden["gemm.fp4.w_i8"], golden["gemm.fp4.s_u8"], torch.bfloat16)
    assert within_one_ulp_of_row_maximum(Linear(weight, quantize_input=True)(golden["gemm.a"]), golden["gemm.fp4.y"])


def test_rotary_tables_of_the_release(golden):
    for name, frequencies in (("plain", plain_frequencies(64, 10000.0)), ("compress", yarn_frequencies(64, 160000.0, 16, 32, 1, 65536))):
        table = rotation(golden[f"rope.{name}.positions"], frequencies)
        assert (table.real - golden[f"rope.{name}.cos"]).abs().max() <= 1e-6
        assert (table.imag - golden[f"rope.{name}.sin"]).abs().max() <= 1e-6


def test_hash_constants_of_the_release(golden):
    primes = bucket_primes((1, 14), 4, 8, 16_000_000)
    assert torch.equal(torch.tensor(primes).view(2, 3, 8), golden["hash.primes"])
    assert torch.equal(torch.tensor([column_offsets(p) for p in primes]), golden["hash.offsets"])
    assert torch.equal(torch.tensor([hash_multipliers(layer, 4, 99092) for layer in (1, 14)]), golden["hash.multipliers"])


@pytest.mark.parametrize("masked", [False, True])
def test_hash_rows_of_the_release(golden, masked):
    ids = golden["hash.compressed_ids"].clone()
    if masked:
        ids[golden["hash.token_mask_u8"] == 0] = DEAD
    padded = torch.cat((torch.full((3,), DEAD), ids))
    grams = padded.unfold(0, 4, 1).flip(1)
    for layer in range(2):
        primes, offsets = golden["hash.primes"][layer], golden["hash.offsets"][layer].view(3, 8)
        rows = engram_hash(grams, golden["hash.multipliers"][layer], primes, offsets, 2)
        assert torch.equal(rows, golden["hash.rows_masked" if masked else "hash.rows"][:, layer])


def test_token_map_of_the_tiny_tokenizer(golden):
    assert token_map(GOLDEN / "tiny-a-fp8", 512, 430) == golden["tiny.token_map"].tolist()
