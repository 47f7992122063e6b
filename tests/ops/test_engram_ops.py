import torch

from engine.models.engram_tables import bucket_primes, column_offsets, hash_multipliers
from engine.ops.engram_gate import engram_gate
from engine.ops.engram_gather import engram_gather
from engine.ops.engram_hash import DEAD, engram_hash
from engine.ops.weight_formats import decode_table_rows, encode_table_rows


def released(layer):
    primes = dict(zip((1, 14), bucket_primes((1, 14), 4, 8, 16_000_000), strict=True))[layer]
    return torch.tensor(hash_multipliers(layer, 4, 99092)), torch.tensor(primes).view(3, 8), torch.tensor(column_offsets(primes)).view(3, 8)


def test_published_hash_rows():
    row = engram_hash(torch.tensor([[1000, 2000, 3000, 4000]]), *released(1), 7)[0]
    assert [row[i].item() for i in (0, 7, 8, 16, 23)] == [2490620, 122161697, 141932547, 264700880, 375488643]
    row = engram_hash(torch.tensor([[1000, 2000, 3000, 4000]]), *released(14), 7)[0]
    assert [row[i].item() for i in (0, 23)] == [13209604, 372276798]


def test_blocking_reaches_all_older_tokens():
    row = engram_hash(torch.tensor([[1000, 2000, DEAD, 4000]]), *released(1), 7)[0]
    assert row[16].item() == 267991481
    start = engram_hash(torch.tensor([[5, DEAD, DEAD, DEAD], [DEAD, 1, 2, 3]]), *released(1), 7)
    assert torch.equal(start[0], engram_hash(torch.tensor([[5, 7, 7, 7]]), *released(1), 7)[0])
    assert torch.equal(start[1], engram_hash(torch.tensor([[7, 7, 7, 7]]), *released(1), 7)[0])


def test_gathered_rows_are_decoded():
    table, scale = encode_table_rows(torch.randn(10, 32, generator=torch.Generator().manual_seed(0)))
    rows = torch.tensor([[3, 9], [0, 3]])
    want = decode_table_rows(table, scale, torch.float32)[rows].flatten(1)
    assert torch.equal(engram_gather(rows, table, scale, torch.float32), want)
    plain = torch.randn(10, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(engram_gather(rows, plain, None, torch.float32), plain[rows].float().flatten(1))


def test_gate_of_orthogonal_streams_is_almost_a_half():
    h = torch.zeros(1, 2, 4)
    h[0, :, 0] = 1
    kv = torch.tensor([[0, 1.0, 0, 0, 0, 1.0, 0, 0, 8, 8, 8, 8]])
    added = engram_gate(h, kv, torch.ones(2, 4), 1e-20) - h
    assert torch.allclose(added, torch.full((1, 2, 4), 8 * torch.sigmoid(torch.tensor(0.001)).item()))


def test_gate_follows_the_explicit_formula():
    g = torch.Generator().manual_seed(2)
    h, kv, weight = (torch.randn(s, generator=g) for s in ((3, 4, 16), (3, 80), (4, 16)))
    got = engram_gate(h, kv, weight, 1e-20)
    for t in range(3):
        for i in range(4):
            key, value = kv[t, 16 * i : 16 * i + 16], kv[t, 64:]
            dot = (h[t, i] * weight[i] * key).sum() * h[t, i].square().mean().rsqrt() * key.square().mean().rsqrt() * 16**-0.5
            gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
            assert torch.allclose(got[t, i], h[t, i] + gate * value, atol=1e-5)
