"""The boundary between two sublayers in three kernels.

The first writes the streams back, reads the next input and normalises it: one program a row. The second multiplies the streams with the
mixing matrix, whose fp32 entries are split into three bf16 terms (the streams are bf16 already, so the products are those of fp32), columns
split over programs. The third adds the parts in a fixed order and balances the 4x4 matrices in registers. Nothing in the sublayer itself
waits for the last two: they may run beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.hyper_boundary import HYPER_BOUNDARY, Boundary, Mixer, Written
from engine.ops.triton.early_start import can_begin_early, let_next_begin, wait_for_last
from engine.ops.triton.fallback import warn_once
from engine.ops.triton.interpreter import INTERPRETED

STREAMS = 4
_WIDTH = 32  # columns of a line of parts; 24 are used
_MANY_ROWS = 2048  # from here on long programs fill the machine, and splitting the mixing matrix once pays (measured at 4,096)
_FEW_ROWS = 264  # two for every multiprocessor of the largest machine measured


@triton.jit
def write_and_read(
    h, y, post, comb, pre, norm, new_h, x, squares, width, eps, HAS_Y: tl.constexpr, COLS: tl.constexpr, ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """h, new_h: [T, 4, C], y, x: [T, C], norm: [C] bf16; squares: [T] fp32, of all streams as they are stored.

    The row is walked in chunks of COLS. The input is stored as it is read and normalised when its sum is known: every thread finds its own
    values again. ONCE: eviction of what is read here for the last time, which makes room in the L2 cache for what `mix` reads next.
    """
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    p0, p1, p2, p3 = tl.load(pre + row * 4), tl.load(pre + row * 4 + 1), tl.load(pre + row * 4 + 2), tl.load(pre + row * 4 + 3)
    all_squares = tl.zeros([COLS], tl.float32)
    read_squares = tl.zeros([COLS], tl.float32)
    for first in range(0, width, COLS):
        cols = first + tl.arange(0, COLS)
        mask = cols < width
        at = h + row * 4 * width + cols
        h0 = tl.load(at, mask=mask, other=0.0, eviction_policy=ONCE)
        h1 = tl.load(at + width, mask=mask, other=0.0, eviction_policy=ONCE)
        h2 = tl.load(at + 2 * width, mask=mask, other=0.0, eviction_policy=ONCE)
        h3 = tl.load(at + 3 * width, mask=mask, other=0.0, eviction_policy=ONCE)
        if HAS_Y:
            out = tl.load(y + row * width + cols, mask=mask, other=0.0, eviction_policy=ONCE).to(tl.float32)
            f0, f1, f2, f3 = h0.to(tl.float32), h1.to(tl.float32), h2.to(tl.float32), h3.to(tl.float32)
            h0 = _written(f0, f1, f2, f3, out, post + row * 4, comb + row * 16)
            h1 = _written(f0, f1, f2, f3, out, post + row * 4 + 1, comb + row * 16 + 1)
            h2 = _written(f0, f1, f2, f3, out, post + row * 4 + 2, comb + row * 16 + 2)
            h3 = _written(f0, f1, f2, f3, out, post + row * 4 + 3, comb + row * 16 + 3)
            to = new_h + row * 4 * width + cols
            tl.store(to, h0, mask=mask)
            tl.store(to + width, h1, mask=mask)
            tl.store(to + 2 * width, h2, mask=mask)
            tl.store(to + 3 * width, h3, mask=mask)
        g0, g1, g2, g3 = h0.to(tl.float32), h1.to(tl.float32), h2.to(tl.float32), h3.to(tl.float32)
        all_squares += g0 * g0 + g1 * g1 + g2 * g2 + g3 * g3
        read = (p0 * g0 + p1 * g1 + p2 * g2 + p3 * g3).to(tl.bfloat16)
        tl.store(x + row * width + cols, read, mask=mask)
        wide = read.to(tl.float32)
        read_squares += wide * wide
    tl.store(squares + row, tl.sum(all_squares, axis=0))
    scale = tl.rsqrt(tl.sum(read_squares, axis=0) / width + eps)
    for first in range(0, width, COLS):
        cols = first + tl.arange(0, COLS)
        mask = cols < width
        value = tl.load(x + row * width + cols, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(norm + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(x + row * width + cols, (value * scale * weight).to(tl.bfloat16), mask=mask)


@triton.jit
def _written(f0, f1, f2, f3, out, post, comb):
    """One stream after the write-back, in the order of the reference: streams first, the output last."""
    mixed = tl.load(comb) * f0 + tl.load(comb + 4) * f1 + tl.load(comb + 8) * f2 + tl.load(comb + 12) * f3
    return (mixed + tl.load(post) * out).to(tl.bfloat16)


@triton.jit
def _terms_of(f):
    """Three bf16 numbers whose sum is an fp32 one: high, middle, low."""
    high = f.to(tl.bfloat16)
    rest = f - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def split_terms(fn, terms, width, COLS: tl.constexpr):
    """fn: [24, n*C] fp32 -> terms: [3, 32, n*C] bf16, high, middle, low; rows from 24 on are zeros."""
    output = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask, known = cols < width, tl.where(output < 24, width, 0)
    high, middle, low = _terms_of(tl.load(fn + output * width + cols, mask=cols < known, other=0.0))
    to = terms + output * width + cols
    tl.store(to, high, mask=mask)
    tl.store(to + 32 * width, middle, mask=mask)
    tl.store(to + 64 * width, low, mask=mask)


@triton.jit
def mix(
    z, fn, parts, num_rows, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr, TERMS: tl.constexpr, LAST: tl.constexpr, EARLY: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """parts[split, row, :24] = this split's share of fn z. z: [T, n*C] bf16, parts: [splits, T, 32] fp32.

    fn: [24, n*C] fp32, or with TERMS what `split_terms` made of it. LAST: the last rows first, which were written last and are in the L2
    cache. FAST false multiplies fp32 numbers as they are: Triton's interpreter
    would multiply the bits of bf16 numbers.
    """
    let_next_begin(EARLY)
    if STEPS > 1:
        wait_for_last(EARLY)
    block = tl.num_programs(0) - 1 - tl.program_id(0) if LAST else tl.program_id(0)
    rows = block * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    row = rows.to(tl.int64)
    outputs = tl.arange(0, 32)
    acc = tl.zeros([ROWS, 32], tl.float32)
    for step in range(STEPS):
        cols = (split * STEPS + step) * COLS + tl.arange(0, COLS)
        inside = cols < width
        at = fn + outputs[None, :] * width + cols[:, None]
        if TERMS:
            high = tl.load(at, mask=inside[:, None], other=0.0)
            middle = tl.load(at + 32 * width, mask=inside[:, None], other=0.0)
            low = tl.load(at + 64 * width, mask=inside[:, None], other=0.0)
        else:
            high, middle, low = _terms_of(tl.load(at, mask=(outputs < 24)[None, :] & inside[:, None], other=0.0))
        if STEPS == 1:
            wait_for_last(EARLY)  # for the streams; the matrix is on its way
        known = (rows < num_rows)[:, None] & inside[None, :]
        tile = tl.load(z + row[:, None] * width + cols[None, :], mask=known, other=0.0, eviction_policy="evict_first" if LAST else "")
        if FAST:
            acc = tl.dot(tile, low, acc)
            acc = tl.dot(tile, middle, acc)
            acc = tl.dot(tile, high, acc)
        else:
            f = high.to(tl.float32) + (middle.to(tl.float32) + low.to(tl.float32))
            acc = tl.dot(tile.to(tl.float32), f, acc, input_precision="ieee")
    line = parts + (split * num_rows + row[:, None]) * 32 + outputs[None, :]
    tl.store(line, acc, mask=(rows < num_rows)[:, None] & (outputs < 24)[None, :])


@triton.jit
def balance(
    parts, squares, scale, base, pre, post, comb, num_rows, width, splits, num_iters, hc_eps, rms_eps, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program a row: add the parts, then pre and post [T, 4] and the balanced comb [T, 4, 4]. splits <= SPLITS, a power of two."""
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    factor = tl.rsqrt(tl.load(squares + row) / width + rms_eps)
    s = tl.arange(0, SPLITS)
    four = tl.arange(0, 4)
    cell = four[:, None] * 4 + four[None, :]
    lines = parts + (s * num_rows + row) * 32
    some = s < splits
    raw = tl.sum(tl.load(lines[:, None] + four[None, :], mask=some[:, None], other=0.0), axis=0) * factor
    gate = raw * tl.load(scale + four) + tl.load(base + four)
    tl.store(pre + row * 4 + four, 1.0 / (1.0 + tl.exp(-gate)) + hc_eps)
    raw = tl.sum(tl.load(lines[:, None] + 4 + four[None, :], mask=some[:, None], other=0.0), axis=0) * factor
    gate = raw * tl.load(scale + 4 + four) + tl.load(base + 4 + four)
    tl.store(post + row * 4 + four, 2.0 / (1.0 + tl.exp(-gate)))
    raw = tl.sum(tl.load(lines[:, None, None] + 8 + cell[None, :, :], mask=some[:, None, None], other=0.0), axis=0) * factor
    a = raw * tl.load(scale + 8 + cell) + tl.load(base + 8 + cell)
    a = tl.exp(a - tl.max(a, axis=1)[:, None])
    a = a / tl.sum(a, axis=1)[:, None] + hc_eps
    a = a / (tl.sum(a, axis=0)[None, :] + hc_eps)
    for _ in range(num_iters - 1):
        a = a / (tl.sum(a, axis=1)[:, None] + hc_eps)
        a = a / (tl.sum(a, axis=0)[None, :] + hc_eps)
    tl.store(comb + row * 16 + cell, a)


