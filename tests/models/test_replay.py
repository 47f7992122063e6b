"""Prefills that resume at a page end without a window: on every path one window per encoder layer gives what a cold prefill gives."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch import Batch, LogitRows, StepKind
from engine.exact_sums import ExactSums
from engine.model_runner import ModelRunner
from hicache.replay import ReplayMode, replayed_tokens
from tests.models.golden import PROMPTS, Seq, decode, golden_runner

BLOCK, KEEP, LENGTH = 16, 24, 230
COMPACT = {"yoco_mode": "compact", "yoco_keep_tokens": KEEP, "device": "cpu", "draft": True}
EXACT = 1e-4
FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def eager() -> ModelRunner:
    return golden_runner("F", enforce_eager=True, **COMPACT)


@pytest.fixture(scope="module")
def native() -> ModelRunner:
    runner = golden_runner("F", **COMPACT)
    assert runner.native.model is not None, runner.native.status
    return runner


@pytest.fixture(scope="module")
def packed() -> ModelRunner:
    return golden_runner("B", cache_rows="packed", enforce_eager=True, **COMPACT)


def tokens_of(mode: str, runner: ModelRunner) -> int:
    return replayed_tokens(ReplayMode(mode), runner.kv.window, runner.kv.num_encoder_layers, BLOCK)


def run(seq: Seq, ends: list[int], **fields: Any) -> torch.Tensor:
    """Prefill up to each of `ends` in turn; the last logits."""
    logits = torch.empty(0)
    for end in ends:
        piece = seq.slice(end, LogitRows.LAST if end == seq.total_len else LogitRows.NONE)
        logits = seq.runner.run(Batch(StepKind.PREFILL, [msgspec.structs.replace(piece, **fields)]))
    return logits


def cold(runner: ModelRunner, ends: list[int], number: int = 3) -> tuple[Seq, torch.Tensor]:
    seq = Seq(runner, [*PROMPTS[number][:LENGTH], 5, 6, 7], 1, total_len=LENGTH)
    return seq, run(seq, ends)


def replay(source: Seq, end: int, replayed: int, ends: list[int]) -> tuple[Seq, torch.Tensor]:
    """The prompt of `source` from its pages before `end`, in a slot of which nothing may be read."""
    kv = source.runner.kv
    seq = Seq(source.runner, source.ids, 2, total_len=LENGTH)
    pages = end // BLOCK
    kv.blocks[seq.table[:pages]] = kv.blocks[source.table[:pages]]
    kv.rings[:, 2 * kv.ring_rows : 3 * kv.ring_rows] = 127 if kv.rings.dtype == torch.uint8 else float("nan")  # 127: NaN as fp8
    for partial in kv.partials.values():
        partial[2 * kv.partial_rows : 3 * kv.partial_rows] = float("nan")
    seq.done = end - replayed
    return seq, run(seq, [e for e in ends if e > seq.done], swa_valid_start=seq.done, entries_start=end)


def entries(seq: Seq, end: int) -> torch.Tensor:
    """The bytes of all compressed entries and index keys before `end`."""
    kv, blocks, parts = seq.runner.kv, torch.tensor([seq.table[: end // BLOCK]]), []
    for layer, count in kv.layout.entries.items():
        block = blocks[0].repeat_interleave(count)
        rows = kv.kv_rows[kv.entry_rows(layer, block, torch.arange(count).repeat(len(blocks[0])))]
        parts += [rows.view(torch.uint8).flatten(), kv.index_keys(layer, blocks, len(rows)).view(torch.uint8).flatten()]
    return torch.cat(parts)


def window(seq: Seq, position: int) -> torch.Tensor:
    out = torch.empty(seq.runner.kv.state_bytes, dtype=torch.uint8)
    seq.runner.kv.save_window(seq.slot, position, out)
    return out


@FEW
@given(chunks=st.lists(st.integers(1, 90), min_size=1, max_size=9), pages=st.integers(6, (LENGTH - KEEP) // BLOCK))
def test_exact_replay_gives_the_bits_of_a_cold_prefill(native: ModelRunner, chunks: list[int], pages: int) -> None:
    source, expected = cold(native, [LENGTH])
    end, replayed = pages * BLOCK, tokens_of("exact", native)
    begins = accumulate(chunks, initial=end - replayed)
    seq, logits = replay(source, end, replayed, [*(e for e in begins if e < LENGTH), LENGTH])
    assert logits.equal(expected)
    assert decode([seq])[0].equal(decode([source])[0])
    assert entries(seq, LENGTH).equal(entries(source, LENGTH))
    assert window(seq, LENGTH).equal(window(source, LENGTH))


@pytest.mark.parametrize("ends", [[LENGTH], [96, 100, 160, LENGTH]])
def test_exact_replay_on_the_torch_path_equals_a_cold_prefill_to_rounding(eager: ModelRunner, ends: list[int]) -> None:
    source, expected = cold(eager, [LENGTH])
    seq, logits = replay(source, 160, tokens_of("exact", eager), ends)
    torch.testing.assert_close(logits, expected, rtol=0, atol=EXACT)
    torch.testing.assert_close(decode([seq]), decode([source]), rtol=0, atol=EXACT)


def test_exact_replay_with_packed_rows_has_the_bits_of_a_cold_prefill_once_sums_have_one_order(packed: ModelRunner) -> None:
    with ExitStack() as stack:
        for sums in (ExactSums(), ExactSums(torch.bfloat16)):
            stack.enter_context(sums)
        source, expected = cold(packed, [160, LENGTH])
        seq, logits = replay(source, 160, tokens_of("exact", packed), [160, LENGTH])
    assert logits.equal(expected)
    assert entries(seq, LENGTH).equal(entries(source, LENGTH))


def test_window_behind_an_exact_replay_is_that_of_a_cold_prefill_and_one_page_less_is_not_enough(native: ModelRunner) -> None:
    source, _ = cold(native, [160])
    enough = tokens_of("exact", native)
    assert enough - BLOCK < native.kv.num_encoder_layers * (native.kv.window - 1) + 1 <= enough
    for replayed, same in ((enough, True), (enough - BLOCK, False), (tokens_of("bounded", native), False)):
        seq, _ = replay(source, 160, replayed, [160])
        assert window(seq, 160).equal(window(source, 160)) is same


@pytest.mark.parametrize("ends", [[LENGTH], [150, 155, 170, LENGTH]])
def test_bounded_replay_is_the_same_approximation_on_both_paths(eager: ModelRunner, native: ModelRunner, ends: list[int]) -> None:
    found = []
    for runner in (eager, native):
        source, expected = cold(runner, [LENGTH])
        seq, logits = replay(source, 160, tokens_of("bounded", runner), ends)
        assert entries(seq, 160).equal(entries(source, 160))
        assert logits.isfinite().all()
        assert (logits - expected).abs().max() > EXACT
        found.append(torch.cat((logits, decode([seq])[0])))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=EXACT)


def test_replay_and_other_prompts_share_a_step(native: ModelRunner) -> None:
    source, expected = cold(native, [LENGTH])
    other = Seq(native, PROMPTS[1], 3)
    alone = native.run(Batch(StepKind.PREFILL, [other.slice(len(other.ids), LogitRows.LAST)]))
    seq, _ = replay(source, 160, tokens_of("exact", native), [])
    start, other.done = seq.done, 0
    piece = msgspec.structs.replace(seq.slice(LENGTH, LogitRows.LAST), swa_valid_start=start, entries_start=160)
    rows = native.run(Batch(StepKind.PREFILL, [other.slice(len(other.ids), LogitRows.LAST), piece]))
    assert rows.equal(torch.cat((alone, expected)))
