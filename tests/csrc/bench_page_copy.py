"""Speed of page copies over the bus on a GPU: `python -m tests.csrc.bench_page_copy [--out DIR] [--variants NAME]`.

Ceilings are one large pinned copy per direction, measured in the same process. Rows are scattered on both sides. Without `--variants`
only the product's engines are measured; with it also every kernel of `page_copy_variants.cu`, its block counts and kinds of memory.
Prints one JSON line per figure and a table last. About 30 s, 60 s with variants.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from csrc.loader import Library, bind, load
from hicache.gpu_transfer import KernelTransfer
from hicache.host_pool import HostArena, frame_bytes_for
from hicache.memory_node import huge_share
from hicache.native import build_library, check_status
from hicache.pinning import pin

PAGE_BYTES, PIECE_BYTES = 114_048, 16_384
CEILING_BYTES = 256 * 2**20
DIRECTIONS = ("in", "out")  # host to device, device to host
VARIANTS = Library("page_copy_variants", ("../tests/csrc/page_copy_variants.cu",), "sm_90")


@dataclass(slots=True)
class Report:
    """Figures by name, written as they come so that a run cut short still tells something."""

    path: Path | None
    figures: list[dict[str, object]] = field(default_factory=list)

    def add(self, what: str, value: float, unit: str, **facts: object) -> None:
        line: dict[str, object] = {"schema": "dix.bench/1", "id": f"k.page.{what}", "value": round(value, 3), "unit": unit, **facts}
        self.figures.append(line)
        print(json.dumps(line), flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.figures, indent=1))


def device_ms(work: Callable[[], None], rounds: int = 3) -> float:
    """Least time between two events around one call behind other work, so that the host is ahead of the device."""
    work()
    best = float("inf")
    for _ in range(rounds):
        torch.cuda._sleep(2_000_000)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best


def wall_ms(work: Callable[[], None], rounds: int = 5) -> float:
    """Least time from an idle device to an idle device."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def ceiling_gb_s(direction: str) -> float:
    host = torch.empty(CEILING_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    source, target = (host, device) if direction == "in" else (device, host)
    return CEILING_BYTES / wall_ms(lambda: target.copy_(source, non_blocking=True)) / 1e6  # type: ignore[arg-type]


class HostRows:
    """Host rows [count, stride] uint8 of one kind of memory, and the device's address of the first one."""

    def __init__(self, kind: str, count: int, row_bytes: int, library: ctypes.CDLL) -> None:
        self.stride = frame_bytes_for(row_bytes)
        self._unregister: Callable[..., int] | None = None
        num_bytes = count * self.stride
        if kind == "torch":
            self.rows = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).view(count, self.stride)
            self.pointer = self.rows.data_ptr()
            return
        sharing = mmap.MAP_SHARED if kind == "shared" else mmap.MAP_PRIVATE
        mapping = mmap.mmap(-1, num_bytes, flags=sharing | mmap.MAP_ANONYMOUS)
        if kind == "huge":
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.rows = torch.frombuffer(mapping, dtype=torch.uint8).view(count, self.stride)
        self.rows.fill_(0)
        register = bind(library, "dix_host_register", [ctypes.c_void_p, ctypes.c_size_t])
        check_status(library, register(self.rows.data_ptr(), num_bytes), "registering")
        pointer = ctypes.c_void_p()
        bind(library, "dix_host_device_pointer", [ctypes.c_void_p, ctypes.c_void_p])(self.rows.data_ptr(), ctypes.byref(pointer))
        self.pointer = pointer.value or 0
        self._unregister = bind(library, "dix_host_unregister", [ctypes.c_void_p])

    def close(self) -> None:
        """Give registered memory back before it is unmapped."""
        if self._unregister is not None:
            torch.cuda.synchronize()
            self._unregister(self.rows.data_ptr())
            self._unregister = None


