"""Experts, dense products of few rows and the boundary of hyper-connections at the released shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from deepinfer_cli.opbench.case import Call, Case, Prepared, Setting, Target, num_copies, relative_error
from engine.ops.hyper_boundary import HYPER_BOUNDARY, Mixer, Written
from engine.ops.packed_experts import PACKED_EXPERTS, PackedExperts
from engine.ops.packed_linear import PACKED_LINEAR
from engine.ops.packed_weights import Format, PackedWeights, pack_fp8, pack_gate_up, unpack
from engine.ops.weight_formats import encode_fp4_rows, encode_fp8_blocks

# Source: config keys n_routed_experts, num_experts_per_tok, hidden_size, moe_intermediate_size, swiglu_limit, rms_norm_eps.
_EXPERTS, _CHOICES, _HIDDEN, _INNER, _LIMIT, _EPS = 384, 6, 5120, 2304, 10.0, 1e-20
# Source: table of tensors of the released checkpoint. name -> (groups, rows, columns).
_DENSE = {"wq_a+wkv": (1, 1792, 5120), "wq_b": (1, 32768, 1280), "wo_a": (8, 1024, 4096), "wo_b": (1, 5120, 8192)}


def _experts(setting: Setting, num: int, hidden: int, inner: int) -> PackedExperts:
    def draw(encode: Callable[[Tensor], tuple[Tensor, Tensor]], rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return encode(setting.normal(rows, columns, std=columns**-0.5, dtype=torch.float32))

    def make() -> PackedExperts:
        w13 = PackedWeights.empty(Format.FP4, num, 2 * inner, hidden, setting.device)
        w2 = PackedWeights.empty(Format.FP4, num, hidden, inner, setting.device)
        for expert in range(num):
            both = pack_gate_up(draw(encode_fp4_rows, inner, hidden), draw(encode_fp4_rows, inner, hidden), Format.FP4)
            w13.codes[expert], w13.scales[expert] = both.codes[0], both.scales[0]
            w2.fill(expert, *draw(encode_fp4_rows, hidden, inner))
        shared = pack_gate_up(draw(encode_fp8_blocks, inner, hidden), draw(encode_fp8_blocks, inner, hidden), Format.FP8)
        return PackedExperts(w13, w2, shared, pack_fp8(*draw(encode_fp8_blocks, hidden, inner)))

    return setting.shared("experts", make)


def plain_experts(setting: Setting, experts: PackedExperts) -> tuple[Tensor, Tensor]:
    """bf16 copies for the library's grouped product: w13 [E, C, 2I] and w2 [E, I, C], views of row-major weights."""

    def make() -> tuple[Tensor, Tensor]:
        both = [torch.stack([unpack(w, e, torch.bfloat16) for e in range(w.groups)]).transpose(1, 2) for w in (experts.w13, experts.w2)]
        return both[0], both[1]

    return setting.shared("plain experts", make)


def expert_problem(setting: Setting, rows: int) -> tuple[Tensor, Tensor, Tensor, PackedExperts, float]:
    """Tokens, their choices and the choices' weights, experts, and the limit of their activation."""
    num, choices, hidden, inner = (8, 2, 64, 32) if setting.small else (_EXPERTS, _CHOICES, _HIDDEN, _INNER)
    ids = torch.rand(rows, num, device=setting.device, generator=setting.generator()).topk(choices).indices
    weights = torch.rand(rows, choices, device=setting.device, generator=setting.generator())
    return setting.normal(rows, hidden), ids, weights, _experts(setting, num, hidden, inner), _LIMIT


