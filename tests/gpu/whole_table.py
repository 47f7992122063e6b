"""The tables of a run of the whole model: what its ranks have found, each figure beside its prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.models.config import ModelConfig
from tests.gpu import whole_predictions as predict
from tests.gpu.whole_session import Sizes

Report = dict[str, Any]


def tables(out: Path, config: ModelConfig, sizes: Sizes, ranks: int, drafts: int) -> Iterator[str]:
    """Lines for as much as the ranks have written. A time is that of the slowest rank."""
    files = [out / f"rank-{rank}.json" for rank in range(ranks)]
    reports = [json.loads(file.read_text()) for file in files if file.exists()]
    if len(reports) < ranks:
        yield f"{ranks - len(reports)} of {ranks} ranks have written nothing"
    if not reports:
        return
    held, peak = (max(report.get(name, 0.0) for report in reports) for name in ("memory_gib", "peak_gib"))
    loaded = f"ready in {max(r['load_s'] for r in reports):.0f} s; {held:.1f} GiB a GPU, at most {peak:.1f}"
    yield "; ".join([f"{config.text.num_hidden_layers} layers, {ranks} ranks, {drafts} drafts", loaded, *reports[0]["recordings"]])
    yield from _steps(reports, "decode", reports[0]["path"], config, sizes, ranks, drafts)
    yield from _drafts(reports, ranks)
    yield from _shares(reports[0])
    yield from _prefill(reports, config, sizes, ranks)
    yield from _ttft(reports, config, sizes, ranks)
    yield from _steps(reports, "routes", f"recorded ({reports[0].get('route', '')})", config, sizes, ranks, drafts)
    yield from _steps(reports, "eager", "eager", config, sizes, ranks, drafts)
    for rank, report in enumerate(reports):
        yield from (f"rank {rank}, {part}: {error}" for part, error in report.get("errors", {}).items())


def failed_parts(out: Path) -> list[str]:
    """Parts of which a rank has kept an error."""
    return sorted({part for file in out.glob("rank-*.json") for part in json.loads(file.read_text()).get("errors", {})})


def _slowest(reports: list[Report], part: str, key: str, figure: str | None = None) -> float:
    """The largest of all ranks; 0 where one of them has none."""
    values = [report.get(part, {}).get(key) for report in reports]
    values = [value.get(figure) if figure and value else value for value in values]
    return 0.0 if None in values else max(values)


def _steps(reports: list[Report], part: str, path: str, config: ModelConfig, sizes: Sizes, ranks: int, drafts: int) -> Iterator[str]:
    keys = list(reports[0].get(part, {}))
    if not keys:
        return
    eager = part == "eager"
    yield f"\n{path} steps of the runner, context {sizes.context:,}"
    yield "kind    batch       ms  predicted  floor ms  over floor  tok/s a user  tok/s a GPU"
    for kind, rows in (("step", 1), ("verify", 1 + drafts), ("draft", 0)):
        for key in keys:
            took, batch = _slowest(reports, part, key, kind), int(key)
            if not took:
                continue
            if kind == "draft":
                yield f"{kind:7s} {batch:5d} {took:8.2f} {predict.draft_ms(config, batch, ranks):10.2f}"
                continue
            floor = predict.floor_ms(config, batch, ranks, sizes.context, rows)
            guess = predict.step_ms(config, batch, ranks, sizes.context, rows, eager)
            speed = f" {1e3 / took:13.1f} {1e3 * batch / took / ranks:12.1f}" if kind == "step" else ""
            yield f"{kind:7s} {batch:5d} {took:8.2f} {guess:10.2f} {floor:9.3f} {took / floor:11.2f}{speed}"


def _drafts(reports: list[Report], ranks: int) -> Iterator[str]:
    """Engines. The bound is what the runner's own times allow: accept length times t(plain) over t(verify) + t(draft)."""
    found = reports[0].get("drafts", {})
    if found:
        yield "\nsteps of engines; accept length 0: no drafts. gain: tokens/s over plain; bound: accept length · plain / (verify + draft)"
        yield "batch  forced  reached  step ms  tok/s a user  tok/s a GPU   gain  bound  gain/bound"
    plain: dict[str, float] = {}
    for key in found:
        batch, length = key.split()
        parts = [report["drafts"][key] for report in reports if key in report.get("drafts", {})]
        speed = sum(part["tokens"] for part in parts) / max(part["seconds"] for part in parts)
        plain.setdefault(batch, speed)
        accept = max(part["accept"] for part in parts)
        line = f"{batch:>5s} {float(length):7.2f} {accept:8.2f} {max(part['step'] for part in parts):8.2f}"
        line += f" {speed / int(batch):13.1f} {speed / ranks:12.1f}"
        times = [_slowest(reports, "decode", batch, kind) for kind in ("step", "verify", "draft")]
        if accept and all(times):
            gain, bound = speed / plain[batch], accept * times[0] / (times[1] + times[2])
            line += f" {gain:6.2f} {bound:6.2f} {gain / bound:11.2f}"
        yield line


