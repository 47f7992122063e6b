"""Whether steps draft: when a way is left, and what trials of the other one cost."""

import random
from itertools import pairwise

import pytest

from engine.spec_modes import LEAST_TRIAL_SHARE, MAX_REST, TRIAL, TRIAL_SHARE, TURN, Mode

PLAIN = (1.0, 1.0)  # tokens and seconds of a step


def ways(mode: Mode, count: int, drafted, plain=PLAIN) -> list[tuple[bool, bool]]:
    """What steps do: whether they draft, and whether that is a trial. drafted: of a step's number."""
    result = []
    for number in range(count):
        if not mode.holds():
            mode.decide(plain, drafted(number))
        result.append((mode.drafts, mode.on_trial))
    return result


def always(*of):
    return lambda _: of


@pytest.mark.parametrize("drafted", [(3.0, 2.0), (2.0, 3.0)])
def test_the_better_way_is_taken_but_for_trials(drafted):
    taken = ways(Mode(), 20_000, always(*drafted))
    better = drafted[0] > drafted[1]
    assert all(drafts == (better is not trial) for drafts, trial in taken)
    assert any(trial for _, trial in taken)


@pytest.mark.parametrize("drafted", [(5.0, 2.7), (4.6, 5.0), (1.1, 6.0), (1.05, 1.0), (1.0, 1.05)])
def test_trials_lose_less_than_their_share_which_falls(drafted):
    """Turns included. The first trial is already within the share, not on credit."""
    for steps, share in ((30_000, TRIAL_SHARE), (400_000, 1.2 * LEAST_TRIAL_SHARE)):
        best, now = max(drafted[0] / drafted[1], 1.0), False
        seconds = tokens = 0.0
        for number, (drafts, _) in enumerate(ways(Mode(), steps, always(*drafted))):
            gained, took = drafted if drafts else PLAIN
            seconds += took + (TURN if number and drafts is not now else 0.0)
            tokens, now = tokens + gained, drafts
            assert steps > 30_000 or seconds * best - tokens <= share * seconds * best + 1e-9
        assert seconds * best - tokens <= share * seconds * best


@pytest.mark.parametrize(("believed", "true"), [((2.0, 3.0), (2.0, 1.5)), ((2.0, 1.5), (2.0, 3.0))])
def test_a_trial_that_shows_something_else_changes_the_way(believed, true):
    """What is believed of a way that is not taken may be wrong; a trial is long enough to tell."""
    mode, seen = Mode(), 0

    def known(_):
        return believed if seen < TRIAL else true

    def plain_known():
        return PLAIN if believed[0] < believed[1] or seen >= TRIAL else (1.0, 3.0)

    taken = []
    for _ in range(5000):
        if not mode.holds():
            mode.decide(plain_known(), known(0))
        seen += mode.on_trial
        taken.append((mode.drafts, mode.on_trial))
    first = next(i for i, (_, trial) in enumerate(taken) if trial)
    better = true[0] > true[1]
    assert {drafts for drafts, _ in taken[:first]} == {not better}
    assert {drafts for drafts, trial in taken[first + 10 :] if not trial} == {better}


def test_one_poor_round_is_no_reason_to_turn_and_many_are():
    """A turn costs about a plain step; whoever comes back at once pays twice."""
    mixed, poor, rng = Mode(), Mode(), random.Random(1)
    for mode in (mixed, poor):
        assert ways(mode, 1, always(5.0, 2.0)) == [(True, False)]
    rounds = ways(mixed, 300, lambda _: (1.8, 2.0) if rng.random() < 0.3 else (5.0, 2.0))
    assert all(drafts for drafts, trial in rounds if not trial)
    drafted = [drafts for drafts, _ in ways(poor, 20, always(1.8, 2.0))]  # each of them loses 0.2
    assert drafted == sorted(drafted, reverse=True)
    assert TURN / 0.2 - 1 <= sum(drafted) <= TURN / 0.2 + 1


def test_questions_become_rarer_while_plain_steps_stay_the_better_way():
    mode, asked = Mode(), []
    for step in range(190):
        if not mode.holds():
            asked.append(step)
            mode.decide(PLAIN, (1.0, 2.0))
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits == [TRIAL, 2 * TRIAL, 4 * TRIAL, *[MAX_REST] * 5]
