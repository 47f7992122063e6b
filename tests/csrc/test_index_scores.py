"""The scoring kernel, lane by lane on a CPU, against the plain definition."""

from dataclasses import replace

import pytest
import torch

from engine.ops.cuda.index_search import ScoreTuning, fits, joint_programs, scores_of
from engine.ops.index_search import IndexQuery
from tests.csrc.emulated import emulated_kernels
from tests.ops.test_index_search import Problem

DEFAULT = ScoreTuning()


@pytest.fixture(scope="module")
def run():
    return emulated_kernels()


def score(run, problem, allowed=None, size=4, rows=slice(None), tuning=DEFAULT, joint=True):
    assert fits(problem.query, problem.paged, size)
    columns = problem.num_entries if allowed is None else allowed.shape[1] * size
    return scores_of(run, 0, problem.query, problem.paged, rows, columns, allowed, size, tuning, joint)


@pytest.mark.parametrize(("heads", "width"), [(32, 128), (16, 128), (16, 64), (16, 32), (32, 32)])
def test_every_entry_gets_the_score_of_the_definition(run, heads, width):
    lens = [1, 40, 0, 17, 150, 16]
    problem = Problem("cpu", lens, heads=heads, width=width)
    got = score(run, problem)
    if (heads, width) == (32, 128):
        for tuning in (ScoreTuning(4, 3, 0, False), ScoreTuning(8, 4, 1, False), ScoreTuning(4, 4, 0, False), ScoreTuning(4, 5, 1, True)):
            other = score(run, problem, tuning=tuning)
            assert all(torch.equal(other[row, :count], got[row, :count]) for row, count in enumerate(lens))
    for row, count in enumerate(lens):
        wanted = problem.scores(row)
        assert (got[row, :count] - wanted).abs().max() <= 1e-5 * wanted.abs().max() if count else True


def test_scores_of_candidate_blocks_stand_in_their_order(run):
    problem = Problem("cpu", [41, 10])
    allowed = torch.tensor([[0, 4, 10, -1], [1, 2, -1, -1]], dtype=torch.int32)
    got, inf = score(run, problem, allowed), float("inf")
    for row, entries in enumerate(([0, 1, 2, 3, 16, 17, 18, 19, 40], [4, 5, 6, 7, 8, 9])):
        wanted = problem.scores(row)[entries]
        assert (got[row, : len(entries)] - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert (got[row, len(entries) :] == -inf).all()


def test_a_score_does_not_depend_on_where_it_is_computed(run):
    problem = Problem("cpu", [200, 90, 200])
    together, few = score(run, problem), score(run, problem, tuning=ScoreTuning(waves=9))
    for row, count in enumerate([200, 90, 200]):
        assert torch.equal(few[row, :count], together[row, :count])
        assert torch.equal(score(run, problem, rows=slice(row, row + 1))[0, :count], together[row, :count])
    allowed = torch.tensor([[3, 7, 20]] * 3, dtype=torch.int32)
    assert torch.equal(score(run, problem, allowed)[0], together[0, [*range(12, 16), *range(28, 32), *range(80, 84)]])


@pytest.mark.parametrize(("lens", "rows_per_seq"), [([70, 9], 5), ([300], 19), ([3, 0, 40], 3), ([130, 129, 65, 2], 4)])
def test_rows_that_share_keys_get_the_bits_of_rows_alone(run, lens, rows_per_seq):
    """Sequences that end inside a block of rows, one without entries, rows that see nothing yet."""
    problem = Problem("cpu", lens, rows_per_seq, heads=32, width=128, per_block=16)
    alone, joint = (
        scores_of(run, 0, problem.query, problem.paged, slice(None), problem.num_entries, None, 4, joint=one) for one in (False, True)
    )
    for row, count in enumerate(problem.query.count.tolist()):
        assert torch.equal(joint[row, :count], alone[row, :count]), row
    by_entries = score(run, problem, tuning=ScoreTuning(groups=False), joint=False)
    assert all(torch.equal(by_entries[row, :count], alone[row, :count]) for row, count in enumerate(problem.query.count.tolist()))
    part = scores_of(run, 0, problem.query, problem.paged, slice(2, 9), problem.num_entries, None, 4)
    assert all(torch.equal(part[row, :count], alone[row + 2, :count]) for row, count in enumerate(problem.query.count[2:9].tolist()))


def test_thread_blocks_of_joint_rows_fill_the_device_in_whole_waves():
    assert joint_programs(16, 64, 132) == 1
    for rows, columns in ((428, 65_536), (140, 131_072), (8, 131_072)):
        blocks = -(-rows // 16) * joint_programs(rows, columns, 132)
        assert blocks / (-(-blocks // 132) * 132) > 0.9


def test_every_code_and_scale_is_decoded_to_its_value(run):
    problem = Problem("cpu", [16])
    wanted = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (torch.arange(16) + torch.arange(16)[:, None]).to(torch.uint8) % 16  # byte b of entry e: (e + b) % 16 twice
    for exponent in (20, 60, 100, 127, 144):
        blocks, base = problem.paged.blocks.clone(), problem.paged.offset
        for page in range(2):
            block = blocks[problem.paged.table[0, page]]
            block[base : base + 8 * 16] = (codes[8 * page : 8 * page + 8] * 17).flatten()
            block[base + 8 * 16 : base + 8 * 17] = exponent
        paged = replace(problem.paged, blocks=blocks)
        # One head per channel, each asking for its sign and size.
        for channel in range(0, 32, 16):
            q = torch.zeros(1, 16, 32)
            q[0, torch.arange(16), channel + torch.arange(16)] = 1.0
            for sign in (1.0, -1.0):
                for head in (0, 7, 15):
                    weights = torch.zeros(1, 16, dtype=torch.bfloat16)
                    weights[0, head] = 1.0
                    query = IndexQuery((q * sign).bfloat16(), weights, problem.query.seq, problem.query.count)
                    got = scores_of(run, 0, query, paged, slice(None), 16, None, 4)[0]
                    code = codes[:, (channel + head) // 2].long()
                    value = wanted[code % 8] * (1 - 2 * (code // 8)) * sign * 2.0 ** (exponent - 127)
                    assert torch.equal(got, value.clamp(min=0)), (exponent, channel, sign, head)


def test_problems_without_native_code_are_told_apart(run):
    problem = Problem("cpu", [20])
    assert fits(problem.query, problem.paged, 8)
    assert not fits(problem.query, problem.paged, 6)
    assert not fits(problem.query, problem.paged, 2)
    assert not fits(Problem("cpu", [20], heads=64).query, problem.paged, 8)
    assert not fits(problem.query, replace(problem.paged, blocks=problem.paged.blocks[:, 1:]), 8)
    assert not fits(problem.query, replace(problem.paged, offset=problem.paged.offset + 8), 8)
    assert score(run, problem, rows=slice(0, 0)).shape == (0, 20)
