"""Experts that move while the model runs: when, how evenly afterwards, and without changing a bit of the output."""

import pytest
import torch

from engine.batch import Batch, StepKind
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.parallel.balancer import Balancer, BalanceSettings
from engine.parallel.placement import Placement
from tests.engine.simulation import run_ranks
from tests.models.golden import PROMPTS, Seq
from tests.parallel.test_expert_exchange import LAYERS, E, Weights, make_exchange, rows_of
from tests.parallel.test_expert_parallel import golden_config, mixed_requests, run_group

MOVING = {"expert_rearrangement_step_interval": 4, "expert_count_window_size": 4, "moe_lb_stat_interval": 4}


def decode_logits(config: EngineConfig, eager: bool = False):
    """Per rank the logits of many steps of one sequence, what moved, and where the experts are in the end."""

    def rank_main(group):
        torch.set_num_threads(1)
        runner = ModelRunner(config, group=group)
        seq = Seq(runner, PROMPTS[3][:60], 1)
        logits = [runner.run(Batch(StepKind.PREFILL, [seq.slice(30)]))]
        for step in range(24):
            if group.rank == 1 and step % 2:
                runner.join(StepKind.DECODE)
            else:
                logits.append(runner.run(Batch(StepKind.DECODE, [seq.slice(seq.done + 1)])))
        places = [layer.placement.experts for layer in runner._exchange.layers] if config.ep > 1 else []
        return logits, dict(runner.expert_stats), places

    return run_ranks(config.dp, rank_main)


@pytest.mark.parametrize("extra", [0, 3])
def test_moving_experts_does_not_change_a_bit(extra):
    still = decode_logits(golden_config(dp=2, ep=2, moe_lb_stat_interval=0))
    moving = decode_logits(golden_config(dp=2, ep=2, override_num_extra_experts=extra, **MOVING))
    for (logits, _, _), (expected, _, _) in zip(moving, still, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
    (_, figures, places), (_, other_figures, other_places) = moving
    assert places == other_places
    assert len(set(places)) > 1, "no layer took a placement of its own"
    assert figures["plans_total"] == other_figures["plans_total"] >= 2
    assert figures["moved_layers_total"] > 0
    assert figures["moved_bytes_total"] + other_figures["moved_bytes_total"] > 0
    assert 1.0 <= figures["balance"] <= 2.0


def test_requests_get_the_same_tokens_while_experts_move():
    requests = mixed_requests(8, 500, 60)
    plain = run_group(1, requests, golden_config())
    eager = golden_config(dp=2, ep=2, override_num_extra_experts=2, enforce_eager=True, spec=False, **MOVING)
    assert run_group(2, requests, eager) == plain


def drive(settings: BalanceSettings, kinds: list[bool]):
    """Steps of bare exchanges of two ranks whose rows all choose experts 2 and 3, which the first rank has. kinds: whether each step is a
    prompt step. Returns (plans, layers moved) behind every step, and the last balance."""
    weights, placement = Weights(1), Placement.initial(E, 2, 2)

    def rank_main(world):
        exchange = make_exchange(world, 2, placement)
        for number in range(LAYERS):
            exchange.attach(number, weights.share(placement, world.rank))
        balancer = Balancer(exchange, settings)
        history = []
        for prompt in kinds:
            x, _, shares = rows_of(world.rank, 2, 5)
            exchange.begin(2, 2)
            for number in range(LAYERS):
                exchange.run(number, x, torch.tensor([[2, 3], [2, 3]]), shares)
            exchange.finish()
            balancer.end_step(prompt)
            history.append((balancer.figures.plans, balancer.figures.moved_layers))
        return history, balancer.figures.balance

    return run_ranks(2, rank_main)[0]


def test_the_first_plan_comes_after_a_quarter_of_the_interval_and_layers_move_one_per_step():
    history, _ = drive(BalanceSettings(interval=8, window=4, report=0), [False] * 12)
    assert [plans for plans, _ in history] == [0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert [moved for _, moved in history][:5] == [0, 0, 1, 2, 2]


def test_prompt_steps_count_only_when_asked_and_then_bring_a_plan():
    ignored, _ = drive(BalanceSettings(interval=8, window=4, report=0), [True] * 8)
    assert ignored[-1] == (0, 0)
    counted, _ = drive(BalanceSettings(interval=80, window=4, report=0, after_prefill=True), [False, True, False, False])
    assert [plans for plans, _ in counted] == [0, 0, 1, 1]


def test_the_balance_figure_is_the_busiest_rank_over_the_mean():
    _, before = drive(BalanceSettings(interval=0, report=2), [False] * 4)
    assert before == 2.0
    _, after = drive(BalanceSettings(interval=8, window=4, report=2), [False] * 8)
    assert after == 1.0
    _, nothing = drive(BalanceSettings(interval=0, report=0), [False] * 4)
    assert nothing == 0.0


def test_a_window_longer_than_the_interval_is_refused():
    with pytest.raises(ConfigError, match="expert_count_window_size is 100"):
        EngineConfig(expert_rearrangement_step_interval=50)
