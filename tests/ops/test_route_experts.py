import pytest
import torch

from engine.ops.route_experts import ROUTE_EXPERTS


@pytest.fixture
def kernel(device):
    from engine.ops.triton.route_experts import launch

    return launch


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(0, 8, 2), (1, 384, 6), (5, 16, 3), (3, 128, 3), (7, 9, 9)])
def test_kernel_chooses_and_weighs_like_the_reference(kernel, device, tokens, experts, chosen):
    torch.manual_seed(0)
    logits = torch.randn(tokens, experts, device=device) * 8
    bias = torch.randn(experts, device=device) * 0.1
    ids, weights = kernel(logits, bias, chosen, 1.5)
    wanted_ids, wanted = ROUTE_EXPERTS.reference(logits, bias, chosen, 1.5)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted, rtol=2e-6, atol=1e-9)


def test_ties_go_to_the_lower_expert(kernel, device):
    ids, weights = kernel(torch.zeros(2, 16, device=device), torch.zeros(16, device=device), 4, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.allclose(weights, torch.full_like(weights, 0.25))


def test_very_small_and_very_large_logits_keep_their_scores(kernel, device):
    logits = torch.tensor([[-80.0, -30.0, -9.0, 0.0, 19.9, 20.1, 60.0, -15.0]], device=device)
    bias = torch.zeros(8, device=device)
    ids, weights = kernel(logits, bias, 8, 1.0)
    wanted_ids, wanted = ROUTE_EXPERTS.reference(logits, bias, 8, 1.0)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted, rtol=1e-5, atol=0)
