"""A page for `docs/` from the records of one run: ceilings, what was measured against what, and what follows for the whole model."""

from __future__ import annotations

from typing import Any

from deepinfer_cli.opbench.table import ceilings_line, markdown
from deepinfer_cli.units import show_number

# How many of the 40 layers are like each measured one. Layer 0 has no n-gram table and is counted like layer 1, a little too dear.
_COUNTS = {"ngram": 2, "source2": 3, "follower2": 15, "source1": 1, "follower1": 15, "candidates": 4}


def page(records: list[dict[str, Any]], checks: dict[str, dict[str, Any]], title: str) -> str:
    """records: of the groups kernels and layers. checks: name -> what else was checked, each with `passed` and `seconds`."""
    kernels = [r for r in records if r["id"].startswith("k.")]
    layers = [r for r in records if r["id"].startswith("l.")]
    parts = [f"# {title}", _machine(records), _verdict(records)]
    for head, part in (("Kernels", kernels), ("Layers", layers)):
        if part:
            parts += [f"## {head}", markdown(part)]
    whole = [extrapolated(layers, kernels, batch) for batch in (1, 64)]
    if any(whole):
        parts += ["## Extrapolated to 40 layers", *filter(None, whole)]
    parts.append(invariance_cost(layers))
    if checks:
        parts += ["## Checks", _checks(checks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def extrapolated(layers: list[dict[str, Any]], kernels: list[dict[str, Any]], batch: int) -> str:
    """Sum of the measured layer kinds times their counts, and the head: not a measurement, and says so. "" when a kind is missing."""
    found = {
        r["params"]["layer"]: r["time_us"]["median"]
        for r in layers
        if r["id"] == "l.decode" and r["params"]["batch"] == batch and r["params"]["context"] == 8_192 and "time_us" in r
    }
    heads = [r["time_us"]["median"] for r in kernels if r["id"] == "k.head" and r["params"]["rows"] == batch and "time_us" in r]
    if not _COUNTS.keys() <= found.keys() or not heads:
        return ""
    total = sum(found[name] * count for name, count in _COUNTS.items()) + heads[0]
    terms = " + ".join(f"{count} × {found[name]:,.0f}" for name, count in _COUNTS.items())
    return (
        f"Batch {batch}, context 8k, one GPU that would hold everything, in µs: {terms} + head {heads[0]:,.0f} "
        f"= **{total / 1e3:,.2f} ms** a step. "
        "An extrapolation from single layers; embedding, drafts and gaps between layers are not in it."
    )


def invariance_cost(layers: list[dict[str, Any]]) -> str:
    """What batch-invariant mode adds to the same layer, measured in the same run; "" without such lines."""
    times = {(r["id"], *sorted(r["params"].items())): r["time_us"]["median"] for r in layers if "time_us" in r}
    costs = []
    for name, time in times.items():
        plain = _without(times, name)
        if name[0].endswith(".invariant") and plain is not None:
            what = ", ".join(f"{key} {value}" for key, value in name[1:] if key != "touched")
            costs.append(f"{name[0].removesuffix('.invariant')} {what} {time / plain - 1:+.1%}")
    return f"Batch-invariant mode (bound 20 %, aim 10 %): {'; '.join(costs)}." if costs else ""


def _without(times: dict[tuple[Any, ...], float], name: tuple[Any, ...]) -> float | None:
    """Time of the same case outside the mode. What was drawn, the experts that were touched, may differ by a hair."""
    drawn = [part for part in name[1:] if part[0] != "touched"]
    plain = name[0].removesuffix(".invariant")
    return next((time for other, time in times.items() if other[0] == plain and [p for p in other[1:] if p[0] != "touched"] == drawn), None)


def _machine(records: list[dict[str, Any]]) -> str:
    if not records:
        return "Nothing was measured."
    env = records[0]["env"]
    names = ("gpu", "driver", "cuda", "torch", "triton", "commit")
    where = ", ".join(f"{name} {env[name]}" for name in names if env.get(name))
    return f"Measured in one run: {where}. Ceilings of that run: {ceilings_line(records[0])}."


def _verdict(records: list[dict[str, Any]]) -> str:
    levels = [r["level"] for r in records if r.get("level")]
    counted = ", ".join(
        f"{levels.count(level)} {level}" for level in ("aim", "must", "below", "wrong", "failed", "skipped") if level in levels
    )
    return f"Of {len(levels)} cases with a target: {counted}." if levels else ""


def _checks(checks: dict[str, dict[str, Any]]) -> str:
    lines = ["| check | result | seconds | detail |", "|---|---|---|---|"]
    for name, check in checks.items():
        detail = str(check.get("detail", "")).replace("|", "/")
        lines.append(f"| {name} | {'ok' if check['passed'] else 'failed'} | {show_number(check['seconds'])} | {detail} |")
    return "\n".join(lines)
