"""The sampling kernels, thread by thread on a CPU, against the definitions of the draws."""

from dataclasses import replace

import pytest
import torch

from engine.draws import FIXED_ONE
from engine.ops.cuda import sample_rows
from engine.ops.sample_rows import SAMPLE_ROWS, Draws, Filters, Mode
from engine.random_keys import draws53, race_keys
from tests.csrc.emulated import emulated_kernels


@pytest.fixture(scope="module")
def run():
    return emulated_kernels()


def run_rows(run, stream, logits, wanted, num_ids):
    """In blocks of 128 threads: here every thread costs time."""
    return sample_rows.run_rows(run, stream, logits, wanted, num_ids, threads=128)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def draws(modes, temperature=1.0, first=0):
    seeds, positions = [1000 + i for i in range(len(modes))], [first + i for i in range(len(modes))]
    keys, numbers = torch.from_numpy(race_keys(seeds, positions)), torch.from_numpy(draws53(seeds, positions))
    modes = torch.tensor(modes, dtype=torch.int32)
    return Draws(torch.full((len(modes),), temperature), modes, torch.where(modes == Mode.RACE, keys, numbers))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize(("num_ids", "width"), [(1, 1), (17, 20), (300, 300), (5000, 5003)])
def test_rows_draw_the_tokens_of_the_definition(run, num_ids, width, temperature):
    modes = [Mode.GREEDY, Mode.RACE, Mode.INVERSE, Mode.RACE, Mode.INVERSE]
    logits = torch.randn(5, width) * 3
    logits[:, num_ids:] = 1e9  # ids without a token, never chosen
    wanted = draws(modes, temperature, first=num_ids)
    ids, best = run_rows(run, 0, logits, wanted, num_ids)
    want_ids, want_best = SAMPLE_ROWS.reference(logits, wanted, num_ids)
    assert ids.tolist() == want_ids.tolist()
    assert torch.equal(best, want_best)


FILTERS = [(0.9, 0, 0.0), (1.0, 5, 0.0), (1.0, 0, 0.2), (0.5, 3, 0.0), (0.05, 0, 0.0), (1.0, 1, 0.0), (0.7, 40, 0.01), (1.0, 0, 0.0)]


@pytest.mark.parametrize("levels", [None, 4])
def test_filtered_rows_draw_the_tokens_of_the_definition(run, levels):
    """Also where many ids share a probability, so that a filter ends among ties."""
    num_ids, modes = 1100, [Mode.RACE, Mode.INVERSE] * len(FILTERS)
    logits = torch.randn(len(modes), num_ids) * 2
    if levels:
        logits = (logits * levels / 4).round() * 4 / levels
    plain = draws(modes, 0.8)
    both = [f for f in FILTERS for _ in range(2)]
    filters = Filters(
        torch.tensor([int(p * FIXED_ONE) if p < 1 else 2 * FIXED_ONE for p, _, _ in both]),
        torch.tensor([k or 2**31 - 1 for _, k, _ in both], dtype=torch.int32),
        torch.tensor([m for _, _, m in both]),
    )
    wanted = Draws(plain.temperature, plain.modes, plain.numbers, filters)
    ids, _ = run_rows(run, 0, logits, wanted, num_ids)
    assert ids.tolist() == SAMPLE_ROWS.reference(logits, wanted, num_ids)[0].tolist()


def test_a_filter_among_ties_keeps_the_lower_ids(run):
    logits = torch.zeros(1, 900)
    logits[0, 500:] = 1.0
    for k in (1, 37, 400, 401):
        filters = Filters(torch.tensor([2 * FIXED_ONE]), torch.tensor([k], dtype=torch.int32), torch.zeros(1))
        # The largest number falls on the last id that stays.
        last = Draws(torch.ones(1), torch.tensor([Mode.INVERSE], dtype=torch.int32), torch.tensor([2**53 - 1]), filters)
        ids, _ = run_rows(run, 0, logits, last, 900)
        assert ids.tolist() == SAMPLE_ROWS.reference(logits, last, 900)[0].tolist()


def test_ids_just_below_what_every_thread_has_do_not_pass_a_filter(run):
    """The most probable ids one for each thread, the others so close that the first digits are the same."""
    logits = torch.full((1, 4096), 1.0)
    logits[0, : 4 * 128 : 4] = 1.01
    for k in (60, 128):
        filters = Filters(torch.tensor([2 * FIXED_ONE]), torch.tensor([k], dtype=torch.int32), torch.zeros(1))
        last = Draws(torch.ones(1), torch.tensor([Mode.INVERSE], dtype=torch.int32), torch.tensor([2**53 - 1]), filters)
        ids, _ = run_rows(run, 0, logits, last, 4096)
        assert ids.tolist() == SAMPLE_ROWS.reference(logits, last, 4096)[0].tolist()


