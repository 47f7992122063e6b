"""What batch-invariant mode may choose from: `python -m tests.gpu.invariant_forms [dense|router|attention|boundary ...]`, a minute for all.

Forms of one kernel at several numbers of rows, each with its time, and the forms that give the first row alone the same bits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer_cli.opbench.case import Setting
from deepinfer_cli.opbench.timing import time_side_by_side
from engine.ops.cuda.packed_gemm import MANY, Epilogue, Shape, dense, in_order_of_products, machine, tiles_of
from engine.ops.packed_weights import Format, PackedWeights, unpack
from engine.ops.triton.product_order import in_order
from tests.ops.bench_packed import DENSE, random_weights


class Problem(NamedTuple):
    """forms: of the number of rows and the number of a set of inputs, the result [rows, ...]."""

    title: str
    rows: int
    sets: int
    forms: Mapping[str, Callable[[int, int], Tensor]]


def products(setting: Setting) -> Iterator[Problem]:
    for name in ("wq_a+wkv", "wq_b", "wo_a", "wo_b"):
        groups, rows, columns = DENSE[name]
        sets = [random_weights(Format.FP8, groups, rows, columns) for _ in range(max(1, round(100e6 / (groups * rows * columns))))]
        plain = torch.stack([unpack(sets[0], group, torch.bfloat16) for group in range(groups)])
        pool = setting.normal(4096, groups * columns)
        for tokens in (1, 64, 256, 4096):
            slices = (1, 4, 8)
            few = [Shape(tiles_of(tokens), n) for n in slices] if tokens <= 256 else [Shape(MANY)]
            many = [Shape(MANY, n, warpgroups=True) for n in slices]
            shapes = few + many * (tokens > 64)
            forms: dict[str, Callable[[int, int], Tensor]] = {str(shape)[5:]: partial(_product, pool, sets, shape) for shape in shapes}
            if tokens > 1:
                forms["library"] = partial(_library, pool, plain)
                forms |= _ordered(pool, plain, 1 if name == "wq_b" else 4 if name == "wo_a" else 8, tokens)
            yield Problem(f"{name}, {tokens} tokens", tokens, len(sets), forms)


def _product(x: Tensor, sets: list[PackedWeights], shape: Shape, count: int, number: int) -> Tensor:
    weights = sets[number]
    out = torch.empty(count, weights.groups * weights.rows, dtype=torch.bfloat16, device="cuda")
    dense(*machine(x.device), x[:count], weights, out, shape, Epilogue.BF16)
    return out


def _ordered(x: Tensor, plain: Tensor, slices: int, tokens: int) -> dict[str, Callable[[int, int], Tensor]]:
    """Slices as packed products of few rows have them. Ordering the tokens is part of it."""
    from engine.ops.triton.ordered_linear import Division, ordered_linear

    groups, rows, columns = plain.shape
    weight = in_order_of_products(plain.flatten(0, 1), Format.FP8, 1, slices).view(groups, rows, columns).contiguous()

    def run(count: int, number: int, divided: Division) -> Tensor:
        return ordered_linear(in_order(x[:count], Format.FP8, groups, slices), weight, slices, 128, divided)

    few = [Division(64, 128, 64, True, 4, 4), Division(64, 128, 64, True, 4, 5), Division(64, 64, 64, True, 4, 5)]
    some = [Division(128, 128, 64, True, 8, 4), Division(128, 128, 64, False, 8, 4), Division(64, 128, 64, True, 4, 4)]
    last = Division(128, 256, 64, False, 8, 4) if slices == 1 else Division(256, 64, 64, False, 8, 4)
    many = [Division(128, 128, 64, False, 8, 5), Division(128, 128, 64, False, 8, 4), last]
    return {f"ordered {str(d)[8:]}": partial(run, divided=d) for d in (few if tokens <= 64 else some if tokens <= 256 else many)}


def _library(x: Tensor, weights: Tensor, count: int, number: int) -> Tensor:
    parts = x[:count].view(count, len(weights), -1).transpose(0, 1)
    return torch.bmm(parts, weights.transpose(1, 2)).transpose(0, 1).flatten(1)


def router(setting: Setting) -> Iterator[Problem]:
    from engine.ops.dense_linear import DENSE_LINEAR
    from engine.ops.fixed_rows import fixed_linear
    from engine.ops.triton.expert_logits import Division
    from engine.ops.triton.expert_logits import launch_invariant as launch

    x, gates = setting.normal(4096, 5120), [setting.normal(384, 5120, std=0.02) for _ in range(16)]
    for tokens in (1, 8, 64, 512, 4096):
        tried = {
            1: [Division(16, 32, 128, True), Division(16, 16, 128, True), Division(16, 32, 256, True), Division(16, 16, 256, True, 2)],
            64: [Division(16, 32, 128, True), Division(64, 64, 64, True), Division(64, 32, 128, True), Division(32, 64, 128, True)],
            4096: [Division(64, 128, 64, False), Division(64, 64, 64, False), Division(128, 128, 64, False, 8), Division(64, 64, 64, True)],
        }[1 if tokens <= 8 else 64 if tokens <= 512 else 4096]

        def ours(count: int, number: int, divided: Division) -> Tensor:
            return launch(x[:count], gates[number], divided)

        def library(count: int, number: int, product: Any) -> Tensor:
            logits: Tensor = product(x[:count], gates[number], None, True)
            return logits

        forms: dict[str, Callable[[int, int], Tensor]] = {str(d)[8:]: partial(ours, divided=d) for d in tried}
        forms["library"] = partial(library, product=DENSE_LINEAR.reference)
        forms["library in one shape"] = partial(library, product=fixed_linear)
        yield Problem(f"router, {tokens} tokens", tokens, len(gates), forms)


def attention(setting: Setting) -> Iterator[Problem]:
    from deepinfer_cli.opbench.cases.attention import make_problem
    from engine.ops.row_attention import PackedKeys
    from engine.ops.triton.row_attention import Tuning, launch

    for rows in (1, 8, 64, 256, 4096):
        problems = [make_problem(setting, rows, rows == 4096) for _ in range(2 if rows <= 64 else 1)]

        def run(count: int, number: int, problems: Any = problems, part_keys: int = 0, joined: int = 0) -> Tensor:
            q, rot, sources, sink = problems[number]
            some = [PackedKeys(s.rows, s.index[:count]) for s in sources]
            return launch(q[:count], rot[:count], some, sink, q.shape[2] ** -0.5, tuning=Tuning(joined=joined), part_keys=part_keys)

        forms = {f"parts of {keys}": partial(run, part_keys=keys) for keys in (320, 64, 128, 192, 640)}
        forms |= {f"parts of {keys}, joined": partial(run, part_keys=keys, joined=1) for keys in (320, 192, 128)}
        yield Problem(f"attention, {rows} rows", rows, len(problems), forms | {"free": run})


def boundary(setting: Setting) -> Iterator[Problem]:
    from deepinfer_cli.opbench.cases.moe import boundary_inputs
    from engine.ops.hyper_boundary import Written
    from engine.ops.triton.hyper_boundary import Division, division, launch

    for rows in (1, 64, 4096):
        sets = boundary_inputs(setting, rows, 4 if rows == 1 else 1)

        def run(count: int, number: int, divided: Division, sets: Any = sets) -> Tensor:
            h, back, mixer, pre, norm, eps = sets[number]
            back = Written(back.y[:count], back.post[:count], back.comb[:count])
            found = launch(h[:count], back, mixer, pre[:count], norm, eps, divided)
            assert found.comb is not None
            assert found.post is not None
            return torch.cat((found.comb.flatten(1), found.post, found.x[:, :64].float()), 1)

        tried = [Division(16, 128, 4), Division(16, 128, 4, 1024), Division(16, 128, 2), Division(16, 128, 2, 1024)]
        if rows == 4096:
            tried += [Division(64, 128, steps, chunk, True, 4, 3) for steps in (2, 4, 8) for chunk in (4096, 1024)]
            tried += [Division(128, 128, 4, 4096, True, 8, 3), Division(64, 128, 40, 1024, True, 4, 3)]
        forms = {str(d)[8:]: partial(run, divided=d) for d in dict.fromkeys([*tried, division(rows)])}
        yield Problem(f"boundary, {rows} rows", rows, len(sets), forms)


PARTS: dict[str, Callable[[Setting], Iterator[Problem]]] = {
    "dense": products,
    "router": router,
    "attention": attention,
    "boundary": boundary,
}


def show(problem: Problem) -> None:
    print(problem.title, flush=True)
    alone = {name: form(1, 0)[0] for name, form in problem.forms.items()}
    calls = {name: [partial(form, problem.rows, number) for number in range(problem.sets)] for name, form in problem.forms.items()}
    times = time_side_by_side(calls, "cuda")
    for number, name in enumerate(problem.forms):
        row = calls[name][0]()[0]
        same = [place for place, bits in enumerate(alone.values()) if torch.equal(bits, row)]
        apart = max(float((row.float() - bits.float()).abs().max() / bits.float().abs().max()) for bits in alone.values())
        print(f"  {number}: {times[name].median:9.1f} us  {name:75s} apart {apart:.0e}, alone as {same}", flush=True)


@torch.inference_mode()
def main() -> int:
    began, setting = time.monotonic(), Setting("cuda")
    for part in sys.argv[1:] or PARTS:
        for problem in PARTS[part](setting):
            show(problem)
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
