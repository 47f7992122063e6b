"""Compare every kernel with its slow twin on random packed documents; the first thing that runs on a new machine.

`python -m recipes.tiny.selfcheck [--small]`: prints one JSON object of relative errors; exits 1 when one is too large.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from recipes.tiny.attention import Visibility, attention, attention_reference
from recipes.tiny.kernels import index_scores, index_scores_reference, sinkhorn, sinkhorn_reference


def visibility(lengths: list[int], ratio: int, window: int, device: str) -> Visibility:
    """Packed documents of the given lengths (multiples of 16)."""
    rows = torch.arange(sum(lengths))
    sizes = torch.tensor(lengths)
    starts = torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    ends = torch.repeat_interleave(torch.cumsum(sizes, 0), sizes)
    lo = torch.maximum(rows - window + 1, starts).int()
    lo[5:9] = torch.arange(6, 10).int()  # rows without a window, as in decoder truncation
    if not ratio:
        return Visibility(lo.to(device), window)
    hi = starts // ratio + (rows - starts + 1) // ratio
    return Visibility(lo.to(device), window, (starts // ratio).int().to(device), hi.int().to(device), ends[::ratio].int().to(device), ratio)


def _relative(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def _gradients(fn: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], seeds: list[Tensor]) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    outs = fn(*leaves)
    return [o.detach() for o in outs] + list(torch.autograd.grad(outs, leaves, seeds))


def check_attention(dtype: torch.dtype, device: str, small: bool) -> dict[str, float]:
    heads, dim, window = (2, 32, 24) if small else (8, 128, 128)
    lengths = [48, 16, 80] if small else [512, 16, 48, 448]
    out: dict[str, float] = {}
    for name, ratio, selected in (("attention.window", 0, False), ("attention", 2, False), ("attention.selected", 1, True)):
        vis = visibility(lengths, ratio, window, device)
        n = sum(lengths)
        q, do = (torch.randn(n, heads, dim, device=device).to(dtype) for _ in range(2))
        tensors = [q, torch.randn(n, dim, device=device).to(dtype)]
        if ratio:
            tensors.append(torch.randn(n // ratio, dim, device=device).to(dtype))
        sel = (torch.rand(n, max(lengths), device=device) < 0.3).to(torch.uint8) if selected else None
        seeds = [do, torch.randn(n, heads, device=device)]
        runs = []
        for fn in (attention, attention_reference):

            def call(
                q: Tensor, k: Tensor, c: Tensor | None = None, fn: Callable = fn, vis: Visibility = vis, sel: Tensor | None = sel
            ) -> tuple:
                o, lse = fn(q, k, c, sel, vis)
                return o, torch.where(lse > -1e29, lse, 0.0)

            runs.append(_gradients(call, tensors, seeds))
        for label, a, b in zip(("o", "lse", "dq", "dk", "dc"), *runs, strict=False):
            out[f"{name}/{label}"] = _relative(a, b)
    return out


def check_rest(device: str, dtype: torch.dtype) -> dict[str, float]:
    x = torch.randn(100, 4, 4, device=device)
    dy = torch.randn_like(x)
    fast = _gradients(lambda t: (sinkhorn(t, 20, 1e-6),), [x], [dy])
    slow = _gradients(lambda t: (sinkhorn_reference(t, 20, 1e-6),), [x], [dy])
    out = {"sinkhorn/y": _relative(fast[0], slow[0]), "sinkhorn/dx": _relative(fast[1], slow[1])}
    vis = visibility([48, 16, 80], 2, 24, device)
    iq, w = torch.randn(144, 4, 64, device=device).to(dtype), torch.randn(144, 4, device=device)
    ik = torch.randn(72, 64, device=device).to(dtype)
    a = index_scores(iq, w, ik, vis.start, vis.hi, 40)
    b = index_scores_reference(iq, w, ik, vis.start, vis.hi, 40)
    same = torch.equal(a == float("-inf"), b == float("-inf"))
    out["index_scores"] = _relative(torch.nan_to_num(a, neginf=0.0), torch.nan_to_num(b, neginf=0.0)) if same else 1.0
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes in f32, for the interpreter")
    small = parser.parse_args().small
    torch.manual_seed(0)
    device, dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
    errors = check_attention(dtype, device, small) | check_rest(device, dtype)
    print(json.dumps(errors))
    bad = {k: v for k, v in errors.items() if not v < (2e-5 if small else 1.5e-2)}
    if bad:
        print(f"kernels differ from their slow twins: {bad}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
