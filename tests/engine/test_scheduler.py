import pytest

from engine.batch import LogitRows, StepKind
from engine.prefill_gate import DECODE_PAUSE, MAX_PROMPT_STREAK
from engine.request import FinishReason
from engine.step import Sampled
from tests.engine.simulation import (
    EOS,
    FakeClock,
    RecordingCache,
    drain,
    expected_tokens,
    finals_of,
    make_scheduler,
    make_sequence,
    next_token,
    run_step,
    tokens_of,
)


def pieces(step):
    return [(seq.request.request_id, piece.start, piece.end) for seq, piece in zip(step.seqs, step.slices, strict=True)]


# ---- prefill


def test_prompts_fill_the_token_budget_exactly_and_the_last_piece_is_a_chunk():
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_sequence(name, 10))
    step, _ = run_step(scheduler)
    assert pieces(step) == [("a", 0, 10), ("b", 0, 6)]
    assert [piece.logit_rows for piece in step.slices] == [LogitRows.LAST, LogitRows.NONE]
    assert [seq.request.request_id for seq in step.rows] == ["a"]
    step, _ = run_step(scheduler)
    assert pieces(step) == [("b", 6, 10)]
    assert step.slices[0].history == tuple(scheduler.running[1].token_ids[4:6])


def test_a_checkpoint_ends_a_chunk_and_the_batch():
    cache = RecordingCache()
    cache.ends["a"] = [4, 8, 40]
    scheduler = make_scheduler(cache=cache)
    scheduler.add(make_sequence("a", 14))
    scheduler.add(make_sequence("b", 2))
    assert [pieces(run_step(scheduler)[0]) for _ in range(3)] == [[("a", 0, 4)], [("a", 4, 8)], [("a", 8, 14), ("b", 0, 2)]]
    assert [call[1:] for call in cache.calls if call[0] == "store"] == [("a", 0, 4), ("a", 4, 8), ("a", 8, 14), ("b", 0, 2)]


def test_a_restored_prefix_is_not_computed_again():
    cache = RecordingCache()
    cache.restores["a"] = 8
    scheduler = make_scheduler(cache=cache)
    scheduler.add(make_sequence("a", 14))
    step, outputs = run_step(scheduler)
    assert pieces(step) == [("a", 8, 14)]
    assert outputs[0].cached_tokens == 8
    assert scheduler.counters.cached_tokens == 8


def test_a_held_sequence_waits_while_others_pass_and_keeps_its_place():
    cache = RecordingCache()
    cache.holds = {"b", "d"}
    scheduler = make_scheduler(cache=cache)
    for name in "abcd":
        scheduler.add(make_sequence(name, 3))
    step, _ = run_step(scheduler)
    assert pieces(step) == [("a", 0, 3), ("c", 0, 3)]
    assert [seq.request.request_id for seq in scheduler.waiting] == ["b", "d"]
    assert ("abandon",) in cache.calls
    cache.holds = set()
    assert tokens_of(drain(scheduler), "b")


def test_only_held_sequences_do_not_stop_decoding_and_do_not_reset_the_count():
    cache = RecordingCache()
    scheduler = make_scheduler(cache=cache, any_=2)
    scheduler.add(make_sequence("a", 3, max_tokens=20, ignore_eos=True))
    run_step(scheduler)
    cache.holds = {"b"}
    scheduler.add(make_sequence("b", 3))
    kinds = [run_step(scheduler)[0].kind for _ in range(6)]
    assert kinds == [StepKind.DECODE] * 6
    assert scheduler.gate.decode_step == 6


def test_a_prompt_that_can_never_fit_is_refused_and_others_go_on():
    scheduler = make_scheduler(num_blocks=4, max_model_len=40)
    scheduler.add(make_sequence("big", 13))
    scheduler.add(make_sequence("long", 41))
    scheduler.add(make_sequence("small", 4))
    outputs = drain(scheduler)
    for name in ("big", "long"):
        [final] = finals_of(outputs, name)
        assert final.finish_reason is FinishReason.TOO_LONG
    assert len(finals_of(outputs, "small")) == 1