@dataclass(frozen=True, slots=True)
class Division:
    """How the work is divided. rows, cols, steps: of a program of `mix`, columns of a step and steps of a program. chunk: columns of
    `write_and_read` at a time. terms: the mixing matrix is split once for all programs, so that none passes it through registers. warps,
    stages: of `mix`. recent: new streams are kept in the L2 cache and read from there, as far as they fit. early: kernels begin
    while those before them end.
    """

    rows: int
    cols: int
    steps: int
    chunk: int = 4096
    terms: bool = False
    warps: int = 4
    stages: int = 3
    recent: bool = False
    early: bool = False


def division(rows: int) -> Division:
    """Few rows: many programs of one step, whose part of the mixing matrix comes while streams are written, and much of a row at once, for
    latency. Many rows: longer programs, so that the mixing matrix is read less often, and shorter chunks, of which several rows fit a
    multiprocessor.
    """
    chunk = 4096 if rows <= _FEW_ROWS else 1024
    if rows <= 64:
        return Division(16, 256, 1, chunk, early=True)
    if rows <= 512:
        return Division(16, 128, 8, chunk, early=True)
    if rows < _MANY_ROWS:
        return Division(64, 64, 40, chunk, early=True)
    return Division(64, 64, 80, chunk, terms=True, stages=5, recent=True, early=True)


