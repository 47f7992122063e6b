import json

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch import Batch, LogitRows, StepKind
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, NotEnoughMemory
from engine.model_runner import ModelRunner
from engine.models.draft import DraftSlice
from tests.models.golden import PROMPTS, Recorder, Seq, decode, golden_runner, prefill
from tests.models.tiny_configs import GOLDEN, small_config

EXACT = 1e-4
FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def runner():
    return golden_runner("F")


@pytest.fixture(scope="module")
def whole(runner):
    """Logits of prompt 2 (130 tokens) computed in one piece."""
    return prefill(Seq(runner, PROMPTS[2], 6), [130])


def chunk_lengths(total):
    return st.lists(st.integers(1, 48), min_size=1, max_size=12).map(lambda parts: [*parts, total])


@FEW
@given(chunks=chunk_lengths(130))
def test_any_chunking_gives_the_logits_of_one_piece(runner, whole, chunks):
    seq, out = Seq(runner, PROMPTS[2], 1), []
    for length in chunks:
        if seq.done < 130:
            out.append(prefill(seq, [length]))
    assert (torch.cat(out) - whole).abs().max() <= EXACT


def test_token_by_token_decode_equals_prefill(runner, whole):
    seq = Seq(runner, PROMPTS[2], 1)
    rows = [prefill(seq, [1])] + [decode([seq])[0] for _ in range(129)]
    assert (torch.cat(rows) - whole).abs().max() <= EXACT


def test_block_size_does_not_matter(whole):
    other = golden_runner("F", block_size=32)
    assert (prefill(Seq(other, PROMPTS[2], 1), [33, 50, 47]) - whole).abs().max() <= EXACT


def test_mixed_batch_equals_single_sequences(runner):
    """Different starts, odd chunk ends and lengths in one prefill step, then one decode step together."""
    single = [prefill(Seq(runner, ids, 6), [len(ids)]) for ids in PROMPTS]
    seqs = [Seq(runner, ids, slot) for slot, ids in enumerate(PROMPTS, start=1)]
    for seq, ahead in zip(seqs, (1, 17, 64, 201), strict=True):
        prefill(seq, [ahead])
    slices = [s.slice(len(s.ids) - 1) for s in seqs]
    logits = runner.run(Batch(StepKind.PREFILL, slices)).split([len(s.token_ids) for s in slices])
    for got, want, part in zip(logits, single, slices, strict=True):
        assert (got - want[part.start : part.end]).abs().max() <= EXACT
    last = decode(seqs)[:, 0]
    assert (last - torch.stack([s[-1] for s in single])).abs().max() <= EXACT


def test_batch_order_does_not_change_a_row(runner):
    def last_rows(order):
        seqs = {n: Seq(runner, PROMPTS[n], n + 1) for n in order}
        rows = runner.run(Batch(StepKind.PREFILL, [seqs[n].slice(len(PROMPTS[n]), LogitRows.LAST) for n in order]))
        return dict(zip(order, rows, strict=True))

    one, two = last_rows([0, 1, 2]), last_rows([2, 0, 1])
    for n in range(3):
        assert (one[n] - two[n]).abs().max() <= EXACT


@pytest.mark.parametrize("start", [60, 61])
@pytest.mark.parametrize("rows", [2, 3, 5])
def test_multi_row_step_equals_single_steps(runner, whole, start, rows):
    seq = Seq(runner, PROMPTS[2], 1)
    prefill(seq, [start])
    got = decode([seq], rows, StepKind.VERIFY)[0]
    assert (got - whole[start : start + rows]).abs().max() <= EXACT


@FEW
@given(steps=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=5, max_size=15))
def test_rejected_rows_leave_no_trace(runner, whole, steps):
    """Rows with wrong tokens behind the accepted ones are recomputed later, at odd and even positions."""
    seq = Seq(runner, PROMPTS[2], 1)
    prefill(seq, [40])
    for rows, wrong in steps:
        good, start = max(0, rows - wrong), seq.done
        if start + rows > 130:
            break
        seq.ids = [*PROMPTS[2][: start + good], *([7] * (rows - good)), *PROMPTS[2][start + rows :]]
        got = decode([seq], rows, StepKind.VERIFY)[0][:good]
        seq.ids, seq.done = list(PROMPTS[2]), start + good
        if good:
            assert (got - whole[start : start + good]).abs().max() <= EXACT


