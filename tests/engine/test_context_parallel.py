"""Prompts that several ranks prefill together: the tokens of one rank, for every split, chunking, truncation, cache hit and preemption."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.exact_sums import ExactSums
from engine.model_runner import ModelRunner
from engine.models.draft import DraftSlice
from engine.parallel.prompt_exchange import pack, unpack
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.engine.simulation import run_ranks
from tests.engine.test_engine_model import CHECKPOINT, GOLDEN, SETTINGS

NEW = 8
EAGER = {"enforce_eager": True}
KEEP = {"yoco_mode": "compact", "yoco_keep_tokens": 40}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt["token_ids"] for prompt in json.loads((GOLDEN / "prompts.json").read_text())]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    vectors = load_file(GOLDEN / "vectors-fp32.safetensors")
    return [vectors[f"p{i}.gen_tokens"].tolist()[:NEW] for i in range(4)]


def serve(
    group: object, mine: list[list[int]], hicache: HiCacheConfig | None = None, rounds: int = 1, new: int = NEW, **changes: object
) -> tuple:
    """One rank's life: its prompts, `rounds` times. Returns tokens and cached tokens of the last round, and the engine's statistics."""
    config = EngineConfig(**{"model": str(CHECKPOINT), **SETTINGS, "prefill_any_interval": 1, "dp": group.size, **changes})  # type: ignore[attr-defined,arg-type]
    engine = Engine(config, hicache or HiCacheConfig(size_gb=0), group)  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    tokens: list[list[int]] = []
    cached: list[int] = []
    for round_ in range(rounds):
        tokens, cached = [[] for _ in mine], [0] * len(mine)
        for i, ids in enumerate(mine):
            engine.add_request(Request(f"{round_}-{i}", ids, sampling))
        idle = False
        while not idle:
            for output in engine.step():
                number = int(output.request_id.partition("-")[2])
                tokens[number] += output.token_ids
                cached[number] = output.cached_tokens if output.cached_tokens is not None else cached[number]
            idle = engine.idle
        # All ranks are idle in the same step; the next round begins on all of them.
    stats = engine.stats()
    engine.close()
    return tokens, cached, stats


SLOW = pytest.mark.slow


@pytest.mark.parametrize("path", [{}, EAGER], ids=["compiled", "torch"])
@pytest.mark.parametrize(("cp", "budget"), [(2, 16), (4, 64), *(pytest.param(*pair, marks=SLOW) for pair in [(2, 64), (2, 400), (4, 16)])])
def test_one_ranks_prompts_give_the_golden_tokens(prompts, expected, cp, budget, path):
    """All prompts belong to rank 0; the others only lend their time."""

    def rank_main(group):
        mine = prompts if group.rank == 0 else []
        return serve(group, mine, cp=cp, max_num_batched_tokens=budget, num_blocks=80 * cp, **path)[0]

    results = run_ranks(cp, rank_main)
    assert results[0] == expected
    assert results[1:] == [[]] * (cp - 1)


@pytest.mark.parametrize(("dp", "cp"), [(4, 2), *(pytest.param(*pair, marks=SLOW) for pair in [(2, 1), (2, 2), (4, 4)])])
def test_prompts_on_all_ranks_give_the_golden_tokens(prompts, expected, dp, cp):
    def rank_main(group):
        order = prompts[group.rank :] + prompts[: group.rank]
        return serve(group, order, cp=cp, max_num_batched_tokens=50, num_blocks=80 * cp)[0]

    for rank, tokens in enumerate(run_ranks(dp, rank_main)):
        assert tokens == expected[rank:] + expected[:rank]


@pytest.mark.parametrize("mode", [EAGER, KEEP], ids=["torch", "compact"])
def test_ranks_may_share_experts_as_well(prompts, mode):
    [(alone, _, _)] = run_ranks(1, lambda group: serve(group, prompts[1:], **mode))

    def rank_main(group):
        return serve(group, prompts[1:] if group.rank == 1 else [], cp=2, ep=2, num_blocks=160, max_num_batched_tokens=50, **mode)[0]

    assert run_ranks(2, rank_main) == [[], alone]


@SLOW
@pytest.mark.parametrize(("dp", "cp", "ep"), [(2, 2, 1), (4, 2, 4)])
def test_two_hundred_mixed_requests_give_the_tokens_of_one_rank(dp, cp, ep):
    draw = random.Random(11)
    many = [[draw.randrange(2, 400) for _ in range(draw.choice([1, 3, 20, 50, 130, 300]))] for _ in range(200)]
    settings = {**KEEP, "max_num_batched_tokens": 96}
    alone = run_ranks(1, lambda group: serve(group, many, **settings)[0])[0]

    def rank_main(group):
        return serve(group, many[group.rank :: dp], cp=cp, ep=ep, num_blocks=80 * cp, **settings)[0]

    for rank, tokens in enumerate(run_ranks(dp, rank_main)):
        assert tokens == alone[rank::dp]


MODES = [
    pytest.param(truncation, spec, marks=() if (name, spec) in (("compact", True), ("off", True)) else SLOW, id=f"{name}-{spec}")
    for name, truncation in (("off", {}), ("compact", KEEP), ("mask", {**KEEP, "yoco_mode": "mask"}))
    for spec in (False, True)
]


@pytest.mark.parametrize(("truncation", "spec"), MODES)
def test_tokens_equal_those_of_one_rank_in_every_mode(prompts, truncation, spec):
    settings = {**truncation, "spec": spec, "max_num_batched_tokens": 60}
    alone = run_ranks(1, lambda group: serve(group, prompts, **settings)[0])[0]

    def rank_main(group):
        return serve(group, prompts if group.rank else prompts[:1], cp=2, num_blocks=160, **settings)[0]

    few, all_ = run_ranks(2, rank_main)
    assert few == alone[:1]
    assert all_ == alone


def test_a_prefix_hit_reaches_all_ranks_of_the_group(prompts):
    long = [(ids * 60)[:300] for ids in prompts[:3]]
    settings = {**KEEP, "max_num_batched_tokens": 100}
    hicache = HiCacheConfig(size_gb=0.02, min_restore_tokens=16, segment="private")
    alone, hits, _ = run_ranks(1, lambda group: serve(group, long, hicache, 2, **settings))[0]
    assert min(hits) > 200

    def rank_main(group):
        return serve(group, long[group.rank : group.rank + 2], hicache, 2, cp=2, num_blocks=160, **settings)

    for rank, (tokens, cached, _) in enumerate(run_ranks(2, rank_main)):
        assert tokens == alone[rank : rank + 2]
        assert cached == hits[rank : rank + 2]


def test_preemption_recomputes_together(prompts):
    vectors = load_file(GOLDEN / "vectors-fp32.safetensors")
    expected = [vectors[f"p{i}.gen_tokens"].tolist() for i in range(4)]
    short = [prompts[1], prompts[2], prompts[2], prompts[1], prompts[2]]
    wanted = [expected[1], expected[2], expected[2], expected[1], expected[2]]

    def rank_main(group):
        # 25 blocks for each of the two ranks: three sequences do not fit when they have grown. Every draft is verified: lengths by measured
        # cost would let the sequences grow differently in every run.
        settings = {"num_blocks": 51, "max_num_seqs": 3, "enable_mtp_varlen": False}
        return serve(group, short if group.rank else short[:2], cp=2, new=32, **settings)

    (few, _, _), (all_, _, stats) = run_ranks(2, rank_main)
    assert few == wanted[:2]
    assert all_ == wanted
    assert stats["preemptions_total"] > 0


def logits_of_mixed_batches(cp: int, **mode: object) -> dict[int, torch.Tensor]:
    """Random prompts in random chunks, rows of all lengths, divided among `cp` ranks. By prompt the last logits, then those of a draft."""
    draw = random.Random(3)
    lengths = [1, 2, 3, 5, 17, 40, 64, 129]
    prompts = [[draw.randrange(200) for _ in range(length)] for length in lengths]
    cuts = [sorted({draw.randrange(1, length) for _ in range(3)}) if length > 3 else [] for length in lengths]

    def runs(group):
        settings = {"model": str(CHECKPOINT), **SETTINGS, **mode}
        size = group.size
        torch.set_num_threads(1)
        config = EngineConfig(**{**settings, "max_num_seqs": 8, "dp": size, "cp": size, "num_blocks": 100 * size + 1})
        runner = ModelRunner(config, draft=True, group=group)
        part, keep = runner.limits.part, int(str(mode.get("yoco_keep_tokens", 999)))
        ends = [[*points, length] for points, length in zip(cuts, lengths, strict=True)]
        starts = [0] * len(prompts)
        logits = {}
        while any(ends):
            slices = []
            numbers = []
            for number, points in enumerate(ends):
                if not points or number % size != group.rank:
                    continue
                start, end = starts[number], points[0]
                first = 1 + part * 100 + (number // size) * 9
                rows = LogitRows.LAST if end == lengths[number] else LogitRows.NONE
                history = tuple(prompts[number][max(0, start - runner.limits.ngram_history) : start])
                slot = 1 + part * (runner.limits.num_state_slots - 1) + number // size
                table = list(range(first, first + 9))
                slices.append(SequenceSlice(prompts[number][start:end], start, lengths[number], table, slot, history, logit_rows=rows))
                numbers += [number] if rows is LogitRows.LAST else []
            if slices:
                found = runner.run(Batch(StepKind.PREFILL, slices))
            else:
                runner.join(StepKind.PREFILL)
                found = torch.empty(0)
            logits |= dict(zip(numbers, found, strict=True))
            for number, points in enumerate(ends):
                if points:
                    starts[number] = points.pop(0)
        for number, row in logits.items():
            slot = 1 + part * (runner.limits.num_state_slots - 1) + number // size
            draft = runner.draft([DraftSlice(7, lengths[number] - 1, slot, max(0, lengths[number] - keep))])
            logits[number] = torch.cat((row, draft.logits.flatten()))
        return logits

    together = {number: row for logits in run_ranks(cp, runs) for number, row in logits.items()}
    assert sorted(together) == list(range(len(prompts)))
    return together


MASK = {**KEEP, "yoco_mode": "mask"}


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [({}, (2, 4)), (KEEP, (2, 4)), ({**MASK, "precision": "Fq"}, (2, 4)), ({**KEEP, **EAGER}, (2,))],
    ids=["off", "compact", "mask", "torch"],
)
def test_batch_invariant_logits_of_mixed_batches_are_those_of_one_rank_bit_for_bit(mode, sizes):
    invariant = {**mode, "batch_invariant": True}
    alone = logits_of_mixed_batches(1, **invariant)
    for cp in sizes:
        together = logits_of_mixed_batches(cp, **invariant)
        assert [number for number in alone if not torch.equal(together[number], alone[number])] == []


@pytest.mark.parametrize("mode", [{}, KEEP], ids=["off", "compact"])
@pytest.mark.parametrize("cp", [2, 4])
def test_torch_logits_of_mixed_batches_equal_those_of_one_rank(mode, cp):
    """To fp32 rounding: the library's products take another order for another number of rows."""
    alone, together = (logits_of_mixed_batches(size, **mode, enforce_eager=True) for size in (1, cp))
    for number, row in together.items():
        torch.testing.assert_close(row, alone[number], rtol=0, atol=2e-5)
        assert int(row.argmax()) == int(alone[number].argmax())


