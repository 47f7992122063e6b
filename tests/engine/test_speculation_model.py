"""Speculation with real models: the stored drafts, and greedy output that does not depend on drafts."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from engine.engine import Engine
from engine.models.tiny import ensure_tiny
from engine.request import Request, SamplingParams
from engine.spec_decode import NO_PROPOSALS
from engine.spec_lengths import FixedLength
from hicache.config import HiCacheConfig
from tests.engine.paired import model_dir, prompts_of
from tests.engine.test_engine_model import GOLDEN, generate, make_engine

PROMPTS = [prompt["token_ids"] for prompt in json.loads((GOLDEN / "prompts.json").read_text())]


SMALL_POOL = {"num_blocks": 22, "max_model_len": 200, "max_num_seqs": 3, "prefill_any_interval": 1}


@pytest.fixture(scope="module")
def vectors() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "vectors-fp32.safetensors")


class Oracle:
    """Drafts known continuations and spoils some of them, so that blocks are kept, cut and refused."""

    max_drafts = 4
    proposals = NO_PROPOSALS
    policy = FixedLength()

    def __init__(self, texts: list[list[int]], seed: int, wrong: float) -> None:
        self.texts, self.rng, self.wrong = texts, random.Random(seed), wrong

    def propose(self, points, rooms):
        drafts = []
        for point, room in zip(points, rooms, strict=True):
            # The newest tokens may not have reached the sequence yet, but they are the known ones.
            known = next(text for text in self.texts if text[: len(point.seq.token_ids)] == point.seq.token_ids)
            assert known[point.length - 1] == point.token_id
            ids = known[point.length : point.length + self.rng.randint(0, room)]
            drafts.append([3 + token % 9 if self.rng.random() < self.wrong else token for token in ids])
        return drafts

    def observe(self, seqs, drafts, kept):
        assert all(len(tokens) <= len(ids) + 1 for ids, tokens in zip(drafts, kept, strict=True))


class DraftOnly(FixedLength):
    """Drafts in every step and verifies nothing, so that every position is drafted from."""

    def lengths(self, rates, rooms, budget):
        return [0] * len(rooms)


def with_oracle(engine: Engine, texts: list[list[int]], wrong: float) -> Engine:
    engine.drafter = Oracle(texts, seed=4, wrong=wrong)
    return engine


def test_the_engine_drafts_the_stored_blocks(vectors):
    engine = make_engine(num_draft_tokens=4)
    engine.drafter.policy = DraftOnly()
    drafted, plain = {}, engine.runner.draft

    def draft(slices):
        output = plain(slices)
        for piece, ids, confidence, logits in zip(slices, output.token_ids, output.confidence, output.logits, strict=True):
            drafted[piece.state_slot, piece.position] = ids, confidence, logits
        return output.token_ids.tolist(), output.confidence.tolist()

    engine.runner.draft_greedy = draft
    for number, ids in enumerate(PROMPTS):
        drafted.clear()
        stored = vectors[f"p{number}.gen_tokens"].tolist()
        assert generate(engine, [ids], 32) == [stored]
        rows = sorted(drafted)
        assert [position for _, position in rows] == list(range(len(ids) - 1, len(ids) + 29))
        got = [drafted[row] for row in rows]
        assert torch.equal(torch.stack([one[0] for one in got]), vectors[f"p{number}.draft_tokens"][:30, 1:].long())
        assert (torch.stack([one[1] for one in got]) - vectors[f"p{number}.draft_confidence"][:30]).abs().max() < 1e-3
        assert (torch.stack([one[2] for one in got[:3]]) - vectors[f"p{number}.draft_logits_first3"]).abs().max() < 1e-3


@pytest.mark.parametrize("wrong", [0.0, 0.2])
@pytest.mark.parametrize("settings", [{}, SMALL_POOL], ids=["roomy", "preempted"])
def test_kept_and_refused_drafts_leave_the_stored_continuations_alone(vectors, wrong, settings):
    expected = [vectors[f"p{i}.gen_tokens"].tolist() for i in range(4)]
    texts = [ids + tokens for ids, tokens in zip(PROMPTS, expected, strict=True)]
    numbers = [1, 2, 2, 1, 2] if settings else [0, 1, 2, 3]
    engine = with_oracle(make_engine(num_draft_tokens=4, enable_mtp_varlen=False, **settings), texts, wrong)
    assert generate(engine, [PROMPTS[i] for i in numbers], 32) == [expected[i] for i in numbers]
    stats = engine.stats()
    assert (stats["preemptions_total"] > 0) == bool(settings)
    assert stats["spec"]["accepted_tokens_total"] > 50
    assert (stats["spec"]["accepted_tokens_total"] < stats["spec"]["draft_tokens_total"]) == (wrong > 0)


def test_hits_in_the_host_cache_and_drafts_do_not_disturb_each_other(vectors):
    hicache = HiCacheConfig(size_gb=0.02, min_restore_tokens=16, audit="full")
    seen = []
    for spec in (False, True):
        engine = make_engine(hicache=hicache, yoco_mode="compact", yoco_keep_tokens=28, spec=spec, enable_mtp_varlen=False)
        drafts, plain = [], engine.runner.draft_greedy
        engine.runner.draft_greedy = lambda slices, plain=plain, drafts=drafts: drafts.append(plain(slices)) or drafts[-1]
        tokens = [generate(engine, [PROMPTS[3]]) for _ in range(2)]
        assert tokens[0] == tokens[1]
        half = len(drafts) // 2
        assert (half > 2) == spec
        # The draft windows behind a hit come from the recomputed tokens alone.
        assert [ids for ids, _ in drafts[:half]] == [ids for ids, _ in drafts[half:]]
        seen.append((tokens, engine.stats()["tokens"]["cached_total"], engine.stats()["prefix_cache"]["hit_tokens_total"]))
    assert seen[0] == seen[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(ensure_tiny(tmp_path_factory.mktemp("tiny")))


def held_out_prompts(count: int) -> list[list[int]]:
    """Rendered prompts of the embedded model's own evaluation, sets mixed, as many as wanted."""
    prompts = prompts_of(model_dir(None))
    return [prompts[i % len(prompts)] for i in range(count)]