def test_only_requested_rows_get_logits(runner, whole):
    a, b, c = (Seq(runner, PROMPTS[2], slot) for slot in (1, 2, 3))
    got = runner.run(Batch(StepKind.PREFILL, [a.slice(50, LogitRows.NONE), b.slice(30, LogitRows.ALL), c.slice(9, LogitRows.LAST)]))
    assert (got - torch.cat((whole[:30], whole[8:9]))).abs().max() <= EXACT


def test_poisoned_memory_of_others_does_not_leak_in(whole):
    fresh = golden_runner("F")
    fresh.kv.kv_rows[fresh.kv.layout.kv_stride :] = float("nan")
    fresh.kv.rings[:, fresh.kv.ring_rows :] = float("nan")
    for partial in fresh.kv.partials.values():
        partial.fill_(float("nan"))
    seqs = [Seq(fresh, PROMPTS[2], 1), Seq(fresh, PROMPTS[1], 2)]
    assert (prefill(seqs[0], [31, 98]) - whole[:129]).abs().max() <= EXACT
    prefill(seqs[1], [36])
    assert (decode(seqs)[0, 0] - whole[129]).abs().max() <= EXACT


def test_window_rows_before_the_valid_start_are_never_read(runner):
    seq = Seq(runner, PROMPTS[2], 1)
    prefill(seq, [40])
    ring = runner.kv.ring_rows
    runner.kv.rings[:, [ring + p % ring for p in range(24, 30)]] = float("nan")
    part = seq.slice(45)
    assert runner.run(Batch(StepKind.PREFILL, [msgspec.structs.replace(part, swa_valid_start=30)])).isfinite().all()
    seq.done = 40
    assert not decode([seq])[0].isfinite().all()


def test_long_sequences_are_scored_in_pieces_of_bounded_memory(runner, whole, monkeypatch):
    monkeypatch.setattr("engine.models.indexer._GROUP_BYTES", 20_000)
    assert (prefill(Seq(runner, PROMPTS[2], 1), [100, 30]) - whole).abs().max() <= EXACT
    seqs = [Seq(runner, PROMPTS[2], slot) for slot in (1, 2, 3)]
    for seq in seqs:
        prefill(seq, [129])
    assert (decode(seqs)[:, 0] - whole[129]).abs().max() <= EXACT


KEEP = 24


@pytest.fixture(scope="module")
def truncated():
    return {mode: golden_runner("F", yoco_mode=mode, yoco_keep_tokens=KEEP) for mode in ("mask", "compact")}


@pytest.mark.parametrize("chunks", [[130], [64, 66], [33, 33, 33, 31], [105, 1, 24], [106, 24], [129, 1]])
def test_compact_equals_mask_on_kept_rows(truncated, chunks):
    last = {}
    for mode, runner in truncated.items():
        seq = Seq(runner, PROMPTS[2] + PROMPTS[1], 1, total_len=130)
        rows = []
        for length in chunks:
            final = seq.done + length == 130
            rows = [runner.run(Batch(StepKind.PREFILL, [seq.slice(seq.done + length, LogitRows.LAST if final else LogitRows.NONE)]))]
        rows += [decode([seq])[0] for _ in range(20)]
        last[mode] = torch.cat(rows)
    assert (last["mask"] - last["compact"]).abs().max() <= EXACT


def test_truncation_changes_long_prompts_and_leaves_short_ones_alone(truncated, runner, whole):
    short = PROMPTS[2][:KEEP]
    assert (prefill(Seq(truncated["compact"], short, 1), [KEEP]) - prefill(Seq(runner, short, 1), [KEEP])).abs().max() <= EXACT
    long = truncated["compact"].run(Batch(StepKind.PREFILL, [Seq(truncated["compact"], PROMPTS[2], 1).slice(130, LogitRows.LAST)]))
    assert (long[0] - whole[129]).abs().max() > 1e-2


