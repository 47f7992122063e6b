"""The kernels of the n-gram tables against their references."""

import pytest
import torch

from engine.models.engram_tables import bucket_primes, column_offsets, hash_multipliers
from engine.ops.engram_gate import ENGRAM_GATE
from engine.ops.engram_gather import ENGRAM_GATHER
from engine.ops.engram_hash import DEAD, ENGRAM_HASH
from engine.ops.weight_formats import encode_table_rows


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def launch_of(op):
    from importlib import import_module

    return import_module(f"engine.ops.triton.{op}").launch


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_rows_of_the_released_tables(device, rows):
    primes = bucket_primes((1, 14), 4, 8, 16_000_000)[1]
    tables = torch.tensor(hash_multipliers(14, 4, 99092)), torch.tensor(primes).view(3, 8), torch.tensor(column_offsets(primes)).view(3, 8)
    grams = torch.randint(0, 99092, (rows, 4))
    grams[torch.rand(rows, 4) < 0.3] = DEAD
    got = launch_of("engram_hash")(grams.to(device), *(t.to(device) for t in tables), 7)
    assert torch.equal(got.cpu(), ENGRAM_HASH.reference(grams, *tables, 7))


def test_a_head_count_that_is_no_power_of_two(device):
    primes = torch.tensor([[97, 101, 103], [107, 109, 113]])
    offsets, grams = primes.cumsum(1), torch.randint(0, 500, (5, 3))
    multipliers = torch.tensor(hash_multipliers(1, 3, 512))
    got = launch_of("engram_hash")(grams.to(device), multipliers.to(device), primes.to(device), offsets.to(device), 2)
    assert torch.equal(got.cpu(), ENGRAM_HASH.reference(grams, multipliers, primes, offsets, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_are_decoded_exactly(device, dtype):
    table, scale = encode_table_rows(torch.randn(40, 64))
    table[3, :32] = torch.arange(32, dtype=torch.uint8).view(torch.float8_e4m3fn)  # zero and all subnormal numbers of both signs ...
    table[4, :32] = torch.arange(128, 160, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale[5, 0], scale[5, 1] = 0 if dtype == torch.float32 else 12, 240  # ... and scales as far as the values are exact
    rows = torch.randint(0, 40, (7, 3))
    rows[0] = torch.tensor([3, 4, 5])
    if device == "cuda":
        got = launch_of("engram_gather")(rows.cuda(), table.pin_memory(), scale.pin_memory(), dtype).cpu()
    else:
        got = launch_of("engram_gather")(rows, table, scale, dtype)
    want = ENGRAM_GATHER.reference(rows, table, scale, dtype)
    assert torch.equal(got, want)


def test_tables_that_no_kernel_reads_fall_back_aloud(device, caplog):
    table = torch.randn(10, 4).bfloat16()
    rows = torch.tensor([[3, 9], [0, 3]])
    got = launch_of("engram_gather")(rows.to(device), table, None, torch.float32)
    assert torch.equal(got.cpu(), table[rows].float().flatten(1))
    assert "engram_gather falls back to its reference" in caplog.text


@pytest.mark.parametrize(("rows", "width"), [(0, 32), (1, 32), (5, 80)])
def test_gated_streams(device, rows, width):
    h, kv, weight = torch.randn(rows, 4, width), torch.randn(rows, 5 * width), torch.randn(4, width)
    if rows:
        h[0, 1] = 0
        kv[0, 2 * width : 3 * width] = 0  # a dot product of zero
    got = launch_of("engram_gate")(h.to(device), kv.to(device), weight.to(device), 1e-20).cpu()
    want = ENGRAM_GATE.reference(h, kv, weight, 1e-20)
    assert got.shape == want.shape
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_nan_stays_in_its_stream(device):
    h, kv, weight = torch.randn(2, 4, 32), torch.randn(2, 160), torch.randn(4, 32)
    h[1, 2, 5] = float("nan")
    got = launch_of("engram_gate")(h.to(device), kv.to(device), weight.to(device), 1e-20).cpu()
    assert got[1, 2].isnan().all()
    assert got.isnan().sum() == 32