class Bench:
    """Variants over one kind of host memory."""

    def __init__(self, kind: str, row_bytes: int, count: int, variants: ctypes.CDLL, library: ctypes.CDLL) -> None:
        self.row_bytes, self.count, self.library = row_bytes, count, library
        self.host = HostRows(kind, count, row_bytes, library)
        self.device = torch.randint(0, 256, (count, row_bytes), dtype=torch.uint8, device="cuda")
        self.frames, self.blocks = (random.Random(seed).sample(range(count), count) for seed in (1, 2))
        self.pairs = {
            "in": torch.tensor([self.frames, self.blocks], dtype=torch.int32).T.contiguous().cuda(),
            "out": torch.tensor([self.blocks, self.frames], dtype=torch.int32).T.contiguous().cuda(),
        }
        number, pointer, integer = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        types = [integer, pointer, pointer, pointer, integer, number, number, number, integer, pointer]
        self._launch = bind(variants, "dix_variant_launch", types)

    def run(self, variant: int, direction: str, num_blocks: int, count: int) -> None:
        sides = [(self.host.pointer, self.host.stride), (self.device.data_ptr(), self.device.stride(0))]
        (source, source_stride), (target, target_stride) = sides if direction == "in" else sides[::-1]
        stream = torch.cuda.current_stream().cuda_stream
        pairs = self.pairs[direction].data_ptr()
        status = self._launch(variant, source, target, pairs, count, source_stride, target_stride, self.row_bytes, num_blocks, stream)
        check_status(self.library, status, f"variant {variant}")

    def exact(self, variant: int, num_blocks: int) -> bool:
        """Whether out and in bring every byte back."""
        original = self.device.clone()
        self.host.rows.fill_(0xEE)
        self.run(variant, "out", num_blocks, self.count)
        torch.cuda.synchronize()
        out = self.host.rows[self.frames, : self.row_bytes].equal(original.cpu()[self.blocks])
        self.device.fill_(0xDD)
        self.run(variant, "in", num_blocks, self.count)
        torch.cuda.synchronize()
        back = self.device.equal(original)
        self.device.copy_(original)
        return out and back

    def gb_s(self, variant: int, direction: str, num_blocks: int, count: int = 0, rounds: int = 3) -> float:
        count = count or self.count
        return count * self.row_bytes / device_ms(lambda: self.run(variant, direction, num_blocks, count), rounds) / 1e6


def compare_variants(report: Report, ceilings: dict[str, float], library: ctypes.CDLL, build_dir: Path, beginning: str) -> None:
    variants = load(VARIANTS, build_dir)
    variants.dix_variant_name.restype = ctypes.c_char_p
    names = [variants.dix_variant_name(i).decode() for i in range(variants.dix_variant_count())]
    chosen = [i for i, name in enumerate(names) if beginning == "all" or name.startswith(beginning)]
    for kind in ("torch", "private", "shared"):
        bench = Bench(kind, PAGE_BYTES, 1024, variants, library)
        for direction in DIRECTIONS:
            huge = round(huge_share(bench.host.rows), 2)
            report.add("memory", bench.gb_s(0, direction, 8), "GB/s", kind=kind, direction=direction, huge=huge)
        bench.host.close()
    rates: dict[tuple[int, int], list[float]] = {}
    benches = [Bench("huge", row_bytes, count, variants, library) for row_bytes, count in ((PAGE_BYTES, 1024), (PIECE_BYTES, 4096))]
    for bench in benches:
        report.add("huge_share", huge_share(bench.host.rows), "1", row_bytes=bench.row_bytes)
        for variant in chosen:
            name = names[variant]
            if not bench.exact(variant, 8):
                report.add("wrong_bytes", 1, "variants", variant=name, row_bytes=bench.row_bytes)
                continue
            for blocks in (2, 4, 8, 16):
                for direction in DIRECTIONS:
                    share = bench.gb_s(variant, direction, blocks) / ceilings[direction]
                    rates.setdefault((variant, blocks), []).append(share)
                    facts = {"variant": name, "blocks": blocks, "direction": direction, "row_bytes": bench.row_bytes}
                    report.add("share", share, "of pinned", **facts)
    for bench in benches[1:]:
        bench.host.close()
    ranked = sorted(rates, key=lambda key: min(rates[key]), reverse=True)
    for variant, blocks in dict.fromkeys([*ranked[:6], (0, 8)]):
        fixed_cost(report, benches[0], variant, blocks, names[variant])
    benches[0].host.close()
    print(f"\n{'variant':30} blocks   page in   out   16K in   out   (of one large pinned copy)")
    for variant, blocks in ranked[:25]:
        print(f"{names[variant]:30} {blocks:6} {'  '.join(f'{share:6.3f}' for share in rates[variant, blocks])}")