def fixed_division(rows: int) -> Division:
    """Of batch-invariant mode: chunks, columns and steps, which divide the sums, are those that cost decode steps and prefill least
    together (17.4 µs for 16.6 at one row, 272 for 193 at 4,096; longer programs gain there what they cost here). Rows of a program may
    differ.
    """
    return Division(16, 128, 2, 1024, early=True) if rows <= 512 else Division(64, 128, 2, 1024, terms=True, recent=True, early=True)


def launch_invariant(h: Tensor, written: Written | None, mixer: Mixer | None, pre: Tensor, norm: Tensor, eps: float) -> Boundary:
    """`launch` with one division of its sums."""
    return launch(h, written, mixer, pre, norm, eps, fixed_division(len(h)))


def launch(
    h: Tensor, written: Written | None, mixer: Mixer | None, pre: Tensor, norm: Tensor, eps: float, divided: Division | None = None
) -> Boundary:
    """The op `hyper_boundary`. Streams of another number or dtype than four of bf16 go to the reference, aloud.

    divided: of any number of rows; None for what suits their number.
    """
    rows, n, _ = h.shape
    if n != STREAMS or h.dtype != torch.bfloat16 or norm.dtype != torch.bfloat16:
        warn_once("hyper_boundary", f"{n} streams of {h.dtype}, the kernels take {STREAMS} of torch.bfloat16")
        boundary: Boundary = HYPER_BOUNDARY.fallback(h, written, mixer, pre, norm, eps)
        return boundary
    work = _Work.of(h.contiguous(), written, mixer, pre.contiguous(), norm, eps, divided or division(rows))
    work.write_back()
    work.mix()
    return Boundary(work.new_h, work.x, *work.balance())