@pytest.mark.parametrize(
    ("mode", "size"),
    [(KEEP, 32), *(pytest.param(mode, size, marks=SLOW) for mode, size in [({}, 32), (KEEP, 100), ({}, 100)])],
    ids=["compact-32", "off-32", "compact-100", "off-100"],
)
def test_in_bf16_with_packed_rows_only_the_order_of_sums_can_differ(mode, size):
    """One prompt in chunks, more entries than are selected and more blocks than are candidates: equal bits once sums have one order."""
    prompt = [random.Random(3).randrange(200) for _ in range(300 if size > 32 else 110)]

    def rank_main(group):
        shape = {"dp": group.size, "cp": group.size, "num_blocks": 26 * group.size + 2, "precision": "B", "cache_rows": "packed"}
        runner = ModelRunner(EngineConfig(**{"model": str(CHECKPOINT), **SETTINGS, **EAGER, **mode, **shape}), group=group)
        back = runner.limits.ngram_history
        logits = torch.empty(0)
        with ExactSums(), ExactSums(torch.bfloat16):
            for start in range(0, len(prompt), size):
                end = min(start + size, len(prompt))
                rows = LogitRows.LAST if end == len(prompt) else LogitRows.NONE
                piece = SequenceSlice(
                    prompt[start:end], start, len(prompt), list(range(1, 20)), 1, tuple(prompt[max(0, start - back) : start])
                )
                if group.rank:
                    runner.join(StepKind.PREFILL)
                else:
                    logits = runner.run(Batch(StepKind.PREFILL, [msgspec.structs.replace(piece, logit_rows=rows)]))
        return logits

    [alone] = run_ranks(1, rank_main)
    together, _ = run_ranks(2, rank_main)
    assert torch.equal(together, alone)


def test_a_prompt_of_one_token_leaves_other_ranks_without_rows():
    results = run_ranks(4, lambda group: serve(group, [[7]] if group.rank == 0 else [], cp=4, num_blocks=161)[0])
    assert results[0] == run_ranks(1, lambda group: serve(group, [[7]])[0])[0]


def test_slices_survive_the_journey():
    draw = random.Random(1)
    slices = [
        SequenceSlice(
            token_ids=[draw.randrange(2**31) for _ in range(draw.randrange(1, 9))],
            start=draw.randrange(1000),
            total_len=draw.randrange(1000),
            block_table=[draw.randrange(1, 99) for _ in range(draw.randrange(9))],
            state_slot=draw.randrange(1, 9),
            history=tuple(draw.randrange(99) for _ in range(draw.randrange(3))),
            swa_valid_start=draw.randrange(9),
            logit_rows=draw.choice(list(LogitRows)),
            restored=draw.randrange(9),
        )
        for _ in range(20)
    ]
    assert unpack(pack(slices)) == slices
    assert unpack(pack([])) == []


def test_cp_must_divide_dp():
    with pytest.raises(ConfigError, match=r"engine.cp is 3 and engine.dp is 4"):
        EngineConfig(model=str(Path()), dp=4, cp=3)