@pytest.mark.parametrize(
    ("spread", "nucleus", "k"),
    [
        (0.1, 0.9, 0),
        (0.1, 0.02, 0),
        (3.0, 0.95, 0),
        (0.1, 1.0, 700),
        (0.0, 0.5, 0),
        (0.0, 1.0, 300),
        (0.0, 1.0, 600),
        (3.0, 0.95, 50),
        (9.0, 1.0, 192),
    ],
)
def test_filters_that_keep_few_ids_and_many_draw_the_tokens_of_the_definition(run, spread, nucleus, k):
    """Few are collected by one block, many are counted by all; which it is shows only when the row is known. Of some rows most ids have no
    chance at all.
    """
    num_ids, modes = 4500, [Mode.RACE, Mode.INVERSE] * 3
    logits = torch.randn(6, num_ids) * spread
    logits[4:, 20:] = -torch.inf
    plain = draws(modes)
    top_p, top_k = int(nucleus * FIXED_ONE) if nucleus < 1 else 2 * FIXED_ONE, k or 2**31 - 1
    filters = Filters(torch.full((6,), top_p), torch.full((6,), top_k, dtype=torch.int32), torch.zeros(6))
    wanted = Draws(plain.temperature, plain.modes, plain.numbers, filters)
    ids, _ = run_rows(run, 0, logits, wanted, num_ids)
    assert ids.tolist() == SAMPLE_ROWS.reference(logits, wanted, num_ids)[0].tolist()


@pytest.mark.parametrize("temperature", [0.001, 1.0, 50.0])
def test_races_of_extreme_logits_are_won_by_the_definition_s_winner(run, temperature):
    """Among large logits, whose times differ less than a power of two can say, among few that are not masked, and beside one that wins."""
    logits = torch.randn(6, 2100)
    logits[0] += 3000.0
    logits[1, 5:] = -torch.inf
    logits[2, :2099] = -torch.inf
    logits[3] *= 1e-30
    logits[4] = -3.0e38
    logits[5, 1234] = 1e30
    wanted = draws([Mode.RACE] * 6, temperature)
    ids, _ = run_rows(run, 0, logits, wanted, 2100)
    assert ids.tolist() == SAMPLE_ROWS.reference(logits, wanted, 2100)[0].tolist()


def test_ties_go_to_the_lower_id_and_draws_follow_the_distribution(run):
    logits = torch.full((3, 700), -torch.inf)
    logits[:, [40, 333, 690]] = 2.0
    ids, _ = run_rows(run, 0, logits, draws([Mode.GREEDY, Mode.RACE, Mode.INVERSE]), 700)
    assert ids[0] == 40
    assert set(ids.tolist()) <= {40, 333, 690}
    many = draws([Mode.RACE, Mode.INVERSE] * 9)
    ids, _ = run_rows(run, 0, logits[:1].expand(18, -1), many, 700)
    for mode in (Mode.RACE, Mode.INVERSE):
        assert set(ids[many.modes == mode].tolist()) == {40, 333, 690}


@pytest.mark.parametrize("threads", [256, 512])
def test_shared_memory_holds_the_longest_rows_beside_what_filters_need(run, threads):
    num_ids = sample_rows.MOST_IDS
    logits = torch.zeros(1, num_ids)
    logits[0, num_ids - 1] = 1.0
    filters = Filters(torch.tensor([2 * FIXED_ONE]), torch.tensor([2**31 - 1], dtype=torch.int32), torch.zeros(1))
    wanted = Draws(torch.ones(1), torch.tensor([Mode.GREEDY], dtype=torch.int32), torch.tensor([0]), filters)
    ids, _ = sample_rows.run_rows(run, 0, logits, wanted, num_ids, threads)
    assert ids.tolist() == [num_ids - 1]


def test_rows_without_a_finite_maximum_give_some_id_and_say_so(run):
    logits = torch.randn(4, 300)
    logits[0, 7] = float("nan")
    logits[1, 9] = float("inf")
    logits[2] = -float("inf")
    for mode in Mode:
        ids, best = run_rows(run, 0, logits, draws([mode] * 4), 300)
        assert best[0].isnan()
        assert best[1] == float("inf")
        assert best[2] == -float("inf")
        assert ((ids >= 0) & (ids < 300)).all()
        assert best[3] == logits[3].max()


def test_a_row_does_not_depend_on_its_batch(run):
    logits, wanted = torch.randn(6, 900) * 2, draws([Mode.RACE, Mode.INVERSE, Mode.GREEDY] * 2)
    together, _ = run_rows(run, 0, logits, wanted, 900)
    for i in range(6):
        one = Draws(*(part[i : i + 1] for part in (wanted.temperature, wanted.modes, wanted.numbers)))
        assert run_rows(run, 0, logits[i : i + 1], one, 900)[0].item() == together[i]
    assert run_rows(run, 0, logits[:0], Draws(*(part[:0] for part in (wanted.temperature, wanted.modes, wanted.numbers))), 900)[
        0
    ].shape == (0,)


def test_naming_the_kinds_of_rows_changes_no_token(run):
    logits = torch.randn(4, 900)
    filters = Filters(torch.full((4,), 2 * FIXED_ONE), torch.full((4,), 30, dtype=torch.int32), torch.zeros(4))
    for modes in ([Mode.RACE] * 4, [Mode.GREEDY, Mode.RACE] * 2, [Mode.INVERSE] * 4, [Mode.GREEDY, Mode.INVERSE] * 2):
        for kept in (None, filters):
            wanted = replace(draws(modes), filters=kept)
            named = replace(wanted, kinds=frozenset(modes))
            assert torch.equal(run_rows(run, 0, logits, named, 900)[0], run_rows(run, 0, logits, wanted, 900)[0])