def tiny_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(20, 4000) for _ in range(rng.randint(3, 60))] for _ in range(count)]


def tiny_engine(model: str, **changes) -> Engine:
    return make_engine(model=model, block_size=128, max_num_seqs=8, max_model_len=512, num_blocks=40, **changes)


def test_greedy_with_speculation_equals_greedy_without_on_the_embedded_model(tiny):
    prompts = tiny_prompts(8)
    plain = generate(tiny_engine(tiny, spec=False), prompts, 16)
    assert generate(tiny_engine(tiny, enable_mtp_varlen=False), prompts, 16) == plain
    texts = [ids + tokens for ids, tokens in zip(prompts, plain, strict=True)]
    assert generate(with_oracle(tiny_engine(tiny), texts, 0.1), prompts, 16) == plain


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_greedy_equality_on_a_thousand_prompts(tiny):
    prompts = tiny_prompts(1000, seed=1)
    plain = generate(tiny_engine(tiny, spec=False), prompts, 16)
    assert generate(tiny_engine(tiny, enable_mtp_varlen=False), prompts, 16) == plain
    assert generate(tiny_engine(tiny), prompts, 16) == plain


def test_sampling_with_a_seed_does_not_depend_on_drafts(vectors):
    params = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
    plain = generate(make_engine(spec=False), PROMPTS, 24, **params)
    texts = [ids + tokens for ids, tokens in zip(PROMPTS, plain, strict=True)]
    engine = with_oracle(make_engine(num_draft_tokens=4, enable_mtp_varlen=False), texts, 0.2)
    assert generate(engine, PROMPTS, 24, **params) == plain
    assert engine.stats()["spec"]["accepted_tokens_total"] > 20


