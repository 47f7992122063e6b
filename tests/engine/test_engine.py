import itertools

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, RequestError
from engine.metrics import METRICS
from engine.request import FinishReason, Output, Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.engine.fake_runner import FakeLimits, FakeRunner, expected_greedy
from tests.engine.simulation import run_ranks

OFF = HiCacheConfig(size_gb=0)
_names = itertools.count()


def make_engine(limits: FakeLimits | None = None, hicache: HiCacheConfig = OFF, group=None, **settings) -> Engine:
    return Engine(EngineConfig(**settings), hicache, group, runner=FakeRunner(limits))


def prompt(seed: int, length: int) -> list[int]:
    return [2 + (seed * 7 + i * i) % 30 for i in range(length)]


def ask(engine: Engine, ids: list[int], *, name: str | None = None, cache_read: bool = True, cache_write: bool = True, **params) -> str:
    name = name or f"r{next(_names)}"
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 10, **params})
    engine.add_request(Request(name, ids, sampling, cache_read, cache_write))
    return name


def run(engine: Engine) -> dict[str, list[Output]]:
    """Step until idle; outputs per request."""
    outputs: dict[str, list[Output]] = {}
    for _ in range(5000):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        if engine.idle:
            return outputs
    raise AssertionError("the engine does not come to rest")


def answer(engine: Engine, ids: list[int], **arguments) -> list[Output]:
    """Outputs of one request that has the engine for itself."""
    name = ask(engine, ids, **arguments)
    return run(engine)[name]


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_greedy_tokens_come_through_the_cache_as_without_one():
    engine = make_engine()
    prompts = {ask(engine, prompt(i, 1 + 4 * i)): prompt(i, 1 + 4 * i) for i in range(12)}
    outputs = run(engine)
    for name, ids in prompts.items():
        assert tokens(outputs[name]) == expected_greedy(ids, 10, engine.limits)


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_chunk_size_does_not_change_tokens(budget: int):
    engine = make_engine(FakeLimits(max_num_batched_tokens=budget))
    name = ask(engine, prompt(3, 50))
    assert tokens(run(engine)[name]) == expected_greedy(prompt(3, 50), 10, engine.limits)


def test_sampled_tokens_do_not_depend_on_the_batch_or_on_preemption():
    params = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 20, "ignore_eos": True}
    alone = {}
    for i in range(4):
        engine = make_engine(FakeLimits(num_blocks=24))
        alone[i] = tokens(answer(engine, prompt(i, 6), seed=i, **params))
    crowded = make_engine(FakeLimits(num_blocks=12), prefill_any_interval=2)
    names = [ask(crowded, prompt(i, 6), seed=i, **params) for i in range(4)]
    outputs = run(crowded)
    assert crowded.stats()["preemptions_total"] > 0
    assert [tokens(outputs[name]) for name in names] == list(alone.values())


def test_requests_without_a_seed_differ_and_repeat_with_the_engines_seed():
    def draw_two() -> list[list[int]]:
        engine = make_engine(seed=5)
        names = [ask(engine, prompt(1, 5), temperature=1.0, ignore_eos=True) for _ in range(2)]
        outputs = run(engine)
        return [tokens(outputs[name]) for name in names]

    first = draw_two()
    assert first[0] != first[1]
    assert first == draw_two()


def test_an_engine_waits_for_peers_while_one_of_them_compiles_its_kernels(monkeypatch: pytest.MonkeyPatch):
    engine, compiles = make_engine(), [False]
    monkeypatch.setattr("engine.engine.waits_for_build", lambda: compiles[0])
    assert not engine.waits_for_peers
    compiles[0] = True
    assert engine.waits_for_peers


def test_an_engine_without_work_is_idle_and_takes_no_step():
    engine = make_engine()
    assert engine.step() == []
    assert engine.idle
    assert engine.stats()["steps_total"] == 0
    ask(engine, [2, 3])
    engine.step()
    assert not engine.idle


