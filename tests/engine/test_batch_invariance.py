"""A row's logits are the same bits alone and among neighbours, for any chunks, with and without a prefix from the cache."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.batch import Batch, LogitRows, StepKind
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.models.draft import DraftSlice
from engine.models.tiny import ensure_tiny
from engine.ops.registry import select
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.models.golden import Seq, decode, prefill

NEIGHBOURS = 63


def settings(model: str, **changes) -> EngineConfig:
    base = {
        "model": model,
        "batch_invariant": True,
        "max_num_seqs": NEIGHBOURS + 1,
        "max_model_len": 1536,
        "max_num_batched_tokens": 8192,
        "num_blocks": 66 * 8,
        "yoco_mode": "compact",
        "yoco_keep_tokens": 140,
    }
    return EngineConfig(**{**base, **changes})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(ensure_tiny(tmp_path_factory.mktemp("tiny")))


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
PATHS = [
    pytest.param({}, id="compiled"),
    pytest.param({"enforce_eager": True}, id="eager"),
    pytest.param({"enforce_eager": True, "precision": "R"}, id="eager-bf16", marks=pytest.mark.slow),
    pytest.param({"precision": "B", "cache_rows": "packed", "weights": "packed"}, id="eager-packed", marks=pytest.mark.slow),
    pytest.param({"device": "cuda"}, id="graphs", marks=GPU),
    pytest.param({"device": "cuda", "enforce_eager": True}, id="eager-gpu", marks=GPU),
    pytest.param({"device": "cuda", "precision": "Fq"}, id="reference-gpu", marks=GPU),
]


@pytest.fixture(scope="module", params=PATHS)
def path(request) -> Iterator[dict[str, Any]]:
    yield request.param
    select("auto", "cpu")  # ops are chosen per process: the next module's are the usual ones


@pytest.fixture(scope="module")
def runner(tiny, path) -> ModelRunner:
    runner = ModelRunner(settings(tiny, **path), draft=True)
    graphs = path.get("device") == "cuda" and path.keys() == {"device"}
    assert runner.path == ("graphs" if graphs else "eager" if path else "compiled"), runner.native.status
    return runner


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(20, 4000) for _ in range(count)]


def logits(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    """A copy: recorded steps write the next one's to the same place."""
    return runner.run(batch).clone()


def compute(seq: Seq, end: int) -> None:
    """Prefill up to `end` without logits: decoder truncation drops early rows."""
    seq.runner.run(Batch(StepKind.PREFILL, [seq.slice(end, LogitRows.NONE)]))


def test_a_decode_row_does_not_depend_on_its_neighbours_or_its_place(runner):
    rng = random.Random(1)
    seqs = [Seq(runner, random_ids(rng, rng.randint(3, 40)), slot) for slot in range(1, NEIGHBOURS + 2)]
    seqs[0] = Seq(runner, random_ids(rng, 300), 1)
    for seq in seqs:
        compute(seq, len(seq.ids) - 1)
    slices = [seq.slice(len(seq.ids)) for seq in seqs]
    alone = logits(runner, Batch(StepKind.DECODE, slices[:1]))
    for count in (2, 7, NEIGHBOURS + 1):
        order = [0, *rng.sample(range(1, len(seqs)), count - 1)]
        rng.shuffle(order)
        rows = logits(runner, Batch(StepKind.DECODE, [slices[i] for i in order]))
        assert torch.equal(rows[order.index(0)], alone[0])


def test_a_verify_row_equals_the_decode_row_at_its_position(runner):
    rng = random.Random(2)
    ids = random_ids(rng, 150)
    one, other = Seq(runner, ids, 1), Seq(runner, ids, 2)
    compute(one, 144)
    compute(other, 144)
    single = torch.cat([decode([one])[0] for _ in range(6)])
    assert torch.equal(decode([other], 6, StepKind.VERIFY)[0], single)


def test_a_prompt_does_not_depend_on_its_chunks_or_on_prompts_beside_it(runner):
    rng = random.Random(3)
    ids = random_ids(rng, 400)
    wanted = None
    for size in (8192, 128, 192):
        seq = Seq(runner, ids, 1)
        for start in range(0, 399, size):
            compute(seq, min(start + size, 399))
        last = decode([seq])[0]
        assert wanted is None or torch.equal(last, wanted), f"chunks of {size}"
        wanted = last
    seq, beside = Seq(runner, ids[:399], 1), [Seq(runner, random_ids(rng, n), n) for n in (5, 60)]
    pieces = [one.slice(len(one.ids), LogitRows.LAST) for one in (beside[0], seq, beside[1])]
    together = logits(runner, Batch(StepKind.PREFILL, pieces))[1]
    alone = Seq(runner, ids[:399], 2)
    assert torch.equal(logits(runner, Batch(StepKind.PREFILL, [alone.slice(399, LogitRows.LAST)]))[0], together)


def test_drafts_do_not_depend_on_neighbours(runner):
    rng = random.Random(4)
    seqs = [Seq(runner, random_ids(rng, 30 + n), n + 1) for n in range(9)]
    for seq in seqs:
        prefill(seq, [len(seq.ids)])
    points = [DraftSlice(20 + n, len(seq.ids) - 1, seq.slot) for n, seq in enumerate(seqs)]
    together, alone = runner.draft(points), runner.draft(points[4:5])
    assert torch.equal(together.logits[4], alone.logits[0])
    assert torch.equal(together.confidence[4], alone.confidence[0])


def answer(engine: Engine, ids: list[int], name: str, kept: list[torch.Tensor]) -> tuple[list[int], int]:
    """Greedy tokens and cached prompt tokens; every step's logits are kept."""
    run, greedy = engine.runner.run, engine.runner.run_greedy
    engine.runner.run = engine.runner.run_greedy = lambda batch: kept.append(run(batch).clone()) or kept[-1]
    engine.add_request(Request(name, ids, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)))
    tokens, cached = [], 0
    while not tokens or not engine.idle:
        for output in engine.step():
            tokens += output.token_ids
            cached = output.cached_tokens or cached
    engine.runner.run, engine.runner.run_greedy = run, greedy
    return tokens, cached


def test_a_hit_gives_the_logits_of_a_miss(tiny, path):
    engine = Engine(settings(tiny, spec=False, max_num_seqs=4, num_blocks=60, **path), HiCacheConfig(size_gb=0.05))
    ids = random_ids(random.Random(5), 300)
    cold: list[torch.Tensor] = []
    warm: list[torch.Tensor] = []
    tokens, missed = answer(engine, ids, "cold", cold)
    again, cached = answer(engine, ids, "warm", warm)
    engine.close()
    assert (missed, cached) == (0, 128)
    assert again == tokens
    assert torch.equal(torch.cat([rows for rows in cold if len(rows)]), torch.cat([rows for rows in warm if len(rows)]))
