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


@pytest.mark.parametrize(("ranks", "ratio", "extra"), [(2, 1.8, 0), (2, 1.8, 2), (4, 1.5, 0)])
def test_balancing_recovers_four_fifths_of_what_forced_imbalance_costs(ranks, ratio, extra):
    """By work: a step lasts as long as its busiest rank's tokens, so throughput is the inverse of the balance figure."""
    changes = {"expert_rearrangement_step_interval": 100, "expert_count_window_size": 4, "moe_lb_stat_interval": 1}
    forced = {"force_imbalance_ratio": ratio, "load_format": "dummy", "rearrange_after_prefill_in_normal_engine": True}
    shape = {"dp": ranks, "ep": ranks, "override_num_extra_experts": extra, "enforce_eager": True, "spec": False}

    def rank_main(group):
        torch.set_num_threads(1)
        runner = ModelRunner(golden_config(**changes, **forced, **shape), group=group)
        figures, logits = [], []
        for ids in [PROMPTS[3][:40]] * (2 + len(runner.backbone.layers)):
            seq = Seq(runner, ids, 1)
            logits.append(runner.run(Batch(StepKind.PREFILL, [seq.slice(39)])))
            figures.append(runner.expert_stats["balance"])
            runner.run(Batch(StepKind.DECODE, [seq.slice(40)]))
        return figures, logits

    for figures, logits in run_ranks(ranks, rank_main):
        if not extra:  # the first copies are those of the first rank's experts, on other ranks
            assert figures[0] == pytest.approx(ratio, abs=0.02)
        assert 1 / figures[-1] >= 0.8
        torch.testing.assert_close(logits[-1], logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"force_load_balance": True, "load_format": "dummy"}, "no experts are shared"),
        ({"force_imbalance_ratio": 3.0, "load_format": "dummy", "dp": 2, "ep": 2}, "force_imbalance_ratio is 3"),
        ({"force_imbalance_ratio": 0.5, "load_format": "dummy", "dp": 2, "ep": 2}, "force_imbalance_ratio is 0.5"),
        ({"force_load_balance": True, "dp": 2, "ep": 2}, "replaces the router of a real model"),
        ({"force_load_balance": True, "force_imbalance_ratio": 1.5, "load_format": "dummy", "dp": 2, "ep": 2}, "both set"),
    ],
)
def test_forced_routing_is_refused_where_it_means_nothing(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)


def test_details_of_the_balance_are_logged_when_asked_for(caplog):
    with caplog.at_level("INFO", "engine.parallel.balancer"):
        drive(BalanceSettings(interval=8, window=4, report=2, detail=True), [False] * 8)
    text = caplog.text
    assert "balance 2.000, ranks [2.0, 0.0]" in text
    assert "layer 0: the busiest rank goes from" in text
