import pytest
import torch

from engine.cache_layout import BlockLayout, RowSizes
from engine.config import Precision
from engine.models.config import parse_config
from engine.models.numerics import Numerics
from engine.ops.cache_rows import pack_index_rows, unpack_index_rows
from engine.ops.candidate_blocks import best_of_blocks
from engine.ops.index_search import INDEX_SEARCH, PLACE_ENTRIES, IndexQuery, PagedIndexKeys, ascending
from engine.ops.q4_index import q4_index
from tests.models.tiny_configs import golden_config

HEADS, WIDTH, PER_BLOCK = 16, 32, 8


class Problem:
    """Sequences with scrambled blocks; the bytes of everything that no sequence owns are 0xFF."""

    def __init__(self, device, lens, rows_per_seq=1, heads=HEADS, width=WIDTH, per_block=PER_BLOCK):
        torch.manual_seed(sum(lens))
        layout = BlockLayout.of(parse_config(golden_config()).text, 16, RowSizes(66, 36, width // 2 + width // 32, width // 2, True))
        offset = layout.index_offset[5]
        pages = [-(-n // per_block) for n in lens]
        order = torch.randperm(sum(pages)) + 1
        self.keys = [q4_index(torch.randn(n, width)) for n in lens]
        blocks = torch.full((sum(pages) + 1, max(layout.block_bytes, offset + per_block * width)), 0xFF, dtype=torch.uint8)
        blocks = torch.nn.functional.pad(blocks, (0, -blocks.shape[1] % 128), value=0xFF)
        table, used = torch.zeros(len(lens), max(1, *pages), dtype=torch.int64), 0
        for seq, (keys, count) in enumerate(zip(self.keys, pages, strict=True)):
            table[seq, :count] = order[used : used + count]
            used += count
            entry, packed, data = torch.arange(len(keys)), pack_index_rows(keys), width // 2
            block, place, middle = table[seq, entry // per_block], entry % per_block, offset + per_block * data
            for begin, part in ((offset, packed[:, :data]), (middle, packed[:, data:])):
                blocks[:, begin : begin + per_block * part.shape[1]].unflatten(1, (per_block, -1))[block, place] = part
        self.paged = PagedIndexKeys(blocks.to(device), offset, per_block, table.to(device))
        seq = torch.arange(len(lens)).repeat_interleave(rows_per_seq)
        back = torch.arange(rows_per_seq).flip(0).repeat(len(lens))
        count = (torch.tensor(lens)[seq] - back).clamp(min=0)
        q = q4_index(torch.randn(len(seq), heads, width)).bfloat16()
        self.query = IndexQuery(q.to(device), torch.randn(len(seq), heads).bfloat16().to(device), seq.to(device), count.to(device))
        self.num_entries = max(lens)

    def run(self, function, topk=12, allowed=None, size=4, num_kept=0):
        return function(self.query, self.paged, self.num_entries, topk, allowed, size, num_kept)

    def scores(self, row):
        keys = self.keys[int(self.query.seq[row])][: int(self.query.count[row])]
        q, weights = self.query.q[row].float().cpu(), self.query.weights[row].float().cpu()
        return (weights[:, None] * (q @ keys.T).relu()).sum(0)


@pytest.fixture
def kernel(device):
    from engine.ops.triton.index_search import launch

    return launch


@pytest.fixture
def native(device):
    if device != "cuda":
        pytest.skip("on a CPU by the emulator: tests/csrc/test_index_scores.py")
    from engine.ops.cuda.index_search import launch

    return launch


@pytest.fixture(params=["reference", "kernel", "native"])
def impl(request):
    return INDEX_SEARCH.reference if request.param == "reference" else request.getfixturevalue(request.param)


def test_packed_rows_are_found_through_the_table(device):
    problem = Problem("cpu", [19, 3])
    rows = problem.paged.rows(torch.tensor([0, 1]), torch.tensor([[18, 0, 9], [2, 1, 0]]), WIDTH)
    assert torch.equal(unpack_index_rows(rows[0], torch.float32), problem.keys[0][[18, 0, 9]])
    assert torch.equal(unpack_index_rows(rows[1], torch.float32), problem.keys[1][[2, 1, 0]])


@pytest.mark.parametrize("lens", [[1], [5, 40, 0, 17], [100, 33]])
def test_the_best_entries_of_each_row_are_picked(device, impl, lens):
    problem = Problem(device, lens)
    picked, blocks = problem.run(impl)
    assert blocks is None
    assert picked.shape == (len(lens), min(12, max(lens)))
    for row, n in enumerate(lens):
        best = problem.scores(row)[:n].topk(min(12, n)).indices.sort().values
        assert picked[row, : len(best)].tolist() == best.tolist()
        assert (picked[row, len(best) :] == -1).all()


def test_rows_of_one_sequence_see_only_their_own_past(device, impl):
    problem = Problem(device, [30, 9], rows_per_seq=4)
    picked, _ = problem.run(impl, topk=8)
    for row in range(8):
        best = problem.scores(row).topk(8 if row < 4 else min(8, 6 + row - 4)).indices.sort().values
        assert picked[row, : len(best)].tolist() == best.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(("lens", "rows_per_seq"), [([70, 9], 5), ([3000], 19), ([3, 0, 40], 3), ([1300, 129, 65, 2], 4)])
def test_rows_that_share_keys_get_the_bits_of_rows_alone(lens, rows_per_seq):
    """On a CPU by the emulator, which cannot tell how tensor cores add: tests/csrc/test_index_scores.py."""
    from engine.ops.cuda.index_search import scores_of
    from engine.ops.cuda.packed_gemm import machine

    problem = Problem("cuda", lens, rows_per_seq, heads=32, width=128, per_block=16)
    alone, joint = (
        scores_of(*machine(torch.device("cuda")), problem.query, problem.paged, slice(None), problem.num_entries, None, 4, joint=joint)
        for joint in (False, True)
    )
    for row, count in enumerate(problem.query.count.tolist()):
        assert torch.equal(joint[row, :count], alone[row, :count]), row


def test_candidate_blocks_hold_the_best_and_the_newest(device, impl):
    problem = Problem(device, [41, 2, 0])
    picked, blocks = problem.run(impl, num_kept=3)
    scores = torch.nn.functional.pad(problem.scores(0), (0, 3), value=float("-inf")).view(-1, 4).amax(1)
    scores[10] = float("inf")
    assert blocks.tolist() == [scores.topk(3).indices.sort().values.tolist(), [0, -1, -1], [-1, -1, -1]]
    plain, _ = problem.run(impl)
    assert torch.equal(plain, picked)


@pytest.mark.parametrize(("columns", "size"), [(41, 4), (40, 8), (1, 8), (5000, 8), (33, 6)])
def test_the_best_of_each_block_is_that_of_the_reference(device, columns, size):
    from engine.ops.triton.index_search import best_blocks

    scores = torch.randn(5, columns, device=device)
    count = torch.tensor([columns, 0, 1, columns // 2, min(columns, size)], device=device)
    visible = torch.arange(columns, device=device) < count[:, None]
    wanted = best_of_blocks(scores.masked_fill(~visible, float("-inf")), count, size)
    assert torch.equal(best_blocks(scores.masked_fill(~visible, float("nan")), count, size), wanted)


def test_restricted_search_stays_inside_its_blocks(device, impl):
    problem = Problem(device, [41, 10])
    allowed = torch.tensor([[0, 4, 10], [1, 2, -1]], dtype=torch.int32, device=device)
    picked, _ = problem.run(impl, topk=5, allowed=allowed)
    for row, entries in enumerate(([0, 1, 2, 3, 16, 17, 18, 19, 40], [4, 5, 6, 7, 8, 9])):
        best = torch.tensor(entries)[problem.scores(row)[entries].topk(5).indices].sort().values
        assert picked[row].tolist() == best.tolist()
    few, _ = problem.run(impl, topk=12, allowed=allowed[:, 2:])
    assert few.tolist() == [[40] + [-1] * 11, [-1] * 12]


def test_long_rows_in_bounded_groups_give_the_same(device, kernel, monkeypatch):
    import engine.ops.triton.index_search as module

    problem = Problem(device, [150, 77, 9])
    whole = problem.run(kernel)[0]
    monkeypatch.setattr(module, "GROUP_BYTES", 4 * 150)
    assert torch.equal(problem.run(kernel)[0], whole)
    assert torch.equal(problem.run(kernel)[0], problem.run(INDEX_SEARCH.reference)[0])


def test_fp32_runs_the_reference(device, kernel):
    problem = Problem(device, [20])
    wide = IndexQuery(problem.query.q.float(), problem.query.weights.float(), problem.query.seq, problem.query.count)
    assert torch.equal(kernel(wide, problem.paged, 20, 5, None, 4)[0], INDEX_SEARCH.reference(wide, problem.paged, 20, 5, None, 4, 0)[0])


def test_entries_are_placed_through_the_table(device):
    from engine.ops.triton.index_search import place_entries

    table = torch.tensor([[3, 9, 1], [7, 2, 4]], device=device)
    index = torch.tensor([[0, 8, 23, -1], [15, -1, 7, 16]], dtype=torch.int32, device=device)
    for run in (PLACE_ENTRIES.reference, place_entries):
        got = run(index, torch.tensor([0, 1], device=device), table, 8, 100, 50)
        assert got.tolist() == [[350, 950, 157, -1], [257, -1, 757, 450]]


def test_ascending_puts_absent_entries_behind():
    assert ascending(torch.tensor([[5, -1, 0, 9, -1]])).tolist() == [[0, 5, 9, -1, -1]]


def test_layout_of_the_released_numbers_is_what_the_search_reads():
    assert RowSizes.of(parse_config(golden_config()).text, Numerics.of(Precision.B, packed_rows=True)) == RowSizes(66, 36, 17, 16, True)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[8192, 100], [65_536], [20_000] * 5])
@pytest.mark.parametrize("kind", ["kernel", "native"])
def test_kernel_agrees_at_the_released_shape(request, device, kind, lens):
    kernel = request.getfixturevalue(kind)
    problem = Problem(device, lens, heads=32, width=128, per_block=128)
    picked, blocks = problem.run(kernel, topk=512, size=8, num_kept=2048)
    wanted, wanted_blocks = problem.run(INDEX_SEARCH.reference, topk=512, size=8, num_kept=2048)
    assert (picked != wanted).float().mean() <= 0.01
    again, _ = problem.run(kernel, topk=512, allowed=wanted_blocks, size=8)
    assert (again != problem.run(INDEX_SEARCH.reference, topk=512, allowed=wanted_blocks, size=8)[0]).float().mean() <= 0.01
    assert (blocks != wanted_blocks).float().mean() <= 0.01
