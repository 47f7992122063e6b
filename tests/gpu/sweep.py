"""Forms of a kernel against each other on a GPU: `python -m tests.gpu.sweep OUT [experts|attention|boundary|compress ...]`.

About two minutes for all. Every kernel's forms run in a process of their own: one that hangs or dies costs its own time only. Each form is
compared with the reference before it is timed, and the forms of a kernel are timed side by side. Prints one table; what wins becomes the
default.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from deepinfer_cli.opbench.case import Call, Setting, relative_error
from deepinfer_cli.opbench.timing import time_side_by_side
from engine.ops.packed_weights import PackedWeights

LIMIT_S = 80  # building the CUDA sources included
# Forms of a kernel at one size: name -> calls on one input set each; and what tells how wrong the first call is.
Forms = Mapping[str, tuple[Sequence[Call], Callable[[], float]]]


def boundary(setting: Setting) -> dict[str, Forms]:
    from deepinfer_cli.opbench.cases.moe import boundary_inputs
    from engine.ops.hyper_boundary import HYPER_BOUNDARY
    from engine.ops.triton.hyper_boundary import Division, division, launch

    best = division(4096)
    tried = [best, replace(best, stages=4), replace(best, recent=False), replace(best, early=False), replace(best, chunk=2048)]
    found: dict[str, Forms] = {}
    for rows in (2,) if setting.small else (1, 64, 4096):
        sets = boundary_inputs(setting, rows, 4 if rows <= 64 else 1)
        wanted = HYPER_BOUNDARY.reference(*sets[0])

        def form(divided: Division, sets=sets, wanted=wanted) -> tuple[Sequence[Call], Callable[[], float]]:
            calls = [partial(launch, *inputs, divided) for inputs in sets]
            return calls, lambda: max(relative_error(getattr(calls[0](), name), getattr(wanted, name)) for name in ("h", "x", "comb"))

        own = division(rows)
        few = [own, replace(own, early=False), replace(own, chunk=1024), replace(own, chunk=8192)]
        found[f"boundary, {rows} rows"] = {str(divided)[8:]: form(divided) for divided in (few if rows <= 64 else tried)}
    return found


def attention(setting: Setting) -> dict[str, Forms]:
    from deepinfer_cli.opbench.cases.attention import make_problem
    from engine.ops.row_attention import ROW_ATTENTION, PackedKeys
    from engine.ops.triton.row_attention import Tuning, launch

    found: dict[str, Forms] = {}
    for rows, splits in ((8, (0, 5)), (64, (0, 1)), (256, (0,)), (1536, (0,)), (4096, (0,))):
        shared = rows == 4096
        problems = [make_problem(setting, 4 if setting.small else rows, shared) for _ in range(2 if rows <= 64 else 1)]
        q, rot, sources, sink = problems[0]
        few = [PackedKeys(s.rows, s.index[:8].contiguous()) for s in sources]
        scale = q.shape[2] ** -0.5
        wanted = ROW_ATTENTION.reference(q[:8].float(), rot[:8], few, sink, scale, 0)

        def form(splits: int, tuning: Tuning, problems=problems, wanted=wanted, scale=scale) -> tuple[Sequence[Call], Callable[[], float]]:
            calls = [partial(launch, *problem, scale, splits, tuning) for problem in problems]
            return calls, lambda: relative_error(calls[0]()[:8], wanted)

        forms = {f"decoders={warps} splits={n}": form(n, Tuning(decoders=warps)) for n in splits for warps in (0, 4, 8)}
        found[f"attention, {rows} rows{', one sequence' if shared else ''}"] = forms
    return found


def compress(setting: Setting) -> dict[str, Forms]:
    from deepinfer_cli.opbench.cases.index import compress_problem
    from engine.ops.compress_entries import COMPRESS_ENTRIES
    from engine.ops.triton.compress_entries import Tuning
    from engine.ops.triton.compress_entries import compress as launch

    found: dict[str, Forms] = {}
    for tokens in (8,) if setting.small else (8, 4096):
        problem = compress_problem(setting, tokens)
        tried = [
            Tuning(), Tuning(early=True), Tuning(warps=2), Tuning(entries=2),
        ]  # fmt: skip

        def form(tuning: Tuning, problem=problem) -> tuple[Sequence[Call], Callable[[], float]]:
            run = partial(launch, tuning=tuning)
            return problem.calls(run), lambda: problem.wrong_share(run, COMPRESS_ENTRIES.reference)

        found[f"compress, {tokens} tokens"] = {str(tuning)[6:]: form(tuning) for tuning in tried}
    return found


def experts(setting: Setting) -> dict[str, Forms]:
    """Of all experts, and of one rank's 48 among eight, of which 256 tokens choose 32 rows each."""
    from deepinfer_cli.opbench.cases.moe import expert_problem
    from engine.ops.cuda import packed_experts
    from engine.ops.cuda.packed_gemm import Shape, machine
    from engine.ops.packed_experts import PACKED_EXPERTS

    shapes = {
        "warpgroups": Shape(16, warpgroups=True), "mma.sync": Shape(16), "mma.sync, 4 tiles": Shape(4),
    }  # fmt: skip
    found: dict[str, Forms] = {}
    for tokens, share in ((256, 48), (2048, 0), (4096, 0)):
        x, ids, weights, packed, limit = expert_problem(setting, tokens)
        if share:
            ids = ids % share
            packed = replace(packed, w13=_first(packed.w13, share), w2=_first(packed.w2, share))
        few = torch.arange(tokens, device=x.device)[:: tokens // 8][:8]
        wanted = PACKED_EXPERTS.reference(x[few], ids[few], weights[few], packed, limit, False)

        def form(
            shape: Shape, problem=(x, ids, weights, packed, limit), few=few, wanted=wanted
        ) -> tuple[Sequence[Call], Callable[[], float]]:
            def call() -> torch.Tensor:
                packed_experts.division = lambda *_: shape  # type: ignore[assignment]
                return packed_experts.launch(*problem, False, warpgroups=shape.warpgroups)

            return [call], lambda: relative_error(call()[few], wanted)

        def routed(shape: Shape, problem=(x, ids, weights, packed, limit)) -> tuple[Sequence[Call], Callable[[], float]]:
            def call() -> torch.Tensor:
                packed_experts.division = lambda *_: shape  # type: ignore[assignment]
                return packed_experts.run_routed(*machine(problem[0].device), *problem, False, warpgroups=shape.warpgroups)

            return [call], lambda: 0.0 if call().isfinite().all() else 1.0

        mine = {name: shape for name, shape in shapes.items() if tokens <= 2048 or "mma" not in name}
        found[f"experts, {tokens} tokens{f' of {share}' if share else ''}"] = {
            **{name: form(shape) for name, shape in mine.items()},
            **{f"{name}, routed alone": routed(shape) for name, shape in mine.items() if share},
        }
    return found


def _first(packed: PackedWeights, count: int) -> PackedWeights:
    return replace(packed, codes=packed.codes[:count], scales=packed.scales[:count])


KERNELS = {"experts": experts, "attention": attention, "boundary": boundary, "compress": compress}


@torch.inference_mode()
def sweep(kernel: str, device: str, out: Path) -> None:
    setting = Setting(device, small=device == "cpu")
    lines = []
    for title, forms in KERNELS[kernel](setting).items():
        print(title, flush=True)
        right: dict[str, Sequence[Call]] = {}
        for name, (calls, wrong) in forms.items():
            try:
                error = wrong()
            except Exception as problem:  # a form may not fit the machine; the others still count
                print(f"  {name:60s} {type(problem).__name__}: {str(problem)[:200]}", flush=True)
                continue
            print(f"  {name:60s} error {error:.1e}", flush=True)
            right |= {name: calls} if error <= 5e-2 else {}
        if not right:
            continue
        first = next(iter(right))
        for name, times in time_side_by_side(right | {f"{first} again": right[first]}, device).items():
            lines.append({"case": title, "form": name, **times.plain()})
            print(f"  {name:60s} {times.median:9.1f} us", flush=True)
        (out / f"sweep-{kernel}.json").write_text(json.dumps(lines, indent=1))


def main() -> int:
    out, *rest = Path(sys.argv[1]), *sys.argv[2:]
    device = "cpu" if "cpu" in rest else "cuda"
    out.mkdir(parents=True, exist_ok=True)
    if "alone" in rest:
        sweep(rest[0], device, out)
        return 0
    failed = 0
    for kernel in [name for name in rest if name in KERNELS] or list(KERNELS):
        began = time.monotonic()
        try:
            code = subprocess.run([sys.executable, "-m", "tests.gpu.sweep", str(out), kernel, "alone", device], timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            code = 124
        failed += code != 0
        print(f"{kernel}: status {code} after {time.monotonic() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