def test_mixed_compact_batch_equals_single_sequences(truncated):
    """One prompt wholly before its kept suffix, one across it, one inside it."""
    compact = truncated["compact"]
    plan = [(PROMPTS[3], 100), (PROMPTS[2], 130), (PROMPTS[1][:20], 20)]
    want = []
    for ids, end in plan[1:]:
        want.append(compact.run(Batch(StepKind.PREFILL, [Seq(compact, ids, 5).slice(end, LogitRows.LAST)])))
    seqs = [Seq(compact, ids, slot) for slot, (ids, _) in enumerate(plan, start=1)]
    rows = [LogitRows.NONE, LogitRows.LAST, LogitRows.LAST]
    got = compact.run(Batch(StepKind.PREFILL, [s.slice(end, r) for s, (_, end), r in zip(seqs, plan, rows, strict=True)]))
    assert (got - torch.cat(want)).abs().max() <= EXACT


def test_chunk_before_the_kept_suffix_skips_the_decoder(truncated):
    probe = Recorder()
    compact = truncated["compact"]
    logits = compact.run(Batch(StepKind.PREFILL, [Seq(compact, PROMPTS[3], 1).slice(100, LogitRows.NONE)]), probe)
    assert logits.shape == (0, 512)
    assert ("attn_out", 4) in probe.seen
    assert ("attn_out", 5) not in probe.seen


