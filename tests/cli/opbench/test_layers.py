"""Single layers for measurements read memory that somebody has written."""

from __future__ import annotations

from deepinfer_cli.opbench.case import Setting
from deepinfer_cli.opbench.cases.layers import LAYERS, _load
from engine.layer_runs import LayerRuns


def test_a_decode_step_of_a_ratio_2_source_finds_finite_partial_groups() -> None:
    runs = _load(Setting("cpu", small=True), LAYERS, None).runs
    runner = runs._runner
    for rows in runner.kv.partials.values():
        rows.fill_(float("nan"))  # what fresh memory may hold
    run = LayerRuns(runner, 4, 512).decode(LAYERS.index(2), 4, 512)
    assert run.calls[0]().isfinite().all()
