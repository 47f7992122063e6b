"""What this machine can do at most, measured in the run that uses it. A share of a datasheet value is not a result."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from deepinfer_cli.opbench.case import Call
from deepinfer_cli.opbench.timing import new_event, time_side_by_side


@dataclass(frozen=True, slots=True)
class Ceilings:
    """copy_tbs: device copy, read and write counted, TB/s. bf16_tflops, fp8_tflops: a large square product. h2d_gbs, d2h_gbs: pinned
    copies.
    fp8, h2d and d2h are None where the machine has none.
    """

    copy_tbs: float
    bf16_tflops: float
    fp8_tflops: float | None = None
    h2d_gbs: float | None = None
    d2h_gbs: float | None = None

    def plain(self) -> dict[str, float | None]:
        return asdict(self)

    def least_us(self, of: str, num_bytes: float, flops: float) -> float | None:
        """Shortest time that the named ceiling allows, in microseconds; None where the machine has no such ceiling."""
        rates = {"copy": (self.copy_tbs, 1e6), "h2d": (self.h2d_gbs, 1e3), "d2h": (self.d2h_gbs, 1e3)}
        if of in rates:
            rate, unit = rates[of]
            return None if rate is None else num_bytes / (rate * unit)
        if of in ("bf16", "fp8"):
            speed = self.bf16_tflops if of == "bf16" else self.fp8_tflops
            return None if speed is None else flops / (speed * 1e6)
        return max(num_bytes / (self.copy_tbs * 1e6), flops / (self.bf16_tflops * 1e6))


def measure_ceilings(device: str, small: bool = False) -> Ceilings:
    """All ceilings of the device, in about five seconds on a GPU."""
    size = 2**31 if device == "cuda" and not small else 2**24
    copy_tbs = _copy_tbs(size, device)
    side = 8192 if device == "cuda" and not small else 256
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    bf16 = 2 * side**3 / time_side_by_side({"product": [lambda: a @ b]}, device)["product"].median / 1e6
    return Ceilings(copy_tbs, bf16, *((_fp8(side, a, b), *_bus_gbs(size // 2)) if device == "cuda" else ()))


def _copy_tbs(size: int, device: str) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    # Eager: a copy inside a graph reads a third below what the device does.
    took = _eager_us(copy) if device == "cuda" else time_side_by_side({"copy": [copy]}, device)["copy"].median
    return 2 * size / took / 1e6


def _bus_gbs(size: int) -> tuple[float, float]:
    """Pinned copies to the device and back, GB/s."""
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    up = _eager_us(lambda: there.copy_(pinned, non_blocking=True))
    return size / up / 1e3, size / _eager_us(lambda: pinned.copy_(there, non_blocking=True)) / 1e3


def _fp8(side: int, a: torch.Tensor, b: torch.Tensor) -> float | None:
    if torch.cuda.get_device_capability() < (8, 9):
        return None
    left, right = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=a.device)
    calls = [lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)]
    return 2 * side**3 / time_side_by_side({"product": calls}, "cuda")["product"].median / 1e6


def _eager_us(call: Call) -> float:
    """Median of eight samples of four calls, microseconds of one."""
    call()
    times = []
    for _ in range(8):
        first, last = new_event(), new_event()
        first.record()
        for _ in range(4):
            call()
        last.record()
        last.synchronize()
        times.append(float(first.elapsed_time(last)) * 1e3 / 4)
    return sorted(times)[len(times) // 2]
