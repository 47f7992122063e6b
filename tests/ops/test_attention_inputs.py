import pytest
import torch

from engine.ops.attention_inputs import ATTENTION_INPUTS, attention_inputs
from engine.ops.cache_rows import unpack_window_rows, window_row_bytes
from engine.ops.rope import plain_frequencies, rotation

SHAPES = [(1, 1280, 512, 64), (5, 64, 64, 16), (3, 96, 128, 64), (0, 64, 64, 16)]


# The interpreter cuts numbers off where it makes bf16 of them; a GPU rounds.
SAME_BYTES = {"cpu": 0.9, "cuda": 0.98}


@pytest.fixture
def kernel(device):
    from engine.ops.triton.attention_inputs import launch

    return launch


def problem(device, tokens, rank, width, rotary, dtype=torch.bfloat16):
    torch.manual_seed(tokens)
    both = torch.randn(tokens, rank + width, device=device).to(dtype)
    q_norm, kv_norm = (1 + 0.1 * torch.randn(n, device=device).to(dtype) for n in (rank, width))
    rot = rotation(torch.arange(tokens, device=device) * 977 + 3, plain_frequencies(rotary, 10_000.0).to(device))
    return both, q_norm, kv_norm, rot, 1e-20


@pytest.mark.parametrize(("tokens", "rank", "width", "rotary"), SHAPES)
def test_kernel_gives_the_bytes_of_the_reference_in_fp32(kernel, device, tokens, rank, width, rotary):
    arguments = problem(device, tokens, rank, width, rotary, dtype=torch.float32)
    latent, keys = kernel(*arguments, None, None)
    wanted_latent, wanted_keys = ATTENTION_INPUTS.reference(*arguments, None, None)
    assert torch.allclose(latent, wanted_latent, rtol=2e-6, atol=1e-6)
    assert tokens == 0 or (keys == wanted_keys).float().mean() > 0.995


@pytest.mark.parametrize(("tokens", "rank", "width", "rotary"), SHAPES)
def test_kernel_gives_latent_and_key_of_the_reference(kernel, device, tokens, rank, width, rotary):
    arguments = problem(device, tokens, rank, width, rotary)
    latent, keys = kernel(*arguments, None, None)
    wanted_latent, wanted_keys = ATTENTION_INPUTS.reference(*arguments, None, None)
    assert torch.allclose(latent.float(), wanted_latent.float(), atol=1e-2, rtol=8e-3)
    got, wanted = (unpack_window_rows(rows, torch.float32) for rows in (keys, wanted_keys))
    # A value on a rounding edge may land one step beside it; bytes are equal but for a few.
    assert (got - wanted).abs().le(wanted.abs() * 0.13 + 2e-2).all()
    assert tokens == 0 or (keys == wanted_keys).float().mean() > SAME_BYTES[device]


def test_keys_go_to_their_places_in_the_ring_and_nowhere_else(kernel, device):
    arguments = problem(device, 4, 64, 64, 16)
    ring = torch.full((12, window_row_bytes(64)), 0x42, dtype=torch.uint8, device=device)
    places = torch.tensor([7, 2, 11, 3], device=device)
    _, keys = kernel(*arguments, ring, places)
    assert torch.equal(ring[places], keys)
    untouched = [row for row in range(12) if row not in places.tolist()]
    assert (ring[untouched] == 0x42).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_scales_cover_small_and_large_rows(kernel, device, scale):
    both, q_norm, kv_norm, rot, eps = problem(device, 3, 64, 64, 16, dtype=torch.float32)
    # Norm weights set the size of a key: the norm itself takes out the size of its input.
    _, keys = kernel(both, q_norm, kv_norm * scale, rot, eps, None, None)
    _, wanted = ATTENTION_INPUTS.reference(both, q_norm, kv_norm * scale, rot, eps, None, None)
    assert (keys == wanted).float().mean() > 0.98


def test_rows_of_a_wider_tensor_and_inverse_angles_are_read_right(kernel, device):
    both, q_norm, kv_norm, rot, eps = problem(device, 3, 64, 64, 16, dtype=torch.float32)
    wide = torch.cat((both, both), 1)[:, : both.shape[1]]
    assert not wide.is_contiguous()
    _, keys = kernel(wide, q_norm, kv_norm, rot.conj(), eps, None, None)
    _, wanted = ATTENTION_INPUTS.reference(both, q_norm, kv_norm, rot.conj_physical(), eps, None, None)
    assert (keys == wanted).float().mean() > 0.98


def test_op_refuses_a_ring_of_other_rows():
    both, q_norm, kv_norm, rot, eps = problem("cpu", 2, 64, 64, 16)
    with pytest.raises(ValueError, match="attention_inputs"):
        attention_inputs(both, q_norm, kv_norm, rot, eps, torch.zeros(4, 64, dtype=torch.uint8), torch.tensor([1, 2]))
