"""The compiled CPU step against the eager path, and its independence of batch and chunks."""

import json
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csrc.loader import BuildError
from engine import native_start
from engine.batch import Batch, LogitRows, StepKind
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.models.draft import DraftSlice
from engine.models.native_weights import ARENA, PackedMemory
from engine.models.numerics import Numerics
from engine.native_library import default_build_dir, instruction_level, load_library
from tests.models.golden import PROMPTS, Seq, decode, golden_runner, prefill
from tests.models.tiny_configs import GOLDEN, small_config

EXACT = 1e-4
KEEP = 24
FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def pair(precision="F", **changes):
    """(eager, compiled) runners of the same model."""
    both = golden_runner(precision, enforce_eager=True, **changes), golden_runner(precision, **changes)
    assert both[0].native.model is None
    assert both[1].native.model is not None, both[1].native.status
    return both


@pytest.fixture(scope="module")
def plain():
    return pair(draft=True)


def chunk_lengths(total):
    return st.lists(st.integers(1, 48), min_size=1, max_size=12).map(lambda parts: [*parts, total])


def in_chunks(runner, ids, slot, chunks):
    seq, out = Seq(runner, ids, slot), []
    for length in chunks:
        if seq.done < len(ids):
            out.append(prefill(seq, [length]))
    return torch.cat(out)


@FEW
@given(chunks=chunk_lengths(130), number=st.integers(0, 3))
def test_chunks_give_the_logits_of_the_eager_path(plain, chunks, number):
    eager, native = (in_chunks(runner, PROMPTS[number], 1, [*chunks, 300]) for runner in plain)
    assert (eager - native).abs().max() <= EXACT


@FEW
@given(chunks=chunk_lengths(201))
def test_chunks_and_batch_mates_do_not_change_a_bit(plain, chunks):
    native = plain[1]
    whole = in_chunks(native, PROMPTS[3][:201], 1, [201])
    assert torch.equal(in_chunks(native, PROMPTS[3][:201], 2, chunks), whole)
    seqs = [Seq(native, ids, slot) for slot, ids in enumerate((PROMPTS[1], PROMPTS[3][:201], PROMPTS[2]), start=3)]
    logits = native.run(Batch(StepKind.PREFILL, [s.slice(len(s.ids)) for s in seqs])).split([len(s.ids) for s in seqs])
    assert torch.equal(logits[1], whole)


def test_decode_steps_of_ragged_batches_equal_the_eager_path(plain):
    rows = []
    for runner in plain:
        seqs = [Seq(runner, [*ids, *PROMPTS[3][:20]], slot) for slot, ids in enumerate(PROMPTS, start=1)]
        for seq, ids in zip(seqs, PROMPTS, strict=True):
            prefill(seq, [len(ids) - 1])
        rows.append(torch.stack([decode(seqs) for _ in range(20)]))
    assert (rows[0] - rows[1]).abs().max() <= EXACT


def test_a_decode_row_alone_has_the_bits_of_a_batch(plain):
    native = plain[1]
    alone = [decode_after_prefill(native, [n])[0] for n in range(4)]
    together = decode_after_prefill(native, [0, 1, 2, 3])
    assert all(torch.equal(one, many) for one, many in zip(alone, together, strict=True))


def decode_after_prefill(runner, numbers):
    seqs = [Seq(runner, PROMPTS[n], n + 1) for n in numbers]
    for seq in seqs:
        prefill(seq, [len(seq.ids) - 1])
    return decode(seqs)


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("start", [60, 61])
def test_several_rows_per_sequence_equal_single_steps_bit_for_bit(plain, start, rows):
    native, ids = plain[1], PROMPTS[2]
    one, two = Seq(native, ids, 1), Seq(native, ids, 2)
    prefill(one, [start]), prefill(two, [start])
    assert torch.equal(decode([one], rows, StepKind.VERIFY)[0], torch.cat([decode([two])[0] for _ in range(rows)]))


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("chunks", [[130], [33, 33, 33, 31], [105, 1, 24], [129, 1]])
def test_truncated_prefill_equals_the_eager_path(mode, chunks):
    rows = []
    for runner in pair(yoco_mode=mode, yoco_keep_tokens=KEEP):
        seq = Seq(runner, PROMPTS[2] + PROMPTS[1], 1, total_len=130)
        for length in chunks:
            wanted = LogitRows.LAST if seq.done + length == 130 else LogitRows.NONE
            last = runner.run(Batch(StepKind.PREFILL, [seq.slice(seq.done + length, wanted)]))
        rows.append(torch.cat([last, *(decode([seq])[0] for _ in range(20))]))
    assert (rows[0] - rows[1]).abs().max() <= EXACT


