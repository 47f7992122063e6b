"""The measuring frame on the CPU: levels, wrong results, failures, peers, tables."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from deepinfer_cli.opbench import registry
from deepinfer_cli.opbench.case import Case, NotMeasured, Prepared, Setting, Target, choose, num_copies, relative_error
from deepinfer_cli.opbench.ceilings import Ceilings, measure_ceilings
from deepinfer_cli.opbench.public_peers import optional_peer
from deepinfer_cli.opbench.records import level, measure, reached, run_cases
from deepinfer_cli.opbench.table import markdown, plain_text, rows
from engine.errors import MachineError
from hicache.errors import ConfigError

CEILINGS = Ceilings(copy_tbs=4.0, bf16_tflops=800.0, h2d_gbs=50.0)
SHARE = Target("copy", 0.5, 0.7)
CPU = Setting("cpu", small=True)


def case(prepared: Callable[[Setting], Prepared], target: Target = SHARE) -> Case:
    return Case("k.test", {"rows": 3}, prepared, target)


def adding(setting: Setting) -> Prepared:
    x = torch.ones(64, device=setting.device)
    return Prepared(
        [lambda: x + 1], num_bytes=512, peers={"twice": [lambda: (x + 1, x + 1)]}, check=lambda: (1e-7, 1e-6), params={"hits": 2}
    )


def test_record_has_time_bytes_peer_error_and_spread() -> None:
    record = measure(case(adding), CPU, CEILINGS)
    assert record["schema"] == "dix.bench/1"
    assert record["params"] == {"rows": 3, "hits": 2}
    assert record["time_us"]["p10"] <= record["time_us"]["median"] <= record["time_us"]["p90"]
    assert record["bytes"] == 512
    assert record["peer"]["name"] == "twice"
    assert record["peer"]["ratio"] > 0
    assert record["error"] == {"rel": 1e-7, "limit": 1e-6}
    assert "level" not in record  # small shapes are never held against a target
    json.dumps(record)


@pytest.mark.parametrize("error", [0.5, float("nan"), float("inf")])
def test_wrong_result_has_no_time(error: float) -> None:
    record = measure(case(lambda setting: Prepared([lambda: None], 1.0, check=lambda: (error, 0.1))), CPU, CEILINGS)
    assert record["level"] == "wrong"
    assert "time_us" not in record


def test_case_that_raises_does_not_end_the_run() -> None:
    def broken(setting: Setting) -> Prepared:
        raise RuntimeError("no such kernel")

    records = run_cases([case(broken), case(adding)], CPU, CEILINGS)
    assert [r.get("level") for r in records] == ["failed", None]
    assert "no such kernel" in records[0]["error"]["message"]
    assert records[1]["note"] == "functional check, not performance"
    assert "no such kernel" in plain_text(records)


def test_case_with_nothing_to_measure_is_skipped_with_its_reason() -> None:
    def nothing(setting: Setting) -> Prepared:
        raise NotMeasured("not compiled in 3 s")

    records = run_cases([case(nothing), case(adding)], CPU, CEILINGS)
    assert records[0]["level"] == "skipped"
    assert "not compiled in 3 s" in plain_text(records)
    assert "time_us" in records[1]


def test_peer_that_cannot_run_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> list[Callable[[], Any]]:
        raise ImportError("No module named 'fast_kernels'")

    assert optional_peer("fast kernels", missing) == {}
    assert "fast kernels is left out: ImportError: No module named" in caplog.text


def test_peer_is_timed_on_the_same_samples() -> None:
    order: list[str] = []
    prepared = Prepared([lambda: order.append("a")], 1.0, peers={"b": [lambda: order.append("b")]})
    measure(case(lambda setting: prepared), CPU, CEILINGS)
    changes = sum(x != y for x, y in pairwise(order))
    assert changes > 8  # samples alternate


@pytest.mark.parametrize(
    ("target", "median_us", "value", "wanted"),
    [
        (Target("copy", 0.5, 0.7), 0.25, 1.0, "aim"),
        (Target("copy", 0.5, 0.7), 0.4, 0.625, "must"),
        (Target("copy", 0.5, 0.7), 1.0, 0.25, "below"),
        (Target("bf16", 0.5, 0.7), 0.5, 0.5, "must"),
        (Target("h2d", 0.5, 0.7), 20.0, 1.0, "aim"),
        (Target("time", 16.0, 10.0), 12.0, 12.0, "must"),
        (Target("time", 16.0, 10.0), 17.0, 17.0, "below"),
        (Target("over_floor", 5.0, 3.0), 0.5, 2.0, "aim"),
        (Target("floor", 0.5, 0.7), 0.5, 0.5, "must"),
        (Target("d2h", 0.5, 0.7), 1.0, None, None),
    ],
)
def test_level_compares_with_the_named_ceiling(target: Target, median_us: float, value: float | None, wanted: str | None) -> None:
    # 1 MB: 0.25 us of copying at 4 TB/s, 20 us over PCIe at 50 GB/s; 200 MFLOP: 0.25 us at 800 TFLOP/s.
    found = reached(target, median_us, Prepared([], 1e6, 200e6), CEILINGS)
    assert found == (pytest.approx(value) if value is not None else None)
    assert level(target, found, {}) == wanted


def test_level_is_below_when_the_named_peer_is_too_close() -> None:
    target = Target("copy", 0.5, 0.7, peers={"library": 3.0})
    assert level(target, 0.9, {"library": 2.9}) == "below"
    assert level(target, 0.9, {"library": 3.1}) == "aim"
    assert level(target, 0.9, {}) == "below"


def test_choose_takes_cases_by_part_of_their_name_and_refuses_unknown_ones() -> None:
    cases = [case(adding), Case("k.other", {}, adding, Target("time"))]
    assert choose(cases, ["rows=3"]) == cases[:1]
    assert choose(cases, []) == cases
    with pytest.raises(ConfigError, match="nothing"):
        choose(cases, ["nothing"])


def test_relative_error_counts_misplaced_nans_as_infinite() -> None:
    wanted = torch.tensor([1.0, -2.0, float("-inf")])
    assert relative_error(torch.tensor([1.0, -1.9, float("-inf")]), wanted) == pytest.approx(0.05)
    assert relative_error(torch.tensor([1.0, float("nan"), float("-inf")]), wanted) == float("inf")


def test_inputs_rotate_out_of_the_cache_on_a_gpu_only() -> None:
    assert num_copies(30e6, Setting("cuda")) == 4
    assert num_copies(1e9, Setting("cuda")) == 1
    assert num_copies(30e6, CPU) == 1


def test_setting_makes_shared_things_once() -> None:
    made: list[int] = []
    setting = Setting("cpu")
    for _ in range(2):
        assert setting.shared("layer", lambda: made.append(1) or "weights") == "weights"
    setting.drop("layer")
    setting.shared("layer", lambda: made.append(1) or "weights")
    assert len(made) == 2


@pytest.mark.parametrize("group", ["kernels", "layers"])
def test_every_registered_case_runs_small_on_the_cpu(group: str) -> None:
    records = run_cases(registry.all_cases(group), CPU, CEILINGS)
    assert records
    bad: list[dict[str, Any]] = [r for r in records if r.get("level") in ("wrong", "failed")]
    assert not bad, bad


def test_cases_have_distinct_names() -> None:
    names = [c.name for group in ("kernels", "layers") for c in registry.all_cases(group)]
    assert len(names) == len(set(names))


def test_ceilings_of_a_cpu_are_positive_and_without_a_bus() -> None:
    found = measure_ceilings("cpu", small=True)
    assert found.copy_tbs > 0
    assert found.bf16_tflops > 0
    assert found.h2d_gbs is None


def test_tables_have_one_row_per_record() -> None:
    records = run_cases([case(adding)], CPU, CEILINGS)
    assert len(rows(records)) == 1
    assert markdown(records).count("\n") == 2
    assert "k.test rows=3 hits=2" in plain_text(records)


def test_without_a_gpu_the_command_says_what_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_cli.commands.bench_ops import resolve_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="no GPU") as caught:
        resolve_device("auto")
    assert "--device cpu" in caught.value.hint
    assert resolve_device("cpu") == "cpu"
