"""The router's product: the kernel, its divisions, and the reference."""

import pytest
import torch

from engine.ops.expert_logits import expert_logits


@pytest.mark.parametrize(("tokens", "experts", "width"), [(0, 8, 64), (1, 40, 1100), (5, 16, 512), (70, 130, 1536)])
def test_kernel_multiplies_and_gives_a_row_the_same_bits_in_every_division(device, tokens, experts, width):
    from engine.ops.triton.expert_logits import Division, launch
    from engine.ops.triton.expert_logits import launch_invariant as fixed

    torch.manual_seed(0)
    x, gate = torch.randn(tokens, width, device=device).bfloat16(), torch.randn(experts, width, device=device).bfloat16()
    got = fixed(x, gate)
    torch.testing.assert_close(got, (x.double() @ gate.double().t()).float(), rtol=0, atol=2e-4)
    torch.testing.assert_close(launch(x.repeat(2, 1), gate)[:tokens], got, rtol=0, atol=2e-4)  # of 140 rows by the library
    # The interpreter multiplies by numpy, in an order of its own.
    same = torch.equal if device == "cuda" else lambda a, b: torch.allclose(a, b, rtol=0, atol=1e-4)
    for divided in (Division(16, 32, 128, True), Division(64, 64, 64, True), Division(64, 128, 64, False)):
        assert same(fixed(x, gate, divided), got), divided
        assert same(fixed(x[-1:], gate, divided), got[-1:]), divided


def test_product_of_bf16_numbers_is_that_of_fp32():
    torch.manual_seed(0)
    x, gate = torch.randn(4, 256).bfloat16(), torch.randn(16, 256).bfloat16()
    for one in (gate, gate.float()):
        got = expert_logits(x, one)
        assert torch.allclose(got, x.double().matmul(gate.double().t()).float(), atol=1e-4)
        assert torch.equal(expert_logits(x, one, 2.0), got / 2)