def test_a_prompt_that_fits_later_keeps_its_place_at_the_head():
    scheduler = make_scheduler(any_=1)
    scheduler.add(make_sequence("a", 36, max_tokens=2, ignore_eos=True))  # 9 of 15 blocks
    scheduler.add(make_sequence("b", 28, max_tokens=2))  # 7 blocks: later
    scheduler.add(make_sequence("c", 1, max_tokens=2))  # would fit, but may not overtake
    order = []
    for _ in range(20):
        step, _ = run_step(scheduler)
        if step.kind is StepKind.PREFILL:
            order += [name for name, start, _ in pieces(step) if start == 0]
    assert order == ["a", "b", "c"]


def test_no_new_prompt_above_the_watermark_but_one_in_progress_goes_on():
    scheduler = make_scheduler(max_num_batched_tokens=8, max_model_len=60)
    scheduler.add(make_sequence("a", 56, max_tokens=20, ignore_eos=True))  # 14 of 15 blocks: usage 15/16
    scheduler.add(make_sequence("b", 1))
    kinds = [run_step(scheduler)[0] for _ in range(8)]
    assert [pieces(step)[0][0] for step in kinds[:7]] == ["a"] * 7  # in progress at usage 0.94
    assert kinds[7].kind is StepKind.DECODE
    assert [seq.request.request_id for seq in scheduler.waiting] == ["b"]


def test_the_admission_cap_counts_running_and_new_sequences():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(name, 2, max_tokens=8, ignore_eos=True))
    step, _ = run_step(scheduler)
    assert [name for name, _, _ in pieces(step)] == ["a", "b"]
    assert run_step(scheduler)[0].kind is StepKind.DECODE


def test_without_chunked_prefill_a_prompt_waits_for_a_step_of_its_own():
    cache = RecordingCache()
    scheduler = make_scheduler(chunked_prefill=False, cache=cache)
    for name, length in (("a", 10), ("b", 10), ("c", 17)):
        scheduler.add(make_sequence(name, length, max_tokens=1))
    outputs = drain(scheduler)
    assert [call[2:] for call in cache.calls if call[0] == "store"] == [(0, 10), (0, 10)]
    assert finals_of(outputs, "c")[0].finish_reason is FinishReason.TOO_LONG


# ---- decode, ends


def test_decode_gives_every_running_sequence_one_token_at_its_end():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 5, ignore_eos=True))
    _, first = run_step(scheduler)
    step, outputs = run_step(scheduler)
    assert step.kind is StepKind.DECODE
    assert pieces(step) == [("a", 5, 6)]
    assert step.slices[0].token_ids == first[0].token_ids
    assert [len(output.token_ids) for output in outputs] == [1]


@pytest.mark.parametrize(
    ("params", "token", "reason", "stop_id"),
    [
        ({}, EOS, FinishReason.STOP, EOS),
        ({"ignore_eos": True}, EOS, None, None),
        ({"stop_token_ids": (9,)}, 9, FinishReason.STOP, 9),
        ({}, 9, None, None),
    ],
)
def test_end_of_sequence_and_stop_ids(params, token, reason, stop_id):
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 5, **params))
    step = scheduler.schedule()
    [output] = scheduler.commit(step, Sampled([[token]]))
    assert (output.finish_reason, output.stop_token_id, output.token_ids) == (reason, stop_id, [token])


def test_a_sequence_ends_one_token_after_the_model_length_or_at_max_tokens():
    scheduler = make_scheduler(max_model_len=8)
    scheduler.add(make_sequence("model", 6, max_tokens=10, ignore_eos=True))
    scheduler.add(make_sequence("tokens", 2, max_tokens=3, ignore_eos=True))
    outputs = drain(scheduler)
    assert len(tokens_of(outputs, "model")) == 3
    assert len(tokens_of(outputs, "tokens")) == 3
    assert {finals_of(outputs, name)[0].finish_reason for name in ("model", "tokens")} == {FinishReason.LENGTH}


def test_several_tokens_of_one_row_are_cut_at_the_first_that_ends_the_sequence():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 5, max_tokens=10))
    step = scheduler.schedule()
    [output] = scheduler.commit(step, Sampled([[7, EOS, 8]]))
    assert output.token_ids == [7, EOS]


