"""Single layers for measurements read memory that somebody has written."""

from __future__ import annotations

import time

import pytest
import torch

from deepinfer_cli.opbench.case import Call, NotMeasured, Setting
from deepinfer_cli.opbench.cases.layers import CASES, LAYERS, _load
from deepinfer_cli.opbench.plain_layer import compiled
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


def test_a_layer_that_does_not_compile_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(call: Call, **options: object) -> Call:
        def wait() -> None:
            while True:
                time.sleep(0.01)

        return wait

    monkeypatch.setattr(torch, "compile", slow)
    with pytest.raises(NotMeasured, match="not compiled in 1 s"):
        compiled(lambda: None, 1.0)


def test_a_layer_that_does_not_compile_at_all_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Call, **options: object) -> Call:
        def fail() -> None:
            raise RuntimeError("no kernel for this\nand much more")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(NotMeasured, match=r"not compiled: RuntimeError: no kernel for this$"):
        compiled(lambda: None, 30.0)


def test_a_compiled_layer_is_run_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    seen: list[int] = []
    compiled(lambda: seen.append(1), 30.0)
    assert seen == [1, 1]
