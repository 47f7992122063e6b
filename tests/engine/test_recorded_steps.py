"""Recorded decode, verify and draft steps against eager ones: fixed buffers, padding to sizes, tables that stay on the device.

A recorder that records nothing runs the same code on the CPU; on a GPU the graphs themselves replay.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch import Batch, LogitRows, StepKind
from engine.config import EngineConfig
from engine.cuda_graph import NullRecorder
from engine.model_runner import ModelRunner
from engine.models.draft import DraftSlice
from engine.ops.rms_norm import RMS_NORM
from tests.models.golden import PROMPTS, Seq, decode, prefill
from tests.models.tiny_configs import GOLDEN

EXACT = 1e-4
FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FINITE = 12345.0


def golden_config(**changes):
    sizes = {"block_size": 16, "num_blocks": 200, "max_num_seqs": 6, "num_draft_tokens": 4, "max_model_len": 440}
    return EngineConfig(model=str(GOLDEN / "tiny-a-bf16"), precision="F", enforce_eager=True, device="cpu", **sizes, **changes)


@pytest.fixture(scope="module")
def plain():
    """(eager, recorded) runners of the same model."""
    return ModelRunner(golden_config(), draft=True), ModelRunner(golden_config(), draft=True, recorder=NullRecorder())


def test_recorded_runner_says_so(plain):
    eager, recorded = plain
    assert (eager.path, recorded.path) == ("eager", "graphs")
    assert [report.name for report in recorded.recordings] == ["decode and verify", "draft"]
    assert recorded.recordings[0].sizes[-1] == 6 * 5


def test_decode_steps_of_ragged_batches_equal_eager_ones(plain):
    rows = []
    for runner in plain:
        seqs = [Seq(runner, [*ids, *PROMPTS[3][:20]], slot) for slot, ids in enumerate(PROMPTS, start=1)]
        for seq, ids in zip(seqs, PROMPTS, strict=True):
            prefill(seq, [len(ids) - 1])
        # The logits are a view of a fixed buffer, which the next step overwrites.
        rows.append(torch.stack([decode(seqs[: 1 + step % 4]).clone()[0] for step in range(20)]))
    assert (rows[0] - rows[1]).abs().max() <= EXACT


@FEW
@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=8), start=st.integers(1, 70), number=st.integers(2, 3))
def test_verify_steps_of_any_lengths_equal_prefill(plain, parts, start, number):
    recorded, ids = plain[1], PROMPTS[number]
    whole = prefill(Seq(plain[0], ids[: start + sum(parts)], 1), [start + sum(parts)])[start:]
    seq = Seq(recorded, ids, 2)
    prefill(seq, [start])
    rows = [decode([seq], part, StepKind.VERIFY).clone()[0] for part in parts]
    assert (torch.cat(rows) - whole).abs().max() <= EXACT


def test_sequences_with_different_numbers_of_drafts_share_a_step(plain):
    got = []
    for runner in plain:
        seqs = [Seq(runner, PROMPTS[2], slot) for slot in (1, 2, 3)]
        for seq, start in zip(seqs, (60, 61, 17), strict=True):
            prefill(seq, [start])
        slices = [s.slice(s.done + rows) for s, rows in zip(seqs, (5, 1, 3), strict=True)]
        got.append(runner.run(Batch(StepKind.VERIFY, slices)).clone())
    assert (got[0] - got[1]).abs().max() <= EXACT


def test_rolled_back_rows_are_overwritten(plain):
    """A verify step whose drafts are refused, then steps at other tokens over the same places."""
    got = []
    for runner in plain:
        seq = Seq(runner, PROMPTS[2][:50] + PROMPTS[3][:40], 1)
        prefill(seq, [50])
        decode([seq], 5, StepKind.VERIFY)
        seq.done, seq.ids[51:] = 51, PROMPTS[1][:40]
        got.append(torch.stack([decode([seq]).clone()[0] for _ in range(6)]))
    assert (got[0] - got[1]).abs().max() <= EXACT


def test_padding_touches_no_real_block_and_no_real_slot(plain):
    recorded = plain[1]
    seq = Seq(recorded, PROMPTS[2], 3)
    prefill(seq, [40])
    kv, own = recorded.kv, set(seq.table)
    others = [block for block in range(1, kv.num_blocks) if block not in own]
    ring = slice(3 * kv.ring_rows, 4 * kv.ring_rows)
    kv.blocks[others] = 0x42
    before = kv.rings.clone()
    decode([seq], 3, StepKind.VERIFY)  # three rows in a step of four
    assert (kv.blocks[others] == 0x42).all()
    # Bits, because rows that nobody wrote yet may be NaN.
    changed = (kv.rings.view(torch.int32) != before.view(torch.int32)).any(-1).any(0).nonzero()[:, 0].tolist()
    written = {3 * kv.ring_rows + p % kv.ring_rows for p in (40, 41, 42)}
    assert written <= set(changed) <= written | {0}, "padding stands at position 0 of slot 0"
    assert kv.rings[:, ring].isfinite().all()
    assert kv.blocks[0].view(torch.float32).isfinite().all()
    assert kv.rings[:, 0].isfinite().all()


@pytest.fixture
def dirty_memory():
    """Memory that nobody has written holds NaN, as that of a device may."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_recording_in_dirty_memory_leaves_the_rows_of_absent_entries_finite(dirty_memory):
    runner = ModelRunner(golden_config(), draft=True, recorder=NullRecorder())
    assert torch.empty(3).isnan().all()
    assert runner.kv.blocks[0].view(torch.float32).isfinite().all()
    assert runner.kv.rings[:, 0].isfinite().all()
    seq = Seq(runner, PROMPTS[1], 1)
    assert prefill(seq, [20]).isfinite().all()
    assert decode([seq]).isfinite().all()