def test_a_failed_row_ends_only_its_own_request_and_stores_nothing():
    cache = RecordingCache()
    scheduler = make_scheduler(cache=cache)
    for name in "ab":
        scheduler.add(make_sequence(name, 5, ignore_eos=True))
    step = scheduler.schedule()
    bad, good = scheduler.commit(step, Sampled([[0], [7]], errors={0: "invalid logits"}))
    assert (bad.finish_reason, bad.error, bad.token_ids) == (FinishReason.ERROR, "invalid logits", [])
    assert (good.finish_reason, good.token_ids) == (None, [7])
    assert [call[1] for call in cache.calls if call[0] == "store"] == ["b"]


def test_the_first_output_tells_where_the_time_went():
    clock = FakeClock()
    scheduler = make_scheduler(clock=clock)
    seq = make_sequence("a", 5)
    scheduler.add(seq)
    clock.now = 3.0
    step = scheduler.schedule()
    clock.now = 7.0
    [output] = scheduler.commit(step, Sampled([[7]]))
    assert (output.timing.queue_s, output.timing.restore_s, output.timing.prefill_s) == (2.0, 0.0, 4.0)
    step = scheduler.schedule()
    [output] = scheduler.commit(step, Sampled([[7]]))
    assert output.timing is None
    assert output.cached_tokens is None


# ---- abort


def test_abort_of_a_waiting_sequence_gives_one_final_output():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 5))
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    [final] = drain(scheduler)
    assert (final.request_id, final.finish_reason, final.token_ids) == ("a", FinishReason.ABORT, [])


def test_abort_between_two_chunks_frees_blocks_and_state():
    cache = RecordingCache()
    scheduler = make_scheduler(cache=cache)
    scheduler.add(make_sequence("a", 40))
    run_step(scheduler)
    assert scheduler.blocks.blocks.num_used == 10
    scheduler.abort("a")
    assert scheduler.blocks.blocks.num_used == scheduler.blocks.slots.num_used == 0
    assert ("finish", "a", True) in cache.calls  # the cache lets go before the blocks are free
    assert [output.finish_reason for output in drain(scheduler)] == [FinishReason.ABORT]


def test_abort_of_a_running_sequence_gives_one_final_output_and_frees():
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_sequence(name, 5, max_tokens=6, ignore_eos=True))
    run_step(scheduler)
    scheduler.abort("a")
    outputs = drain(scheduler)
    assert [o.finish_reason for o in outputs if o.request_id == "a"] == [FinishReason.ABORT]
    assert finals_of(outputs, "b")[0].finish_reason is FinishReason.LENGTH
    assert scheduler.blocks.blocks.num_used == 0


def test_abort_of_a_preempted_sequence_gives_one_final_output():
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2, any_=1)
    for name in "ab":
        scheduler.add(make_sequence(name, 8, max_tokens=12, ignore_eos=True))
    outputs = []
    while scheduler.counters.preemptions == 0:
        outputs += run_step(scheduler)[1]
    [victim] = [seq for seq in scheduler.waiting if seq.num_preemptions]
    scheduler.abort(victim.request.request_id)
    outputs += drain(scheduler)
    assert [o.finish_reason for o in finals_of(outputs, victim.request.request_id)] == [FinishReason.ABORT]


# ---- preemption


def test_a_full_pool_preempts_only_when_a_block_is_needed():
    scheduler = make_scheduler(num_blocks=5, max_num_seqs=2)
    for name in "ab":
        scheduler.add(make_sequence(name, 6, max_tokens=4, ignore_eos=True))  # 2 blocks each: the pool is full
    run_step(scheduler)
    assert scheduler.blocks.blocks.num_free == 0
    run_step(scheduler)  # positions 6: still inside block 2
    run_step(scheduler)  # position 7: the last of block 2
    assert scheduler.counters.preemptions == 0
    run_step(scheduler)  # position 8 needs a third block
    assert scheduler.counters.preemptions == 1


