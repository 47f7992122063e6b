"""The parts of a run of the whole model that need no GPU: predictions, kernels by kind, tables of what ranks have written."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.models.config import parse_config
from engine.models.released import excerpt
from tests.gpu import whole_predictions as predict
from tests.gpu.ranks import run_together
from tests.gpu.whole_model import PARTS, small
from tests.gpu.whole_parts import idle_ms, kind_of
from tests.gpu.whole_session import SIZES
from tests.gpu.whole_table import failed_parts, tables

RELEASED = parse_config(excerpt(range(40), stages=3))
SMALL = parse_config(small(excerpt((1, 2, 20, 21), stages=3, engram_rows=997)))


@pytest.mark.parametrize(("batch", "measured"), [(1, 10.14), (8, 10.69), (64, 16.30), (256, 30.74)])
def test_predictions_give_what_four_gpus_have_shown(batch: int, measured: float) -> None:
    assert predict.step_ms(RELEASED, batch, 4, 8_192) == pytest.approx(measured, rel=0.04)


def test_more_ranks_rows_and_tokens_move_predictions_the_right_way() -> None:
    assert predict.step_ms(RELEASED, 256, 8, 8_192) < predict.step_ms(RELEASED, 256, 4, 8_192) < predict.step_ms(RELEASED, 256, 4, 8_192, 6)
    assert predict.prefill_ms(RELEASED, 32_768, 140, 8, True) < predict.prefill_ms(RELEASED, 32_768, 140, 4, True)
    assert predict.prefill_flops(RELEASED, 131_072, 140) / 131_072 / 1e9 == pytest.approx(18.1, rel=0.02)


def test_kernels_are_told_apart_by_their_names() -> None:
    names = {
        "void dix::packed_gemm<(dix::Format)0, (dix::Epilogue)2, 1, 1>(dix::PackedGemm)": "experts",
        "void dix::packed_gemm<(dix::Format)1, (dix::Epilogue)0, 1, 8>(dix::PackedGemm)": "projections",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "exchange",
        "_attend": "attention",
        "write_and_read": "boundaries",
        "void at::native::elementwise_kernel<128, 4>": "other",
    }
    assert {name: kind_of(name) for name in names} == names


def test_idle_time_is_what_no_kernel_covers() -> None:
    assert idle_ms([(0, 1000), (500, 800), (2000, 3000), (2500, 4000)]) == 1.0


def test_ranks_are_ended_at_their_time() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert run_together([sleep, sleep], until=time.monotonic() + 0.5) == [-9, -9]


def report(**parts: object) -> dict[str, object]:
    return {"load_s": 1.0, "memory_gib": 80.0, "recordings": ["decode: 9 graphs"], "path": "graphs", **parts}


def lines_of(out: Path, reports: list[dict[str, object]]) -> str:
    for rank, found in enumerate(reports):
        (out / f"rank-{rank}.json").write_text(json.dumps(found))
    return "\n".join(tables(out, SMALL, SIZES["cpu"], 2, 5))


def test_tables_show_whatever_there_is(tmp_path: Path) -> None:
    assert "2 of 2 ranks have written nothing" in lines_of(tmp_path, [])
    assert "1 of 2 ranks" in lines_of(tmp_path, [report()])
    one = {"1": {"step": 4.0, "verify": 6.0, "draft": 2.0}, "2": {"step": 5.0}}
    # The second rank has not come as far as the first one.
    text = lines_of(
        tmp_path, [report(decode=one, errors={"ttft": "why"}), report(decode={"1": {"step": 8.0, "verify": 6.0, "draft": 1.0}})]
    )
    rows = [line.split() for line in text.splitlines()]
    assert next(row for row in rows if row[:2] == ["step", "1"])[2] == "8.00"
    assert not [row for row in rows if row[:2] == ["step", "2"]]
    assert "rank 0, ttft: why" in text
    assert failed_parts(tmp_path) == ["ttft"]


def test_gains_of_drafts_stand_beside_what_the_runner_allows(tmp_path: Path) -> None:
    steps = {"2": {"step": 4.0, "verify": 6.0, "draft": 2.0}}
    plain = {"step": 5.0, "seconds": 1.0, "tokens": 100, "accept": 0.0}
    forced = {"step": 9.0, "seconds": 1.0, "tokens": 130, "accept": 2.8}
    found = report(decode=steps, drafts={"2 0": plain, "2 2.8": forced})
    row = next(line.split() for line in lines_of(tmp_path, [found, found]).splitlines() if "2.80" in line)
    assert row == ["2", "2.80", "2.80", "9.00", "130.0", "130.0", "1.30", "1.40", "0.93"]


@pytest.mark.slow
def test_two_ranks_on_a_cpu_measure_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.whole_model", str(tmp_path), "--device", "cpu", "--ranks", "2", "--layers", "2,20,21"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert set(found["seconds"]) == set(PARTS)
        assert set(found["decode"]) == set(found["eager"]) == {str(batch) for batch in SIZES["cpu"].batches}
        assert min(found["drafts"]["5 3.51"]["accept"], found["ttft"]["384"]["cached"]) > 0
