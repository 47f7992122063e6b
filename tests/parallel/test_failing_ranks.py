"""One rank of a gloo group fails, at start-up or in a step: the other one hears of it at once, not when a collective's limit is over.

The limit of the group is far beyond what these tests wait: whoever sat in a collective that nobody joins would fail them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S, PATIENCE_S = 600.0, 100.0

RANK = """
import json, os, sys
from engine.process_env import prepare_process
prepare_process(1)
import torch
from csrc.loader import BuildError
from engine import model_runner, recorded_steps
from engine.cuda_graph import NullRecorder
from engine.distributed import GlooGroup, GroupError
from engine.engine import Engine
from engine.errors import MachineError
from hicache.config import HiCacheConfig
from tests.parallel.test_expert_parallel import golden_config, mixed_requests, serve

rank, where, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
group = GlooGroup(rank, 2, init_file=where, timeout_s=float(sys.argv[4]))


def failing(error):
    def fail(*_args, **_kwargs):
        raise error
    return fail


RECORDED = ("buffers", "draft buffers", "recorded step")
if rank == 1:
    if what == "weights":
        model_runner.load_model = failing(MemoryError("no room for weights"))
    elif what == "cache":
        model_runner.KVCache = failing(RuntimeError("no room for the cache"))
    elif what == "buffers":
        model_runner.StaticInputs = failing(RuntimeError("no room for buffers"))
    elif what == "draft buffers":
        recorded_steps.StagedRows = failing(RuntimeError("no room for drafts"))
    elif what == "binding":
        model_runner.NativeExperts = failing(BuildError("cannot bind"))

try:
    config = golden_config(dp=2, ep=2, enforce_eager=what in RECORDED, enable_mtp_varlen=False)
    recorder = NullRecorder() if what in RECORDED else None
    runner = model_runner.ModelRunner(config, draft=True, group=group, recorder=recorder)
    engine = Engine(config, HiCacheConfig(size_gb=0), group, runner=runner)
    if rank == 1 and what == "step":
        runner.native.model.step = failing(RuntimeError("a step failed"))
    if rank == 1 and what == "recorded step":
        runner._decode.run = failing(RuntimeError("a step failed"))
    tokens = serve(engine, mixed_requests(6, 500, 40)[rank::2])
    print(json.dumps(["served", runner.path, tokens]))
except (GroupError, MachineError) as error:
    print(json.dumps([type(error).__name__, str(error)]))
except Exception as error:
    print(json.dumps(["failed", str(error)]))
sys.stdout.flush()
os._exit(0)  # as a rank of a server does
"""


def outcomes(what: str, where: Path) -> list[list]:
    """What both ranks printed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(where), what, str(LIMIT_S)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(out for out, _ in printed), [err for _, err in printed]
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "no room for weights"),
        ("step", "a step failed"),
        pytest.param("cache", "no room for the cache", marks=pytest.mark.slow),
        pytest.param("recorded step", "a step failed", marks=pytest.mark.slow),
    ],
)
def test_the_peer_of_a_rank_that_fails_is_told_at_once(tmp_path: Path, what: str, message: str) -> None:
    peer, failed = outcomes(what, tmp_path / "meet")
    assert failed == ["failed", message]
    assert peer[0] == "GroupError"
    assert "lost a peer" in peer[1]


@pytest.mark.parametrize("what", ["buffers", pytest.param("draft buffers", marks=pytest.mark.slow)])
def test_ranks_record_together_or_not_at_all_when_one_lacks_room_before_its_first_recording(tmp_path: Path, what: str) -> None:
    for kind, path, tokens in outcomes(what, tmp_path / "meet"):
        assert (kind, path) == ("served", "eager")
        assert len(tokens) == 3


@pytest.mark.slow
def test_a_failed_binding_of_what_all_have_agreed_on_ends_the_start_on_all_ranks(tmp_path: Path) -> None:
    for kind, message in outcomes("binding", tmp_path / "meet"):
        assert kind == "MachineError"
        assert "compiled steps" in message