@pytest.mark.parametrize("hit", [96, 64, 16])
def test_restored_pages_and_windows_continue_like_a_cold_run(truncated, hit):
    """Pages and encoder windows stored at a block boundary serve another sequence with the same prefix."""
    compact = truncated["compact"]
    kv = compact.kv
    cold = Seq(compact, PROMPTS[2], 1)
    state = torch.empty(kv.state_bytes, dtype=torch.uint8)
    compact.run(Batch(StepKind.PREFILL, [cold.slice(hit, LogitRows.NONE)]))
    kv.save_window(1, hit, state)
    want = compact.run(Batch(StepKind.PREFILL, [cold.slice(130, LogitRows.LAST)]))
    pages = kv.blocks[cold.table[: hit // 16]].clone()
    warm = Seq(compact, PROMPTS[2], 3)
    kv.blocks[warm.table[: hit // 16]] = pages
    kv.load_window(3, hit, state)
    warm.done = hit
    got = compact.run(Batch(StepKind.PREFILL, [warm.slice(130, LogitRows.LAST)]))
    assert (got - want).abs().max() <= EXACT


def test_logits_of_a_dropped_row_are_a_broken_invariant(truncated):
    seq = Seq(truncated["compact"], PROMPTS[2], 4)
    with pytest.raises(AssertionError, match="decoder truncation drops"):
        truncated["compact"].run(Batch(StepKind.PREFILL, [seq.slice(16, LogitRows.LAST)]))


def test_restore_beyond_the_kept_suffix_differs_from_cold(truncated):
    """Why hits are capped at the prompt length minus the kept tokens: decoder rings in between were never filled."""
    compact = truncated["compact"]
    kv, cold = compact.kv, Seq(compact, PROMPTS[2], 1)
    want = compact.run(Batch(StepKind.PREFILL, [cold.slice(130, LogitRows.LAST)]))
    state = torch.empty(kv.state_bytes, dtype=torch.uint8)
    kv.save_window(1, 128, state)
    warm = Seq(compact, PROMPTS[2], 3)
    kv.blocks[warm.table[:8]] = kv.blocks[cold.table[:8]].clone()
    kv.load_window(3, 128, state)
    kv.rings[compact.model_config.text.boundary :, 3 * kv.ring_rows : 4 * kv.ring_rows] = 0
    warm.done = 128
    got = compact.run(Batch(StepKind.PREFILL, [warm.slice(130, LogitRows.LAST)]))
    assert (got - want).abs().max() > 1e-2


def test_both_window_states_are_extractable_after_a_long_prefill(truncated):
    compact = truncated["compact"]
    seq = Seq(compact, PROMPTS[3], 1)
    kept, state = {}, torch.empty(compact.kv.state_bytes, dtype=torch.uint8)
    s0, s1 = (300 - KEEP) // 16 * 16, 299 // 16 * 16
    for end in (s0, s1, 300):
        compact.run(Batch(StepKind.PREFILL, [seq.slice(end, LogitRows.NONE)]))
        compact.kv.save_window(1, end if end < 300 else s1, state)
        kept[end] = state.clone()
    again = Seq(compact, PROMPTS[3], 2)
    compact.run(Batch(StepKind.PREFILL, [again.slice(300, LogitRows.NONE)]))
    for position in (s0, s1):
        compact.kv.save_window(2, position, state)
        assert (state.view(torch.float32) - kept[position].view(torch.float32)).abs().max() <= EXACT


def test_keep_below_window_and_backtracking_is_refused():
    with pytest.raises(ConfigError, match="yoco_keep_tokens is 20"):
        golden_runner("F", yoco_mode="compact", yoco_keep_tokens=20)


def test_limits_resolve_every_auto():
    limits = ModelRunner(EngineConfig(model=str(GOLDEN / "tiny-a-bf16"), kv_cache_gb=0.01)).limits
    assert (limits.device, limits.precision, limits.max_num_seqs, limits.max_num_batched_tokens) == ("cpu", "F", 32, 512)
    assert (limits.vocab_size, limits.eos_token_id, limits.ngram_history, limits.keep_tokens) == (512, 1, 3, 0)
    assert limits.num_state_slots == 39
    assert limits.max_model_len == min(1024, (limits.num_blocks - 1) * 128 - 6)


def test_cache_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(NotEnoughMemory, match="max_model_len is 900"):
        ModelRunner(EngineConfig(model=str(GOLDEN / "tiny-a-bf16"), num_blocks=5, max_model_len=900))
    with pytest.raises(NotEnoughMemory, match="hold 0 blocks"):
        ModelRunner(EngineConfig(model=str(GOLDEN / "tiny-a-bf16"), kv_cache_gb=1e-6))


def test_history_that_is_too_short_is_a_broken_invariant(runner):
    seq = Seq(runner, PROMPTS[2], 1)
    prefill(seq, [10])
    bad = seq.slice(12)
    with pytest.raises(AssertionError, match="history has 0 ids"):
        runner.run(Batch(StepKind.PREFILL, [type(bad)(bad.token_ids, bad.start, 130, bad.block_table, bad.state_slot)]))


def test_dummy_weights_need_only_a_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    steps = []
    config = EngineConfig(model=str(tmp_path), load_format="dummy", block_size=16, num_blocks=40, max_num_seqs=2)
    dummy = ModelRunner(config, draft=True, on_progress=lambda what, share: steps.append(share))
    assert steps[-1] == 1.0
    ids = list(range(3, 83))
    seq = Seq(dummy, ids, 1)
    one = prefill(seq, [80])
    parts = prefill(Seq(dummy, ids, 2), [7, 33, 40])
    assert one.std() > 0.1
    assert (one - parts).abs().max() <= EXACT
    with pytest.raises(CheckpointError, match="neither"):
        ModelRunner(EngineConfig(model=str(tmp_path)))


def test_dummy_weights_take_any_tokenizer_whose_ids_they_have(tmp_path):
    data = small_config()
    vocab = data["text_config"]["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", block_size=16, num_blocks=40, max_num_seqs=2)
    for size, fits in ((vocab - 3, True), (vocab + 1, False)):
        tokenizer = {"model": {"vocab": {str(i): i for i in range(size)}}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        if fits:
            assert ModelRunner(config).limits.tokenizer_size == size
        else:
            with pytest.raises(CheckpointError, match=f"has {size} ids, config key vocab_size is {vocab}"):
                ModelRunner(config)


@pytest.mark.parametrize("precision", ["Fq", "B", "R"])
def test_packed_cache_rows_change_no_bit(precision):
    """Chunks, decode steps and drafts over the released row formats, against rows of elements."""
    seen = []
    for rows in ("plain", "packed"):
        runner = golden_runner(precision, "tiny-a-fp8", cache_rows=rows, enforce_eager=True, draft=True)
        seq = Seq(runner, PROMPTS[2], 1)
        out = [prefill(seq, [61, 60]), *(decode([seq])[0] for _ in range(3))]
        seen.append(torch.cat([*out, runner.draft([DraftSlice(9, 123, 1)]).logits[0]]))
    assert torch.equal(*seen)
