import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.index_search import ascending
from engine.ops.select_topk import SELECT_TOPK

INF = float("inf")


@pytest.fixture
def module(device, monkeypatch):
    import engine.ops.triton.select_topk as module

    return module


def agrees(module, device, scores, k, count=None):
    scores = scores.to(device)
    hidden = scores.clone()
    if count is not None:
        count = torch.tensor(count, device=device)
        hidden[torch.arange(scores.shape[1], device=device) >= count[:, None]] = -INF
    got = module.select_rows(scores, k, count)
    return torch.equal(got, ascending(SELECT_TOPK.reference(hidden, k)))


@pytest.mark.parametrize("columns", [1, 7, 64, 300])
@pytest.mark.parametrize("k", [1, 5, 64])
def test_kernel_picks_the_set_of_the_reference_in_ascending_order(module, device, columns, k):
    torch.manual_seed(columns)
    assert agrees(module, device, torch.randn(3, columns), k)


def test_ties_go_to_the_lower_index_across_chunks(module, device, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 32)
    scores = torch.randint(0, 3, (4, 150)).float()
    for k in (1, 7, 16):
        assert agrees(module, device, scores, k)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, INF, -INF]), min_size=1, max_size=20), st.integers(1, 8))
def test_signs_zeros_and_extremes_are_ordered_as_numbers(values, k):
    import engine.ops.triton.select_topk as module

    assert agrees(module, "cuda" if torch.cuda.is_available() else "cpu", torch.tensor([values]), k)


def test_what_lies_behind_a_row_s_count_is_never_picked(module, device, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)
    scores = torch.randn(5, 200)
    scores[1, 3:] = INF
    scores[4, 100:] = float("nan")
    assert agrees(module, device, scores, 20, [0, 3, 64, 200, 100])


def test_no_rows_and_no_columns(module, device):
    assert module.select_rows(torch.empty(0, 9, device=device), 4).shape == (0, 4)
    assert module.select_rows(torch.empty(2, 0, device=device), 4).shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "k"), [(65_536, 512), (131_072, 2048), (1_000_001, 512), (511, 512)])
def test_kernel_agrees_at_long_contexts(module, device, columns, k):
    scores = torch.randn(3, columns).mul_(8).round_() / 8
    assert agrees(module, device, scores, k)
    assert agrees(module, device, scores, k, [columns // 3, columns, 5])


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
@pytest.mark.parametrize(("columns", "k"), [(65_536, 512), (131_071, 2048), (1_000_001, 512), (511, 512), (40, 3)])
def test_native_code_agrees_whatever_the_division(device, columns, k, blocks):
    from engine.ops.cuda.packed_gemm import machine
    from engine.ops.cuda.select_topk import Division, select_rows

    torch.manual_seed(columns)
    plain = torch.randn(9, columns, device="cuda")
    for scores in (plain, plain.mul(8).round() / 8, torch.zeros_like(plain)):
        wanted = ascending(SELECT_TOPK.reference(scores, k))
        for threads in (256, 512):
            assert torch.equal(select_rows(*machine(scores.device), scores, k, division=Division(threads, blocks)), wanted)