def test_abort_gives_a_final_output_in_the_next_step_even_when_idle():
    engine = make_engine()
    name = ask(engine, [2, 3])
    engine.abort(name)
    engine.abort("unknown")
    [final] = engine.step()
    assert (final.request_id, final.finish_reason) == (name, FinishReason.ABORT)
    assert engine.idle


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], {}, "no tokens"),
        ([2] * 65, {}, "65 tokens, the limit is 64"),
        ([2, 32], {}, "token id 32"),
        ([-1], {}, "token id -1"),
        ([2], {"logit_bias": {40: 1.0}}, "logit_bias id 40"),
        ([2], {"stop_token_ids": (99,)}, "stop token id 99"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_with_the_value(ids, params, message):
    engine = make_engine()
    with pytest.raises(RequestError, match=message) as caught:
        ask(engine, ids, **params)
    assert caught.value.hint
    assert engine.step() == []


def test_a_live_request_id_is_refused_and_a_finished_one_may_come_again():
    engine = make_engine()
    ask(engine, [2], name="x")
    with pytest.raises(RequestError, match="'x' is in use"):
        ask(engine, [3], name="x")
    run(engine)
    ask(engine, [3], name="x")


def test_nan_logits_fail_one_request_and_spare_the_others():
    engine = make_engine()
    names = [ask(engine, prompt(i, 4), ignore_eos=True) for i in range(3)]
    engine.step()
    engine.inject_fault("nan")
    outputs = run(engine)
    reasons = [outputs[name][-1].finish_reason for name in names]
    assert reasons == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    assert "invalid logits" in outputs[names[0]][-1].error
    assert engine.stats()["kv"]["tokens_used"] == 0


def test_stats_are_numbers_and_add_up():
    engine = make_engine()
    names = [ask(engine, prompt(i, 5), max_tokens=3, ignore_eos=True) for i in range(3)]
    run(engine)
    stats = engine.stats()
    for metric in METRICS:
        value = stats
        for part in metric.path.split("."):
            value = value[part]
        assert isinstance(value, (int, float)), metric.path
    assert stats["tokens"] == {"prompt_total": 15, "cached_total": 0, "generated_total": 9, "prefilled_total": 15}
    assert (stats["running"], stats["waiting"], stats["kv"]["tokens_used"]) == (0, 0, 0)
    assert stats["kv"]["tokens_total"] == 23 * 4
    assert len(names) == 3


def test_stats_say_that_steps_are_still_being_compiled():
    engine = make_engine()
    assert engine.stats()["compiling"] == 0
    engine.runner.compiling = True
    assert engine.stats()["compiling"] == 1


def test_one_rank_cannot_share_its_experts():
    with pytest.raises(ConfigError, match=r"engine\.ep is 2 and engine\.dp is 1"):
        make_engine(ep=2)


def test_two_ranks_answer_as_one_does():
    prompts = [prompt(i, 3 + 5 * i) for i in range(6)]

    def rank_main(group):
        engine = make_engine(group=group, prefill_any_interval=2)
        names = {ask(engine, ids): ids for i, ids in enumerate(prompts) if i % 2 == group.rank}
        outputs = run(engine)
        return {tuple(ids): tokens(outputs[name]) for name, ids in names.items()}, engine.stats()["steps_total"]

    (first, steps), (second, other_steps) = run_ranks(2, rank_main)
    assert steps == other_steps
    for ids in prompts:
        assert {**first, **second}[tuple(ids)] == expected_greedy(ids, 10, FakeLimits())


def test_intervals_can_change_while_the_group_runs():
    def rank_main(group):
        engine = make_engine(group=group)
        if group.rank == 1:
            engine.set_prefill_intervals(None, 3)
        engine.step()
        return engine.scheduler.gate.any_interval

    assert run_ranks(2, rank_main) == [3, 3]


# ---- with the real prefix cache

CACHED = FakeLimits(max_model_len=512, max_num_batched_tokens=64, num_blocks=80, keep_tokens=6, vocab_size=32)
ARENA = HiCacheConfig(size_gb=0.001, min_restore_tokens=8, audit="full")


def predicted_hit(length: int) -> int:
    """s0 of an identical prompt: the last block end that leaves `keep_tokens` to compute."""
    return (length - CACHED.keep_tokens) // 4 * 4


@pytest.mark.parametrize("length", [20, 21, 33, 50, 100, 200])
def test_a_resent_prompt_is_restored_and_gives_the_same_tokens(length: int):
    engine = make_engine(CACHED, ARENA)
    ids = prompt(length, length)
    cold, warm = (answer(engine, ids) for _ in range(2))
    bypass = answer(engine, ids, cache_read=False)
    assert [cold[0].cached_tokens, warm[0].cached_tokens, bypass[0].cached_tokens] == [0, predicted_hit(length), 0]
    assert tokens(cold) == tokens(warm) == tokens(bypass) == expected_greedy(ids, 10, CACHED)
    stats = engine.stats()
    assert stats["prefix_cache"]["hit_tokens_total"] == stats["tokens"]["cached_total"] == predicted_hit(length)


def test_a_flipped_byte_of_a_stored_page_changes_the_output_or_is_noticed():
    engine = make_engine(CACHED, HiCacheConfig(size_gb=0.001, min_restore_tokens=8, audit="off"))
    ids = prompt(5, 60)
    cold = answer(engine, ids)
    engine.inject_fault("flip")
    warm = answer(engine, ids)
    assert warm[0].cached_tokens == predicted_hit(60)
    assert tokens(warm) != tokens(cold)


def test_faults_need_something_to_break():
    engine = make_engine()
    for kind in ("flip", "unknown"):
        with pytest.raises(ConfigError, match=kind):
            engine.inject_fault(kind)


def test_after_a_reset_nothing_hits():
    engine = make_engine(CACHED, ARENA)
    ids = prompt(5, 60)
    answer(engine, ids)
    engine.reset_prefix_cache()
    assert answer(engine, ids)[0].cached_tokens == 0


def test_preempted_and_aborted_requests_leave_the_cache_without_pins():
    engine = make_engine(FakeLimits(num_blocks=20, keep_tokens=6, max_num_seqs=4, max_model_len=64), ARENA, prefill_any_interval=1)
    names = [ask(engine, prompt(i, 16), max_tokens=30, ignore_eos=True) for i in range(6)]
    for _ in range(10):
        engine.step()
    engine.abort(names[0])
    engine.abort(names[5])
    outputs = run(engine)
    assert engine.stats()["preemptions_total"] > 0
    assert engine.stats()["prefix_cache"]["pinned_sequences"] == 0
    for i in range(1, 5):
        assert len([o for o in outputs[names[i]] if o.finish_reason]) == 1
