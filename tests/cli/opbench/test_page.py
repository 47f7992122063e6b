"""The page that a run on a GPU leaves."""

from typing import Any

from deepinfer_cli.opbench.page import extrapolated, page


def record(id: str, median: float, **params: Any) -> dict[str, Any]:
    ceilings = {"copy_tbs": 4.2, "bf16_tflops": 700.0}
    share = {"of": "over_floor", "value": 2.0, "must": 3.0, "aim": 1.5}
    return {
        "id": id, "params": params, "time_us": {"median": median}, "captured": True, "same_twice_spread": 0.01, "share": share,
        "level": "must", "ceilings": ceilings, "env": {"gpu": "H200", "commit": "abc"},
    }  # fmt: skip


LAYERS = [
    record("l.decode", us, layer=name, batch=1, context=8_192)
    for name, us in {"ngram": 10, "source2": 20, "follower2": 30, "source1": 40, "follower1": 50, "candidates": 60}.items()
]


def test_whole_model_is_the_sum_of_kinds_times_their_counts_and_says_that_it_is_extrapolated() -> None:
    text = extrapolated(LAYERS, [record("k.head", 300.0, rows=1)], 1)
    assert "**1.86 ms**" in text  # 20 + 60 + 450 + 40 + 750 + 240 + 300 us
    assert "extrapolation" in text
    assert extrapolated(LAYERS[1:], [record("k.head", 300.0, rows=1)], 1) == ""


def test_page_names_machine_levels_and_checks() -> None:
    text = page(LAYERS, {"golden": {"passed": False, "seconds": 3.0, "detail": "p3 | off"}}, "Title")
    assert text.startswith("# Title")
    assert "gpu H200" in text
    assert "Of 6 cases with a target: 6 must." in text
    assert "| golden | failed | 3.0 | p3 / off |" in text


def test_page_says_what_batch_invariant_mode_costs_the_same_layer() -> None:
    touched = [{**r, "params": r["params"] | {"touched": 6.0}} for r in LAYERS]
    slower = record("l.decode.invariant", 57.5, layer="follower1", batch=1, context=8_192, touched=6.5)
    text = page([*touched, slower, record("l.prefill.invariant", 9.0, layer="follower2", tokens=4096)], {}, "Title")
    assert "bound 20 %" in text
    assert "l.decode batch 1, context 8192, layer follower1 +15.0%." in text  # nothing of prefill, which has no other line
    assert "bound 20 %" not in page(touched, {}, "Title")
