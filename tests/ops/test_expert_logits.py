import pytest
import torch


@pytest.mark.parametrize(("tokens", "experts", "width"), [(0, 8, 64), (1, 40, 1100), (5, 16, 512), (70, 130, 1536)])
def test_kernel_multiplies_and_gives_a_row_the_same_bits_in_every_division(device, tokens, experts, width):
    from engine.ops.triton.expert_logits import Division, launch

    torch.manual_seed(0)
    x, gate = torch.randn(tokens, width, device=device).bfloat16(), torch.randn(experts, width, device=device).bfloat16()
    got = launch(x, gate)
    torch.testing.assert_close(got, (x.double() @ gate.double().t()).float(), rtol=0, atol=2e-4)
    same = torch.equal if device == "cuda" else lambda a, b: torch.allclose(a, b, rtol=0, atol=1e-4)
    for divided in (Division(16, 32, 128, True), Division(64, 64, 64, True), Division(64, 128, 64, False)):
        assert same(launch(x, gate, divided), got), divided
        assert same(launch(x[-1:], gate, divided), got[-1:]), divided