def acceptance(model: str, prompts: list[list[int]], seeded: bool) -> float:
    """Share of verified drafts that are kept, all drafts verified, in text sampled from the model's own distribution."""
    sizes = {"block_size": 128, "max_num_seqs": 8, "max_model_len": 1200, "num_blocks": 80, "max_num_batched_tokens": 512}
    engine = make_engine(model=model, enable_mtp_varlen=False, **sizes)
    engine.runner.native.wait()
    for i, ids in enumerate(prompts):
        engine.add_request(Request(f"{i}", ids, SamplingParams(temperature=1.0, max_tokens=40, seed=i if seeded else None)))
    engine.step()
    while not engine.idle:
        engine.step()
    spec = engine.stats()["spec"]
    return spec["accepted_tokens_total"] / spec["draft_tokens_total"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_coupled_sampling_keeps_most_of_what_rejection_keeps(tiny):
    """A race keeps at least (1 - TV) / (1 + TV) of the drafts where rejection keeps 1 - TV, and on real text much more."""
    prompts = held_out_prompts(120)
    coupled, free = acceptance(tiny, prompts, seeded=True), acceptance(tiny, prompts, seeded=False)
    print(f"coupled {coupled:.3f}, rejection {free:.3f}, ratio {coupled / free:.3f}")
    assert coupled >= 0.8 * free > 0.3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_coupled_equality_on_a_thousand_sampled_requests_of_the_embedded_model(tiny):
    """Random arrivals, a pool too small for all of them, chosen lengths, overlapped steps: the tokens of an undisturbed plain run."""
    prompts = [ids[-120:] for ids in held_out_prompts(1000)]
    rng = random.Random(3)
    kinds = [{"temperature": rng.choice([0.0, 0.7, 1.0]), "top_p": rng.choice([1.0, 0.9]), "seed": i} for i in range(1000)]
    sizes = {"block_size": 128, "max_num_seqs": 8, "max_model_len": 512, "num_blocks": 40, "max_num_batched_tokens": 512}
    outputs = []
    for changes in ({"spec": False}, {"num_blocks": 9, "prefill_any_interval": 1, "zero_overhead_scheduling": True}):
        engine = make_engine(**{"model": tiny, **sizes, **changes})
        engine.runner.native.wait()
        waiting = [Request(f"{i}", ids, SamplingParams(max_tokens=40, ignore_eos=True, **kinds[i])) for i, ids in enumerate(prompts)]
        texts: dict[str, list[int]] = {request.request_id: [] for request in waiting}
        while waiting or not engine.idle:
            while waiting and len(engine.scheduler.waiting) < 4 and (changes.get("spec") is False or rng.random() < 0.6):
                engine.add_request(waiting.pop(0))
            for output in engine.step():
                texts[output.request_id] += output.token_ids
        outputs.append(texts)
        preemptions = engine.stats()["preemptions_total"]
        engine.close()
    assert outputs[0] == outputs[1]
    assert preemptions > 20


def test_requests_of_every_kind_run_in_one_batch(tiny):
    """Greedy, seeded, unseeded, constrained in length, all at once; nothing is lost."""
    engine = tiny_engine(tiny)
    kinds = [{"temperature": 0.0}, {"seed": 5}, {}, {"max_tokens": 1}, {"top_k": 4}, {"logit_bias": {7: 5.0}, "seed": 1}]
    for i, kind in enumerate(kinds):
        engine.add_request(Request(f"{i}", tiny_prompts(6)[i], SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **kind})))
    counts = [0] * len(kinds)
    while not engine.idle:
        for output in engine.step():
            counts[int(output.request_id)] += len(output.token_ids)
    assert counts == [12, 12, 12, 1, 12, 12]