def test_fake_quantised_steps_differ_only_on_rounding_edges():
    eager, native = pair("Fq")
    for number in range(3):
        a, b = (in_chunks(runner, PROMPTS[number], 1, [61, 300]) for runner in (eager, native))
        error = (a - b).abs().amax(1)
        assert (error <= 1e-3).float().mean() >= 0.9
        assert error.max() <= 0.5


def test_caches_hold_the_same_numbers(plain):
    eager, native = plain
    for runner in plain:
        prefill(Seq(runner, PROMPTS[2], 1), [61, 69])
    layout, table = native.kv.layout, Seq(native, PROMPTS[2], 1).table[:8]
    for layer, offset in layout.kv_offset.items():
        entries = torch.arange(16 // native.model_config.text.ratio(layer))
        for view, stride, first in (("kv_rows", layout.kv_stride, offset), ("index_rows", layout.index_stride, layout.index_offset[layer])):
            rows = torch.cat([block * stride + first + entries for block in table])
            assert (getattr(eager.kv, view)[rows] - getattr(native.kv, view)[rows]).abs().max() <= EXACT
    ring = slice(native.kv.ring_rows, 2 * native.kv.ring_rows)
    assert (eager.kv.rings[:, ring] - native.kv.rings[:, ring]).abs().max() <= EXACT


def test_drafts_equal_the_eager_path(plain):
    slices = [DraftSlice(9, 129, 1), DraftSlice(3, 64, 2, 10), DraftSlice(4, 2, 3)]
    outputs = []
    for runner in plain:
        for slot, length in ((1, 130), (2, 65), (3, 3)):
            prefill(Seq(runner, PROMPTS[2], slot), [length])
        outputs.append(runner.draft(slices))
        chosen = runner.draft(slices, lambda place, logits: logits.argmin(-1))
        outputs[-1] = (outputs[-1], chosen)
    for eager, native in zip(*outputs, strict=True):
        assert eager.token_ids.tolist() == native.token_ids.tolist()
        assert (eager.logits - native.logits).abs().max() <= EXACT
        assert (eager.confidence - native.confidence).abs().max() <= EXACT


def test_greedy_drafts_are_those_of_the_tensors(plain):
    slices = [DraftSlice(9, 129, 1), DraftSlice(3, 64, 2, 10), DraftSlice(4, 2, 3)]
    for runner in plain:
        for slot, length in ((1, 130), (2, 65), (3, 3)):
            prefill(Seq(runner, PROMPTS[2], slot), [length])
        output = runner.draft(slices)
        assert runner.draft_greedy(slices) == (output.token_ids.tolist(), output.confidence.tolist())


def draft_after(runner, slot, start, steps, *, drafting, refused=0):
    """The draft behind `steps` decode steps. drafting: also draft behind each of them; refused: rows of a step that are taken back."""
    seq = Seq(runner, PROMPTS[3], slot)
    prefill(seq, [start])
    for _ in range(steps):
        decode([seq], 1 + refused, StepKind.VERIFY)
        seq.done -= refused
        if drafting:
            runner.draft([DraftSlice(9, seq.done - 1, slot)])
    output = runner.draft([DraftSlice(9, seq.done - 1, slot)])
    return torch.cat((output.logits.flatten(), output.confidence.flatten()))


@pytest.mark.parametrize("refused", [0, 3])
@pytest.mark.parametrize(("start", "steps"), [(40, 1), (40, 7), (10, 90)])
def test_a_draft_does_not_depend_on_when_its_window_was_filled(plain, start, steps, refused):
    """Decode steps leave that to the next draft. 90 steps are more than a window; slot 3 held another sequence before."""
    eager, native = plain
    steps = min(steps, (len(PROMPTS[3]) - start) - 1 - refused)
    draft_after(native, 3, 60, 20, drafting=False, refused=refused)
    often, once = (draft_after(native, slot, start, steps, drafting=slot == 2, refused=refused) for slot in (2, 3))
    assert torch.equal(often, once)
    assert (draft_after(eager, 1, start, steps, drafting=False, refused=refused) - once).abs().max() <= EXACT


def test_a_greedy_step_gives_the_largest_logits_and_no_more(plain):
    eager, native = plain
    assert isinstance(eager.run_greedy(Batch(StepKind.PREFILL, [Seq(eager, PROMPTS[2], 1).slice(9)])), torch.Tensor)
    for rows, count in ((LogitRows.LAST, 2), (LogitRows.ALL, 12), (LogitRows.NONE, 0)):
        batch = Batch(StepKind.PREFILL, [Seq(native, PROMPTS[n], n + 1).slice(6, rows) for n in (1, 2)])
        logits, largest = native.run(batch), native.run_greedy(batch)
        assert len(largest) == count
        assert largest.ids == logits.argmax(-1).tolist()
        assert largest.values == logits.amax(-1).tolist()
        assert not largest.errors


def test_a_greedy_step_leaves_out_ids_without_a_token_and_shows_invalid_logits(plain):
    native, ids = plain[1], PROMPTS[2][:9]
    batch = Batch(StepKind.PREFILL, [Seq(native, ids, 1).slice(9, LogitRows.ALL)])
    few = 77  # a part of a vector at the end
    largest = native.native.model.step_greedy(batch, native._truncation, few)
    assert largest.ids == native.run(batch)[:, :few].argmax(-1).tolist()
    kept = native.backbone.embed[ids[-1]].clone()
    native.backbone.embed[ids[-1]] = float("nan")
    try:
        broken = native.run_greedy(batch)
    finally:
        native.backbone.embed[ids[-1]] = kept
    last = [i for i, token in enumerate(ids) if token == ids[-1]]
    assert set(last) <= set(broken.errors)
    assert broken.ids[last[0]] == 0
    assert "largest value nan" in broken.errors[last[0]]


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 8, "o_groups": 4, "index_n_heads": 12, "moe_intermediate_size": 96}])
def test_other_sizes_and_restricted_candidates_equal_the_eager_path(tmp_path, changes):
    """Random weights: head counts that do not fill a vector, and a context that leaves only some blocks as candidates."""
    (tmp_path / "config.json").write_text(json.dumps(small_config(candidate_topk_blocks=2, **changes)))
    ids = [(7 * i * i + 3) % 500 for i in range(150)]
    rows = []
    for eager in (True, False):
        config = EngineConfig(model=str(tmp_path), load_format="dummy", block_size=16, num_blocks=40, max_num_seqs=2, enforce_eager=eager)
        runner = ModelRunner(config)
        assert runner.native.wait() is not eager
        seq = Seq(runner, ids, 1)
        rows.append(torch.cat([prefill(seq, [77, 60]), *(decode([seq])[0] for _ in range(13))]))
    assert rows[0].std() > 0.1
    assert (rows[0] - rows[1]).abs().max() <= EXACT