@dataclass(frozen=True, slots=True)
class _Work:
    """Arguments and results of one boundary. squares: fp32 sums of all streams of a row; parts: see `mix`, None without a mixer."""

    h: Tensor
    written: Written | None
    mixer: Mixer | None
    pre: Tensor
    norm: Tensor
    eps: float
    divided: Division
    new_h: Tensor
    x: Tensor
    squares: Tensor
    parts: Tensor | None

    @staticmethod
    def of(h: Tensor, written: Written | None, mixer: Mixer | None, pre: Tensor, norm: Tensor, eps: float, divided: Division) -> _Work:
        rows, n, width = h.shape
        if written is not None:
            written = Written(written.y.contiguous(), written.post, written.comb)
        splits = triton.cdiv(n * width, divided.cols * divided.steps)
        parts = torch.empty(splits, rows, _WIDTH, device=h.device) if mixer is not None else None
        new_h = torch.empty_like(h) if written is not None else h
        return _Work(
            h, written, mixer, pre, norm, eps, divided, new_h, h.new_empty(rows, width), h.new_empty(rows, dtype=torch.float32), parts
        )

    @property
    def early(self) -> bool:
        return self.divided.early and can_begin_early(self.h.device)

    def write_back(self) -> None:
        """New streams, the next input, and the squares that the mixes need."""
        h, x, pre, (rows, _, width) = self.h, self.x, self.pre, self.h.shape
        # Arguments that a variant does not read are passed as some tensor.
        y, post, comb = (x, pre, pre)
        if self.written is not None:
            y, post, comb = self.written.y, self.written.post, self.written.comb
        if rows:
            block = min(triton.next_power_of_2(width), self.divided.chunk)
            write_and_read[(rows,)](
                h, y, post, comb, pre, self.norm, self.new_h, x, self.squares, width, self.eps, self.written is not None, block,
                "evict_first" if self.divided.recent else "", self.early,
                num_warps=max(1, min(16, block // 256)), enable_fp_fusion=False,
            )  # fmt: skip

    def mix(self) -> None:
        """Products of the new streams with the mixing matrix."""
        z, divided = self.new_h.flatten(1), self.divided
        rows, width = z.shape
        if self.mixer is None or self.parts is None or not rows:
            return
        fn = self.mixer.fn
        if divided.terms:
            fn = torch.empty(3, _WIDTH, width, dtype=torch.bfloat16, device=z.device)
            split_terms[_WIDTH, triton.cdiv(width, 2048)](self.mixer.fn, fn, width, 2048, num_warps=4)
        mix[triton.cdiv(rows, divided.rows), len(self.parts)](
            z, fn, self.parts, rows, width, divided.rows, divided.cols, divided.steps, divided.terms, divided.recent, self.early,
            not INTERPRETED, num_warps=divided.warps, num_stages=divided.stages, **_launched(self.early),
        )  # fmt: skip

    def balance(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """pre, post and comb of all rows; None without a mixer."""
        if self.mixer is None or self.parts is None:
            return None, None, None
        (splits, rows), n, mixer = self.parts.shape[:2], STREAMS, self.mixer
        pre, post, comb = (torch.empty(rows, *shape, device=self.h.device) for shape in ((n,), (n,), (n, n)))
        if rows:
            balance[(rows,)](
                self.parts, self.squares, mixer.scale, mixer.base, pre, post, comb, rows, n * self.h.shape[2], splits, mixer.num_iters,
                mixer.eps, self.eps, triton.next_power_of_2(splits), self.early, num_warps=1, **_launched(self.early),
            )  # fmt: skip
        return pre, post, comb


def _launched(early: bool) -> dict[str, bool]:
    """Options of a kernel that begins early; Triton for other devices than NVIDIA's does not know them."""
    return {"launch_pdl": True} if early else {}
