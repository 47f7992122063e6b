import pytest

from engine.distributed import SoloGroup
from engine.errors import ConfigError
from engine.prefill_gate import DECODE_PAUSE, MAX_INTERVAL, MAX_PROMPT_STREAK, Point, PrefillGate, VoteRule
from tests.engine.simulation import run_ranks


def gate_at(decode_step: int, attempt: int, any_: int) -> PrefillGate:
    gate = PrefillGate(SoloGroup(), attempt, any_)
    gate.decode_step = decode_step
    return gate


@pytest.mark.parametrize(
    ("attempt", "any_", "decode_step", "point"),
    [(70, 100, step, Point.ALL) for step in (0, 70, 140, 210)]
    + [(70, 100, step, Point.ANY) for step in (100, 200, 700)]
    + [(70, 100, step, Point.NONE) for step in (1, 69, 71, 99, 101)]
    + [(70, 2, step, Point.ANY) for step in (2, 4, 70, 100, 140)]
    + [(70, 2, step, Point.NONE) for step in (1, 3, 71, 99)]
    + [(70, 2, 0, Point.ALL), (70, 1, 0, Point.ALL), (70, 1, 1, Point.ANY), (1, 100, 55, Point.ALL)],
)
def test_vote_table(attempt: int, any_: int, decode_step: int, point: Point):
    assert gate_at(decode_step, attempt, any_).point() is point


@pytest.mark.parametrize(
    ("wants", "decode_step", "passes"), [((1, 0), 0, False), ((1, 1), 0, True), ((1, 0), 100, True), ((0, 0), 100, False)]
)
def test_all_needs_every_rank_and_any_needs_one(wants: tuple[int, int], decode_step: int, passes: bool):
    def rank_main(group):
        gate = PrefillGate(group, 70, 100)
        gate.decode_step = decode_step
        return gate.vote(unfinished=True, wants=bool(wants[group.rank]), decoding=False).prefill

    assert run_ranks(2, rank_main) == [passes, passes]


def test_one_rank_that_leaves_ends_the_group_in_the_same_step_on_all_ranks():
    def rank_main(group):
        gate = PrefillGate(group, 70, 100)
        left = []
        for step in range(4):
            if step == 2 and group.rank == 1:
                gate.leave()
            gate.vote(unfinished=group.rank == 0, wants=False, decoding=False)
            left.append(gate.left)
        return left

    assert run_ranks(3, rank_main) == [[False, False, True, True]] * 3


@pytest.mark.parametrize(
    ("rule", "decoding", "decode_step", "passes"),
    [
        (VoteRule.INTERVALS, False, 0, True),
        (VoteRule.INTERVALS, True, 1, False),
        (VoteRule.INTERVALS, True, DECODE_PAUSE, True),
        (VoteRule.REFERENCE, False, 0, False),
        (VoteRule.REFERENCE, True, DECODE_PAUSE, False),
        (VoteRule.REFERENCE, True, 100, True),
    ],
)
def test_a_prompt_in_progress_needs_no_vote_unless_the_reference_rules(rule: VoteRule, decoding: bool, decode_step: int, passes: bool):
    def rank_main(group):
        gate = PrefillGate(group, 70, 100, rule)
        gate.count_prompt_step()
        for _ in range(decode_step):
            gate.count_decode_step()
        mine = group.rank == 1
        return gate.vote(unfinished=True, wants=mine, decoding=decoding, begun=mine).prefill

    assert run_ranks(2, rank_main) == [passes, passes]


def test_an_idle_group_says_so():
    ballot = PrefillGate(SoloGroup(), 70, 100).vote(unfinished=False, wants=False, decoding=False)
    assert not ballot.unfinished
    assert not ballot.prefill


def test_prompt_steps_in_a_row_are_bounded_while_somebody_decodes():
    gate = PrefillGate(SoloGroup(), 70, 100)
    kinds = ""
    for _ in range(3 * (MAX_PROMPT_STREAK + DECODE_PAUSE)):
        if gate.vote(unfinished=True, wants=True, decoding=True).prefill:
            gate.count_prompt_step()
            kinds += "P"
        else:
            gate.count_decode_step()
            kinds += "d"
    assert kinds == ("P" * MAX_PROMPT_STREAK + "d" * DECODE_PAUSE) * 3


def test_a_decode_step_between_prompt_steps_starts_the_row_anew():
    gate = PrefillGate(SoloGroup(), 70, 1)
    wants = [True] * (MAX_PROMPT_STREAK - 1) + [False] + [True] * (MAX_PROMPT_STREAK + 1)
    passed = []
    for want in wants:
        passed.append(gate.vote(unfinished=True, wants=want, decoding=True).prefill)
        (gate.count_prompt_step if passed[-1] else gate.count_decode_step)()
    assert passed == [*wants[:-1], False]


def test_prompt_steps_in_a_row_are_free_while_nobody_decodes():
    gate = PrefillGate(SoloGroup(), 70, 100)
    for _ in range(3 * MAX_PROMPT_STREAK):
        assert gate.vote(unfinished=True, wants=True, decoding=False).prefill
        gate.count_prompt_step()


def test_a_change_of_intervals_reaches_all_ranks_in_the_same_vote():
    def rank_main(group):
        gate = PrefillGate(group, 70, 100)
        seen = []
        for step in range(4):
            if step == 1 and group.rank == 2:
                gate.propose(None, 5)
            if step == 2:
                gate.propose(10 + group.rank, None)  # all at once: the largest wins on every rank
            gate.vote(unfinished=True, wants=False, decoding=False)
            seen.append((gate.attempt_interval, gate.any_interval))
        return seen

    results = run_ranks(3, rank_main)
    assert results == [[(70, 100), (70, 5), (12, 5), (12, 5)]] * 3


@pytest.mark.parametrize("value", [0, -1, MAX_INTERVAL + 1])
def test_an_interval_outside_its_range_is_refused(value: int):
    with pytest.raises(ConfigError, match=f"prefill_any_interval is {value}"):
        PrefillGate(SoloGroup(), 70, 100).propose(None, value)
