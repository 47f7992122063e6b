"""Plans that are brought up to date: on the host for any number of tokens, on the device for one."""

import msgspec
import pytest
import torch

from engine.batch import Batch, LateTokens, SequenceSlice, StepKind
from engine.cuda_graph import NullRecorder
from engine.late_tokens import advanced, caught_up, later_rows
from engine.model_runner import ModelRunner
from engine.step import Sampled, Step
from tests.engine.simulation import make_sequence
from tests.engine.test_recorded_steps import golden_config
from tests.models.golden import PROMPTS, Seq, prefill


def planned(token_ids: list[int], history_len: int, table: list[int]) -> SequenceSlice:
    """The decode slice of a sequence with these tokens."""
    count = len(token_ids)
    return SequenceSlice(token_ids[-1:], count - 1, count, table, 3, tuple(token_ids[max(0, count - 1 - history_len) : count - 1]))


@pytest.mark.parametrize("history_len", [0, 1, 2, 3])
def test_an_advanced_slice_is_the_one_planned_behind_the_tokens(history_len):
    for length in range(1, 6):
        for more in range(5):
            ids = list(range(10, 10 + length + more))
            early = planned(ids[:length], history_len, [1, 2])
            assert advanced(early, ids[length:], history_len) == planned(ids, history_len, [1, 2])


def test_only_sequences_of_the_step_before_are_late_and_their_tokens_stop_at_their_room():
    seqs = [make_sequence(f"s{i}", [5, 6, 7]) for i in range(4)]
    before = Step(StepKind.DECODE, rows=[seqs[2], seqs[0]])
    step = Step(StepKind.DECODE, seqs[:3], [planned([5, 6, 7], 2, [1]) for _ in range(3)], seqs[:3], rooms=[1, 9, 9])
    rows = later_rows(step, before)
    assert rows == [1, -1, 0]
    moved = caught_up(step, rows, Sampled([[8, 9, 10], [11, 12]]), 2)
    assert [(s.token_ids, s.start, s.history) for s in moved.slices] == [([11], 3, (6, 7)), ([7], 2, (5, 6)), ([10], 5, (8, 9))]
    assert moved.rooms == [0, 9, 6]
    assert [s.start for s in step.slices] == [2, 2, 2]  # the plan itself is not touched


def test_a_failed_row_brings_no_tokens():
    seq = make_sequence("a", [5, 6])
    step = Step(StepKind.DECODE, [seq], [planned([5, 6], 2, [1])], [seq], rooms=[4])
    assert caught_up(step, [0], Sampled([[9]], errors={0: "invalid logits"}), 2) == step


@pytest.mark.parametrize("recorder", [None, NullRecorder()], ids=["eager", "recorded"])
def test_late_tokens_on_the_device_give_the_logits_of_known_ones(recorder):
    """For the embedding and for the n-gram tables, in the middle of a batch whose other tokens are known."""
    runner = ModelRunner(golden_config(), recorder=recorder)
    seqs = [Seq(runner, ids, slot) for slot, ids in enumerate(PROMPTS, start=1)]
    for seq, ids in zip(seqs, PROMPTS, strict=True):
        prefill(seq, [len(ids) - 1])
    slices = [seq.slice(len(ids)) for seq, ids in zip(seqs, PROMPTS, strict=True)]
    wanted = runner.run(Batch(StepKind.DECODE, slices)).clone()
    hidden = [msgspec.structs.replace(s, token_ids=[0]) if i != 1 else s for i, s in enumerate(slices)]
    late = LateTokens([2, -1, 0, 1], torch.tensor([PROMPTS[2][-1], PROMPTS[3][-1], PROMPTS[0][-1]]))
    assert torch.equal(runner.run(Batch(StepKind.DECODE, hidden, late)), wanted)
    assert not torch.equal(runner.run(Batch(StepKind.DECODE, hidden)), wanted)