def test_steps_that_are_not_recorded_run_eagerly(plain):
    recorded = plain[1]
    seq = Seq(recorded, PROMPTS[2], 1)
    prefill(seq, [20])
    piece = seq.slice(23, LogitRows.LAST)
    assert recorded.run(Batch(StepKind.VERIFY, [piece])).shape == (1, 512)


def test_drafts_equal_eager_ones(plain):
    slices = [DraftSlice(9, 129, 1), DraftSlice(3, 64, 2, 10), DraftSlice(4, 2, 3)]
    outputs = []
    for runner in plain:
        for slot, length in ((1, 130), (2, 65), (3, 3)):
            prefill(Seq(runner, PROMPTS[2], slot), [length])
        greedy = runner.draft(slices)
        ids, logits, confidence = greedy.token_ids.clone(), greedy.logits.clone(), greedy.confidence.clone()
        chosen = runner.draft(slices, lambda place, logits: logits.argmin(-1))
        outputs.append((ids, logits, confidence, chosen.token_ids, chosen.logits))
    for eager, recorded in zip(*outputs, strict=True):
        assert (eager - recorded).abs().max() <= EXACT


def test_engine_with_recorded_steps_writes_the_same_text():
    from engine.engine import Engine
    from engine.request import Request, SamplingParams
    from hicache.config import HiCacheConfig

    texts = []
    for recorder in (None, NullRecorder()):
        config = golden_config(max_num_batched_tokens=64)
        engine = Engine(config, HiCacheConfig(size_gb=0), runner=ModelRunner(config, draft=True, recorder=recorder))
        for n, ids in enumerate(PROMPTS):
            engine.add_request(Request(str(n), ids, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)))
        out = {}
        while engine.scheduler.running or engine.scheduler.waiting:
            for output in engine.step():
                out.setdefault(output.request_id, []).extend(output.token_ids)
        engine.close()
        texts.append(out)
    assert texts[0] == texts[1]
    assert all(len(ids) == 24 for ids in texts[1].values())


def test_model_starts_eagerly_when_recording_fails_and_names_the_op(monkeypatch, caplog):
    def refuse(*args):
        raise RuntimeError("cannot copy between CPU and CUDA tensors during CUDA graph capture")

    monkeypatch.setattr(RMS_NORM, "reference", refuse)
    runner = ModelRunner(golden_config(), draft=True, recorder=NullRecorder())
    monkeypatch.undo()
    RMS_NORM.use("reference")
    assert runner.path == "eager"
    assert runner.recordings == []
    assert "recording failed in op rms_norm: cannot copy" in caplog.text
    assert prefill(Seq(runner, PROMPTS[1], 1), [20]).isfinite().all()