def test_the_victim_is_the_cheapest_per_block_and_never_the_one_closest_to_its_end():
    scheduler = make_scheduler(num_blocks=20, max_num_seqs=4, max_model_len=60)
    for name, length, tokens in (("near", 5, 3), ("cheap", 9, 30), ("dear", 8, 30), ("late", 9, 30)):
        scheduler.add(make_sequence(name, length, max_tokens=tokens, ignore_eos=True))
    while len(scheduler.running) < 4:
        run_step(scheduler)
    cost = {seq.request.request_id: len(seq.token_ids) / len(seq.block_table) for seq in scheduler.running}
    assert cost["near"] < cost["late"] <= cost["cheap"] < cost["dear"]
    assert scheduler._decode.victim().request.request_id == "late"


def test_preempted_sequences_give_the_same_tokens():
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=4, any_=1)
    seqs = [make_sequence(name, 5, max_tokens=15, ignore_eos=True) for name in "abcd"]
    for seq in seqs:
        scheduler.add(seq)
    outputs = drain(scheduler)
    assert scheduler.counters.preemptions > 0
    for seq in seqs:
        expected = [next_token(seq.token_ids[:n]) for n in range(seq.prompt_len, seq.prompt_len + 15)]
        assert tokens_of(outputs, seq.request.request_id) == expected
        assert len(finals_of(outputs, seq.request.request_id)) == 1


def test_a_preempted_sequence_queues_behind_a_prompt_in_progress():
    # Six usable blocks: "prompt" takes five, and "runner" needs its second while "prompt" is still in progress.
    scheduler = make_scheduler(num_blocks=7, max_num_seqs=2, max_num_batched_tokens=4, any_=1, max_model_len=28)
    runner, prompt = make_sequence("runner", 4, max_tokens=20, ignore_eos=True), make_sequence("prompt", 20, max_tokens=2)
    scheduler.add(runner)
    _, outputs = run_step(scheduler)
    scheduler.add(prompt)
    outputs += drain(scheduler)  # a preempted "runner" at the head would wait for ever for the blocks of "prompt"
    assert scheduler.counters.preemptions > 0
    assert tokens_of(outputs, "runner") == [next_token(runner.token_ids[:n]) for n in range(4, 24)]


def test_stop_preempted_request_ends_the_victim_with_its_reason():
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2, stop_preempted_request=True)
    for name in "ab":
        scheduler.add(make_sequence(name, 8, max_tokens=12, ignore_eos=True))
    outputs = drain(scheduler)
    reasons = sorted(finals_of(outputs, name)[0].finish_reason for name in "ab")
    assert reasons == [FinishReason.PREEMPTED, FinishReason.LENGTH]


def test_a_lone_sequence_that_outgrows_the_pool_ends_instead_of_looping():
    scheduler = make_scheduler(num_blocks=3, max_model_len=48)
    scheduler.add(make_sequence("a", 6, max_tokens=30, ignore_eos=True))
    outputs = drain(scheduler, max_steps=200)
    assert [o.finish_reason for o in finals_of(outputs, "a")] == [FinishReason.PREEMPTED]
    assert len(tokens_of(outputs, "a")) == 3  # 8 slots hold 8 tokens, the ninth has no block


# ---- fairness


def test_decode_goes_on_while_prompts_queue():
    scheduler = make_scheduler(max_num_seqs=40, num_blocks=200, num_state_slots=50)
    scheduler.add(make_sequence("old", 2, max_tokens=30, ignore_eos=True))
    run_step(scheduler)
    for i in range(24):
        scheduler.add(make_sequence(f"new-{i}", 16, max_tokens=1))
    kinds = "".join(run_step(scheduler)[0].kind.value[0] for _ in range(20))
    assert "p" * (MAX_PROMPT_STREAK + 1) not in kinds
    assert kinds.count("d") >= 20 * DECODE_PAUSE // (MAX_PROMPT_STREAK + DECODE_PAUSE) - 1


def test_outputs_equal_an_undisturbed_run():
    scheduler = make_scheduler()
    seqs = [make_sequence(f"{i}", 1 + 5 * i % 30, max_tokens=1 + i) for i in range(12)]
    for seq in seqs:
        scheduler.add(seq)
    outputs = drain(scheduler)
    for seq in seqs:
        assert tokens_of(outputs, seq.request.request_id) == expected_tokens(seq, 48)
