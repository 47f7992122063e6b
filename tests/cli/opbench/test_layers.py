"""Single layers for measurements read memory that somebody has written."""

from __future__ import annotations

from deepinfer_cli.opbench.case import Setting
from deepinfer_cli.opbench.cases.layers import CASES, LAYERS, _load
from engine.layer_runs import LayerRuns
from engine.ops.registry import select


def test_a_decode_step_of_a_ratio_2_source_finds_finite_partial_groups() -> None:
    runs = _load(Setting("cpu", small=True), LAYERS, None).runs
    runner = runs._runner
    for rows in runner.kv.partials.values():
        rows.fill_(float("nan"))  # what fresh memory may hold
    run = LayerRuns(runner, 4, 512).decode(LAYERS.index(2), 4, 512)
    assert run.calls[0]().isfinite().all()


def test_layers_of_batch_invariant_mode_run_last_since_the_process_keeps_it() -> None:
    of_mode = [case.id.endswith(".invariant") for case in CASES]
    assert of_mode == sorted(of_mode)
    setting = Setting("cpu", small=True)
    try:
        for case in (case for case in CASES if case.id.endswith(".invariant") and case.params.get("batch") in (None, 1)):
            prepared = case.prepare(setting)
            assert prepared.check is not None
            assert prepared.check()[0] == 0.0
    finally:
        select("auto", "cpu")