def _shares(report: Report) -> Iterator[str]:
    found = report.get("shares", {})
    if found:
        names = list(next(iter(found.values()))["parts"])
        yield "\nkernels of rank 0 in a decode step, ms; shared experts run beside the exchange, so parts may overlap"
        yield "batch    whole     idle  " + "  ".join(f"{name:>11s}" for name in names)
    for key, step in found.items():
        yield f"{key:>5s} {step['whole']:8.2f} {step['idle']:8.2f}  " + "  ".join(f"{ms:11.3f}" for ms in step["parts"].values())
        largest = ", ".join(f"{name} {ms:.3f}" for name, ms in list(step["others"].items())[:3])
        yield f"{'':7s}other: {largest}"


def _prefill(reports: list[Report], config: ModelConfig, sizes: Sizes, ranks: int) -> Iterator[str]:
    keys = list(reports[0].get("prefill", {}))
    if keys:
        ceiling = max(report["bf16_tflops"] for report in reports)
        yield f"\nprefill; own: a prompt of every rank, all at once; together: one of all ranks; bf16 {ceiling:.0f} TFLOP/s here"
        yield " tokens  how             s  predicted  tok/s a GPU  of bf16"
    for key in keys:
        length, how = key.split()
        tokens, together = int(length), how == "together"
        took = _slowest(reports, "prefill", key)
        if not took:
            continue
        each = tokens / ranks if together else tokens
        flops = predict.prefill_flops(config, tokens, sizes.keep) * each / tokens
        guess = predict.prefill_ms(config, tokens, sizes.keep, ranks, together) / 1e3
        yield f"{tokens:7d}  {how:9s} {took / 1e3:7.3f} {guess:10.3f} {1e3 * each / took:12.0f} {flops / took / ceiling / 1e9:8.2f}"


def _ttft(reports: list[Report], config: ModelConfig, sizes: Sizes, ranks: int) -> Iterator[str]:
    found = reports[0].get("ttft", {})
    if found:
        yield "\nfirst token through engines, ms: of one rank, and of a prompt of every rank at once"
        yield " prefix  cached  cold  predicted  cold of all  predicted     hit  hit of all  predicted"
    for key in found:
        length, keep = int(key), sizes.keep
        cold, cold_all, hit, hit_all = (_slowest(reports, "ttft", key, name) for name in ("cold", "cold_all", "hit", "hit_all"))
        cached = found[key].get("cached", 0)
        guesses = [predict.prefill_ms(config, length, keep, count, False) for count in (1, ranks)]
        guess = predict.hit_ms(config, length, length + sizes.new_tokens - cached, ranks)
        line = f"{length:7d} {cached:7d} {cold:5.0f} {guesses[0]:10.0f} {cold_all:12.0f} {guesses[1]:10.0f}"
        yield f"{line} {hit:7.1f} {hit_all:11.1f} {guess:10.1f}"
