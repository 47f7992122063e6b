"""Keeps shared experts balanced: counts tokens, plans anew every so many steps, and moves one layer per step.

Everything is counted in steps that all ranks take together, so every rank plans and moves in the same step without asking.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.parallel.eplb_plan import plan, rank_loads
from engine.parallel.expert_exchange import ExpertExchange
from engine.parallel.expert_moves import move_experts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """interval: counted steps between plans, 0 for never. window: steps that a plan looks at. after_prefill: count prompt steps too, and
    plan in the decode step behind them. report: counted steps between figures of the balance, 0 for none. detail: log what is counted.
    """

    interval: int = 0
    window: int = 100
    after_prefill: bool = False
    report: int = 128
    detail: bool = False

    @staticmethod
    def of(config: EngineConfig) -> BalanceSettings:
        return BalanceSettings(
            config.expert_rearrangement_step_interval,
            config.expert_count_window_size,
            config.rearrange_after_prefill_in_normal_engine,
            config.moe_lb_stat_interval,
            config.show_eplb_detail,
        )


@dataclass(slots=True)
class BalanceFigures:
    """balance: tokens of the busiest rank over the mean of all, over the last report's steps and layers; 1.0 is ideal, 0 not known yet."""

    balance: float = 0.0
    plans: int = 0
    moved_layers: int = 0
    moved_bytes: int = 0


class Balancer:
    """One rank's part. `end_step` is called once behind every step, by all ranks."""

    def __init__(self, exchange: ExpertExchange, settings: BalanceSettings) -> None:
        self.figures = BalanceFigures()
        self._exchange, self._settings = exchange, settings
        layers, device = len(exchange.layers), exchange.counts.device
        # By expert, because slots change their experts; and what this rank computed, whichever experts that were.
        window = settings.window if settings.interval else 0
        num_experts = exchange.layers[0].placement.num_experts
        self._by_expert = torch.zeros(window, layers, num_experts, dtype=torch.int64, device=device)
        self._own = torch.zeros(settings.report, layers, dtype=torch.int64, device=device)
        self._held = torch.tensor([layer.placement.held_by(exchange.group.rank) for layer in exchange.layers], device=device)
        exchange.counting = settings.interval > 0 or settings.report > 0
        self._counted = 0
        self._since_plan = 0
        self._prompts_since_plan = False
        self._due = settings.interval // 4 or settings.interval
        self._pending: list[int] = []
        self._loads: NDArray[Any] | None = None

    def end_step(self, prompt: bool) -> None:
        """Take this step's counts; then plan, or move a layer of the last plan."""
        if not self._exchange.counting:
            return
        if prompt and not self._settings.after_prefill:
            self._exchange.counts.zero_()
            return
        self._record()
        if self._settings.report and self._counted % self._settings.report == 0:
            self._report()
        if self._settings.interval == 0:
            return
        self._since_plan += 1
        self._prompts_since_plan |= prompt
        if self._pending:
            self._move(self._pending.pop(0))
        elif self._since_plan >= self._due or (self._prompts_since_plan and not prompt):
            self._plan()

    def _record(self) -> None:
        window, report = len(self._by_expert), len(self._own)
        counts = self._exchange.counts
        if window:
            self._by_expert[self._counted % window].zero_().scatter_add_(1, self._held, counts)
        if report:
            self._own[self._counted % report] = counts.sum(1)
        counts.zero_()
        self._counted += 1

    def _report(self) -> None:
        group = self._exchange.group
        by_rank = self._own.new_zeros(group.size, *self._own.shape)
        group.all_gather(by_rank, self._own)
        total = int(by_rank.sum())
        self.figures.balance = float(by_rank.amax(0).sum() * group.size / total) if total else 0.0
        if self._settings.detail:
            shares = (by_rank.sum((1, 2)) * group.size / max(total, 1)).tolist()
            log.info("experts after %d steps: balance %.3f, ranks %s", self._counted, self.figures.balance, [round(s, 3) for s in shares])

    def _plan(self) -> None:
        """Fix the loads that the coming layers are planned by. Each layer is planned in the step that moves it, so no step takes long."""
        loads = self._by_expert[: self._counted].clone()
        self._exchange.group.all_reduce(loads)
        self._loads = loads.double().cpu().numpy()
        self._pending = list(range(len(self._exchange.layers)))
        self._since_plan, self._due, self._prompts_since_plan = 0, self._settings.interval, False
        self.figures.plans += 1

    def _move(self, number: int) -> None:
        assert self._loads is not None, "a layer moves without a plan"
        layer, loads = self._exchange.layers[number], self._loads[:, number]
        before, after = layer.placement, plan(loads, layer.placement)
        if after == before:
            return
        stores = [store for experts in layer.experts for store in experts.stores]
        self.figures.moved_bytes += move_experts(self._exchange.group, stores, before, after)
        self.figures.moved_layers += 1
        layer.place(after)
        self._held[number] = torch.tensor(after.held_by(self._exchange.group.rank))
        level = logging.INFO if self._settings.detail else logging.DEBUG
        if log.isEnabledFor(level):
            old, new = (rank_loads(loads, placement).max(1).sum() for placement in (before, after))
            log.log(level, "layer %d: the busiest rank goes from %.0f to %.0f tokens over the window", number, old, new)