def test_nan_in_a_visible_key_reaches_the_logits(plain):
    native = plain[1]
    seq = Seq(native, PROMPTS[2], 1)
    prefill(seq, [40])
    native.kv.rings[0, native.kv.ring_rows + 39 % native.kv.ring_rows] = float("nan")
    assert not decode([seq])[0].isfinite().any()


@pytest.mark.parametrize("start", [60, 61])
def test_nan_in_a_row_does_not_reach_the_row_before_it(plain, start):
    """Two rows are attended together, and the first one does not see the second one's key."""
    native, token = plain[1], next(t for t in range(512) if t not in PROMPTS[2])
    ids = [*PROMPTS[2][: start + 1], token]
    one, two = Seq(native, ids, 1), Seq(native, ids, 2)
    prefill(one, [start]), prefill(two, [start])
    alone = decode([one])[0]
    embed = native.backbone.embed
    kept = embed[token].clone()
    embed[token] = float("nan")
    try:
        both = decode([two], 2, StepKind.VERIFY)[0]
    finally:
        embed[token] = kept
    assert torch.equal(both[:1], alone)
    assert not both[1].isfinite().any()


def test_rows_without_logits_give_none(plain):
    seq = Seq(plain[1], PROMPTS[2], 1)
    assert plain[1].run(Batch(StepKind.PREFILL, [seq.slice(9, LogitRows.NONE)])).shape == (0, 512)


def test_profiles_and_devices_that_the_step_does_not_cover_stay_eager():
    assert golden_runner("B").native.status == "eager: the precision is neither F nor Fq"
    assert golden_runner("F", enforce_eager=True).native.status == "eager: engine.enforce_eager is set"
    assert Numerics.of("Fq").dtype is torch.float32


