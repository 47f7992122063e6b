import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.exchange_rows import ADD_RANK_SUMS, LOCAL_CHOICES, PACK_ROWS, add_rank_sums, local_choices, pack_rows, row_words

EXPERTS, COPIES = 7, 3


@pytest.fixture
def kernels(device):
    from engine.ops.triton import exchange_rows

    return exchange_rows


def make_rows(count: int, columns: int, chosen: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """x, ids, weights, slots and copies; the expert's slots beyond its copies are -1."""
    torch.manual_seed(count)
    copies = torch.randint(1, COPIES + 1, (EXPERTS,))
    slots = torch.arange(EXPERTS * COPIES).view(EXPERTS, COPIES).masked_fill(torch.arange(COPIES) >= copies[:, None], -1)
    parts = torch.randn(count, columns).to(dtype), torch.randint(0, EXPERTS, (count, chosen)), torch.randn(count, chosen), slots, copies
    return tuple(part.to(device) for part in parts)


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(0, 6),
    padding=st.integers(0, 3),
    chosen=st.integers(1, 6),
    turn=st.integers(0, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_row_arrives_as_it_left(count, padding, chosen, turn, dtype):
    x, ids, weights, slots, copies = make_rows(count, 10, chosen, dtype)
    real = torch.arange(count) % 3 != 1
    rows = pack_rows(x, ids, weights, slots, copies, real, turn, count + padding)
    width, words = row_words(x, chosen)
    assert rows.shape == (count + padding, words)
    assert words % 4 == 0
    assert torch.equal(rows[:count, :width].contiguous().view(dtype), x)
    first, owned = EXPERTS, EXPERTS
    local, arrived = local_choices(rows, width, chosen, first, owned)
    assert torch.equal(arrived[:count], weights)
    wanted = [
        [int(slots[e, (turn + row) % int(copies[e])]) if real[row] else -1 for e in ids[row].tolist()] for row in range(count)
    ] + padding * [chosen * [-1]]
    assert local.tolist() == [[slot - first if first <= slot < first + owned else -1 for slot in row] for row in wanted]


def test_sums_are_added_in_rank_order_in_fp32_and_rounded_once():
    returned = torch.tensor([2.0**24, 1.0, -(2.0**24), 0.25]).view(4, 1, 1)
    assert add_rank_sums(returned, torch.ones(1, 1)).item() == 1.25, "1 is lost behind 2**24"
    halves = torch.tensor([1.0, 2.0**-9, 2.0**-9]).view(3, 1, 1).bfloat16()
    assert add_rank_sums(halves, torch.tensor([[2.0**-8]]).bfloat16()).item() == 1 + 2.0**-7
    assert torch.equal(add_rank_sums(-torch.zeros(2, 3, 4), -torch.zeros(2, 4)).signbit(), torch.zeros(2, 4, dtype=torch.bool))


def test_arguments_that_break_the_contract_are_refused():
    x, ids, weights, slots, copies = make_rows(3, 10, 2, torch.float32)
    with pytest.raises(ValueError, match="pack_rows"):
        pack_rows(x, ids, weights, slots, copies, None, 0, 2)
    with pytest.raises(ValueError, match="local_choices"):
        local_choices(torch.zeros(2, 8, dtype=torch.int32)[:, :6], 4, 1, 0, 1)
    with pytest.raises(ValueError, match="add_rank_sums"):
        add_rank_sums(torch.zeros(2, 2, 8), torch.zeros(3, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "capacity", "columns", "chosen"), [(0, 3, 16, 2), (1, 1, 64, 6), (5, 8, 2600, 6), (4, 4, 10, 3)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_kernel_packs_the_same_words(kernels, device, dtype, count, capacity, columns, chosen, padded):
    parts = make_rows(count, columns, chosen, dtype, device)
    real = torch.arange(count, device=device) % 2 == 0 if padded else None
    assert torch.equal(kernels.pack(*parts, real, 2, capacity), PACK_ROWS.reference(*parts, real, 2, capacity))


@pytest.mark.parametrize(("count", "chosen"), [(0, 2), (1, 1), (5, 6), (300, 3)])
def test_the_kernel_finds_the_same_choices(kernels, device, count, chosen):
    torch.manual_seed(count)
    rows = torch.randint(-1, 20, (count, 24), dtype=torch.int32, device=device)
    rows[:, 8 + chosen :] = torch.randn(count, 16 - chosen, device=device).view(torch.int32)
    for first in (0, 8):
        got, wanted = kernels.choices(rows, 8, chosen, first, 8), LOCAL_CHOICES.reference(rows, 8, chosen, first, 8)
        assert all(torch.equal(one, two) for one, two in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("ranks", "capacity", "count", "columns"), [(1, 1, 1, 16), (2, 8, 8, 1500), (2, 3, 2, 48), (5, 4, 0, 16), (8, 2, 2, 64)]
)
@pytest.mark.parametrize("gathered", [False, True])
def test_the_kernel_adds_up_the_same_bits(kernels, device, dtype, ranks, capacity, count, columns, gathered):
    """gathered: a rank's rows among everybody's."""
    torch.manual_seed(ranks)
    everything = (torch.randn(ranks, ranks, capacity, columns, device=device) * 30).to(dtype)
    returned = everything[:, ranks - 1] if gathered else everything[:, 0].contiguous()
    shared = torch.randn(count, columns, device=device).to(dtype)
    wanted = ADD_RANK_SUMS.reference(returned, shared)
    if device == "cpu":  # the interpreter cuts bf16 off where the GPU rounds
        exact = ADD_RANK_SUMS.reference(returned.float(), shared.float())
        wanted = (exact.view(torch.int32) >> 16 << 16).view(torch.float32).to(dtype) if dtype == torch.bfloat16 else exact
    assert torch.equal(kernels.add(returned, shared), wanted)