def _experts_case(id: str, tokens: int, target: Target) -> Case:
    def prepare(setting: Setting) -> Prepared:
        num, choices, hidden, inner = (8, 2, 64, 32) if setting.small else (_EXPERTS, _CHOICES, _HIDDEN, _INNER)
        rows = min(tokens, 5) if setting.small else tokens
        experts = _experts(setting, num, hidden, inner)
        setting.select(PACKED_EXPERTS)
        sets = []
        for _ in range(1 if tokens > 64 else 4):
            sets.append(expert_problem(setting, rows)[:3])
        touched = sum(len(set(ids.flatten().tolist())) for _, ids, _ in sets) / len(sets)
        num_bytes = touched * inner * hidden * 3 * 17 / 32 + inner * hidden * 3 + rows * hidden * 4
        flops = 2 * rows * (choices + 1) * inner * hidden * 3
        calls = [partial(PACKED_EXPERTS, *s, experts, _LIMIT, False) for s in sets]
        peers: Mapping[str, list[Call]] = {}
        if setting.device == "cuda":
            plain = plain_experts(setting, experts)
            peers = {"torch._grouped_mm": [grouped(s[0], s[1], s[2], plain, experts) for s in sets]}

        def check() -> tuple[float, float]:
            few = torch.arange(rows, device=setting.device)[:: max(1, rows // 8)][:8]
            x, ids, weights = sets[0]
            want = PACKED_EXPERTS.reference(x[few], ids[few], weights[few], experts, _LIMIT, False)
            return relative_error(PACKED_EXPERTS(x, ids, weights, experts, _LIMIT, False)[few], want), PACKED_EXPERTS.tolerance.bf16

        return Prepared(calls, num_bytes, flops, peers, check, {"touched": round(touched, 1)})

    return Case(id, {"batch" if tokens <= 256 else "tokens": tokens}, prepare, target)


def grouped(x: Tensor, ids: Tensor, weights: Tensor, plain: tuple[Tensor, Tensor], experts: PackedExperts) -> Call:
    """The library's grouped products on bf16 copies, tokens grouped beforehand (which flatters it), and the shared expert."""
    order = ids.flatten().sort(stable=True).indices
    ends = torch.bincount(ids.flatten(), minlength=len(plain[0])).cumsum(0).to(torch.int32)
    factor = weights.flatten()[order, None]
    token = order // ids.shape[1]
    shared13, shared2 = (unpack(w, 0, torch.bfloat16) for w in (experts.shared_w13, experts.shared_w2))

    def act(both: Tensor) -> Tensor:
        gate, up = both.view(len(both), -1, 2, 8).unbind(2)
        return (silu(gate.float().clamp(max=_LIMIT)) * up.float().clamp(-_LIMIT, _LIMIT)).flatten(1)

    def call() -> Tensor:
        hidden = (act(torch._grouped_mm(x[token], plain[0], offs=ends)) * factor).bfloat16()
        out = torch._grouped_mm(hidden, plain[1], offs=ends)
        total = torch.zeros(x.shape, device=x.device).index_add_(0, token, out.float())
        return (total + linear(act(linear(x, shared13)).bfloat16(), shared2)).bfloat16()

    return call


def _dense_case(rows: int, target: Target) -> Case:
    """All projections of one layer in a row, each with its own input."""

    def prepare(setting: Setting) -> Prepared:
        shapes = {"a": (1, 64, 96), "b": (2, 32, 64)} if setting.small else _DENSE
        setting.select(PACKED_LINEAR)
        packed, plain, inputs = [], [], []
        for groups, height, columns in shapes.values():
            weights = PackedWeights.empty(Format.FP8, groups, height, columns, setting.device)
            for group in range(groups):
                weights.fill(group, *encode_fp8_blocks(setting.normal(height, columns, std=columns**-0.5, dtype=torch.float32)))
            packed.append(weights)
            plain.append(torch.stack([unpack(weights, group, torch.bfloat16) for group in range(groups)]))
            inputs.append(setting.normal(rows, groups * columns))
        # One call reads 127 MB, twice the L2 cache: no copies are needed.
        num_bytes = sum(w.groups * w.rows * w.columns for w in packed) + sum(2 * x.numel() for x in inputs)
        flops = sum(2 * rows * w.groups * w.rows * w.columns for w in packed)

        def ours() -> list[Tensor]:
            return [PACKED_LINEAR(x, w) for x, w in zip(inputs, packed, strict=True)]

        def library() -> list[Tensor]:
            grouped = [x.view(rows, len(w), -1).transpose(0, 1) for x, w in zip(inputs, plain, strict=True)]
            return [torch.bmm(x, w.transpose(1, 2)).transpose(0, 1).flatten(1) for x, w in zip(grouped, plain, strict=True)]

        def check() -> tuple[float, float]:
            return max(relative_error(a, b) for a, b in zip(ours(), library(), strict=True)), PACKED_LINEAR.tolerance.bf16

        return Prepared([ours], num_bytes, flops, {"library bf16": [library]}, check)

    return Case("k.dense.decode", {"rows": rows}, prepare, target)


def boundary_inputs(setting: Setting, rows: int, sets: int) -> list[tuple[Tensor, Written, Mixer, Tensor, Tensor, float]]:
    """Arguments of `hyper_boundary`: streams and outputs of their own, one mixer."""
    width = 64 if setting.small else _HIDDEN
    mixer = Mixer(
        setting.normal(24, 4 * width, std=0.02, dtype=torch.float32),
        torch.ones(24, device=setting.device),
        setting.normal(24, dtype=torch.float32),
        20,
        1e-6,
    )
    norm = setting.normal(width, std=0.1) + 1
    made = []
    for _ in range(sets):
        post, pre = (setting.normal(rows, 4, dtype=torch.float32).sigmoid() for _ in range(2))
        comb = setting.normal(rows, 4, 4, dtype=torch.float32).softmax(-1)
        made.append((setting.normal(rows, 4, width), Written(setting.normal(rows, width), post, comb), mixer, pre, norm, _EPS))
    return made


def _mhc_case(rows: int, target: Target) -> Case:
    def prepare(setting: Setting) -> Prepared:
        width = 64 if setting.small else _HIDDEN
        setting.select(HYPER_BOUNDARY)
        num_bytes = rows * width * 2 * (4 + 4 + 1 + 1) + 24 * 4 * width * 4
        sets = boundary_inputs(setting, rows, num_copies(num_bytes, setting))
        calls = [partial(HYPER_BOUNDARY, *s) for s in sets]
        eager = [partial(HYPER_BOUNDARY.reference, *s) for s in sets]

        def check() -> tuple[float, float]:
            got, want = calls[0](), eager[0]()
            return max(relative_error(getattr(got, name), getattr(want, name)) for name in ("h", "x", "pre", "post", "comb")), 1e-2

        return Prepared(calls, num_bytes, 2 * rows * 24 * 4 * width, {"torch eager": eager}, check)

    return Case("k.mhc", {"rows": rows}, prepare, target)


CASES = [
    *(
        _experts_case("k.experts.decode", batch, Target("copy", must, aim, peers={"torch._grouped_mm": least}))
        for batch, must, aim, least in ((1, 0.35, 0.60, 0.0), (8, 0.60, 0.75, 3.0), (64, 0.60, 0.80, 3.0), (256, 0.55, 0.80, 0.0))
    ),
    _experts_case("k.experts.prefill", 4096, Target("bf16", 0.35, 0.50, peers={"torch._grouped_mm": 1.3})),
    _experts_case("k.experts.prefill", 32768, Target("bf16", 0.40, 0.60)),
    *(_dense_case(rows, Target("copy", 0.50, 0.70)) for rows in (1, 8)),
    *(_mhc_case(rows, Target("time", 16.0, 8.0)) for rows in (1, 8)),
    _mhc_case(64, Target("time")),
    _mhc_case(4096, Target("copy", 0.55, 0.75)),
]