def test_missing_compiler_leaves_the_eager_path_with_the_reason(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    runner = golden_runner("F", build_dir=str(tmp_path / "build"))
    assert runner.native.status == "eager: no compiler c++ in PATH (install a C++20 compiler, for instance g++)"
    assert "several times slower" in caplog.text
    assert prefill(Seq(runner, PROMPTS[1], 1), [20]).isfinite().all()


def test_failing_build_in_the_background_leaves_the_eager_path(monkeypatch, tmp_path):
    def broken(build_dir):
        raise BuildError("cpu_step does not compile: error: no", hint="the whole output is in the log")

    monkeypatch.setattr("engine.native_start.is_built", lambda build_dir: False)
    monkeypatch.setattr("engine.native_start.load_library", broken)
    runner = golden_runner("F")
    assert runner.native.wait() is False
    assert runner.native.status.startswith("eager: cpu_step does not compile: error: no")


def test_steps_run_eagerly_until_the_build_is_done(monkeypatch):
    gate, load = threading.Event(), native_start.load_library

    def slow(build_dir):
        gate.wait(60)
        return load(build_dir)

    monkeypatch.setattr("engine.native_start.is_built", lambda build_dir: False)
    monkeypatch.setattr("engine.native_start.load_library", slow)
    config = EngineConfig(model=str(GOLDEN / "tiny-a-bf16"), block_size=16, num_blocks=200, max_num_seqs=6)
    runner = ModelRunner(config)
    seq = Seq(runner, PROMPTS[2], 1)
    assert runner.native.model is None
    before = prefill(seq, [61])
    gate.set()
    assert runner.native.wait(60)
    seq.done = 0
    assert (prefill(seq, [61]) - before).abs().max() <= EXACT


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_change_a_bit(plain, threads):
    native = plain[1]
    chunks = [1, 64, 7, 200]
    alone = in_chunks(native, PROMPTS[3][:201], 1, chunks)
    native.native.model.set_threads(threads, 1, polite=False)
    try:
        assert torch.equal(in_chunks(native, PROMPTS[3][:201], 2, chunks), alone)
        one, other = (native.kv.rings[:, slot * native.kv.ring_rows : (slot + 1) * native.kv.ring_rows] for slot in (1, 2))
        written = [position % native.kv.ring_rows for position in range(max(0, 201 - native.kv.ring_rows), 201)]
        assert torch.equal(one[:, written], other[:, written])  # the draft stages' windows among them
        seqs = [Seq(native, ids, slot) for slot, ids in enumerate((PROMPTS[1], PROMPTS[3][:201], PROMPTS[2]), start=3)]
        logits = native.run(Batch(StepKind.PREFILL, [s.slice(len(s.ids)) for s in seqs])).split([len(s.ids) for s in seqs])
        assert torch.equal(logits[1], alone)
    finally:
        native.native.model.set_threads(1)


def test_polite_steps_start_no_threads_without_idle_cores(plain):
    def num_threads():
        return len(list(Path("/proc/self/task").iterdir()))

    native, before = plain[1], num_threads()
    native.native.model.set_threads(4096, 1)  # more than any machine has cores
    try:
        in_chunks(native, PROMPTS[1], 1, [64])
    finally:
        native.native.model.set_threads(1)
    assert num_threads() == before


def test_packed_matrices_start_at_cache_lines_and_share_few_pieces_of_memory():
    memory = PackedMemory(load_library(default_build_dir()))
    taken = [memory.take(size) for size in (80, 64, 1000, ARENA - 4096, 3 * ARENA)]
    assert [len(t) for t in taken] == [80, 64, 1000, ARENA - 4096, 3 * ARENA]
    assert all(t.data_ptr() % 64 == 0 for t in taken)
    assert len({t.untyped_storage().data_ptr() for t in taken}) == 2
    ends = sorted((t.data_ptr(), t.data_ptr() + len(t)) for t in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_weights_are_packed_in_the_smallest_exact_format():
    library = load_library(default_build_dir())
    fp4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, -4.0, 6.0]).repeat(32, 4) * 2.0 ** torch.arange(-20, 12)[:, None]
    formats = [library.dix_format(w.contiguous().data_ptr(), w.numel()) for w in (fp4, fp4 + 2.0**-23, fp4 * 1.25, torch.zeros(8))]
    # The narrowest format needs a vector unit that not every machine has.
    narrow = 2 if instruction_level() == "x86-64-v4" else 0
    assert formats == [narrow, 1, 0, narrow]
    assert library.dix_packed_bytes(32, 32, 0) == 2 * 32 * 32