def fixed_cost(report: Report, bench: Bench, variant: int, blocks: int, name: str) -> None:
    """Time = fixed + bytes / bandwidth, through 64 and 1024 pages."""
    for direction in DIRECTIONS:
        few, many = (count * bench.row_bytes / bench.gb_s(variant, direction, blocks, count, 8) / 1e6 for count in (64, 1024))
        slope = (many - few) / (960 * bench.row_bytes)
        facts = {"variant": name, "blocks": blocks, "direction": direction}
        report.add("bandwidth", 1e-6 / slope, "GB/s", **facts)
        report.add("fixed", (few - 64 * bench.row_bytes * slope) * 1e3, "us", **facts)


def product(report: Report, ceilings: dict[str, float], library: ctypes.CDLL) -> list[str]:
    """Whole calls of the engine from an idle device, host side included, and the same on the device. The gates: `test_page_copy`."""
    table = []
    for row_bytes, counts in ((PAGE_BYTES, (64, 256, 2048)), (PIECE_BYTES, (64, 1024, 8192))):
        arena = HostArena(max(counts), frame_bytes_for(row_bytes))
        pinned = pin(arena, library)
        device = torch.randint(0, 256, (max(counts), row_bytes), dtype=torch.uint8, device="cuda")
        engine = KernelTransfer(arena, library, pinned.pointer)
        apart, wide = (KernelTransfer(arena, library, pinned.pointer, **own) for own in ({"chained": False}, {"num_blocks": 16}))
        for count in counts:
            frames, rows = (random.Random(seed).sample(range(count), count) for seed in (1, 2))
            for direction in DIRECTIONS:
                for form, other in (("apart", apart), ("16 blocks", wide)):
                    share = count * row_bytes / device_ms(_copy(other, direction, frames, device, rows), 9) / 1e6 / ceilings[direction]
                    report.add("form", share, "of pinned", row_bytes=row_bytes, rows=count, direction=direction, form=form)
                copy = _copy(engine, direction, frames, device, rows)
                gb_s = count * row_bytes / wall_ms(copy, 9) / 1e6
                share = gb_s / ceilings[direction]
                report.add("gate", share, "of pinned", row_bytes=row_bytes, rows=count, direction=direction, gb_s=round(gb_s, 2))
                on_device = count * row_bytes / device_ms(copy, 9) / 1e6 / ceilings[direction]
                report.add("gate_device", on_device, "of pinned", row_bytes=row_bytes, rows=count, direction=direction)
                shares = f"{share:.3f}, on the device {on_device:.3f}"
                table.append(f"{row_bytes:7} B x {count:5} {direction:3} {gb_s:6.1f} of {ceilings[direction]:.1f} GB/s = {shares}")
        if row_bytes == PAGE_BYTES:
            table += one_page(report, engine, device)
        torch.cuda.synchronize()
        pinned.close()
    return table


def _copy(engine: KernelTransfer, direction: str, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> Callable[[], None]:
    if direction == "in":
        return lambda: engine.copy_in(frames, device, rows)
    return lambda: engine.copy_out(device, rows, frames)


def one_page(report: Report, engine: KernelTransfer, device: Tensor) -> list[str]:
    """One page behind other work in the queue: what it adds on the device and on the host."""
    table = []
    for direction in DIRECTIONS:
        copy = _copy(engine, direction, [5], device, [7])
        device_us, host_us = [], []
        for _ in range(5):
            torch.cuda._sleep(20_000_000)  # the queue is full before the device begins
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            began = time.perf_counter()
            for _ in range(200):
                copy()
            host_us.append((time.perf_counter() - began) / 200 * 1e6)
            end.record()
            end.synchronize()
            device_us.append(begin.elapsed_time(end) / 200 * 1e3)
        report.add("one", statistics.median(device_us), "us", direction=direction, must=8)
        report.add("one_host", statistics.median(host_us), "us", direction=direction)
        table.append(f"one page {direction:3}: device {statistics.median(device_us):.1f} us, host {statistics.median(host_us):.1f} us")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variants", default="", help="beginning of the names of kernels to compare, or all")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU", file=sys.stderr)
        return 3
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out / f"page_copy_{options.variants or 'product'}.json" if options.out is not None else None)
    build_dir = Path(tempfile.gettempdir()) / f"dix-bench-{os.getuid()}"
    with torch.cuda.stream(torch.cuda.Stream()):
        library = build_library(build_dir)
        ceilings = {direction: ceiling_gb_s(direction) for direction in DIRECTIONS}
        for direction, gb_s in ceilings.items():
            report.add("ceiling", gb_s, "GB/s", direction=direction)
        table = [] if options.variants else product(report, ceilings, library)
        if options.variants:
            compare_variants(report, ceilings, library, build_dir, options.variants)
        print("\n".join(["", *table]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
