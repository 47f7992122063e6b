"""The front's shared object: settings, ranks, text, counters, and the state it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.request import Grammar
from server import protocol
from server.config import ServerConfig
from server.constraints import Constraint
from server.errors import Unavailable
from server.grammar_check import GrammarCheck
from server.json_body import Bodies
from server.launch import Launch
from server.metrics import FrontMetrics
from server.poison import Poison
from server.rank_pool import RankPool
from server.rendering import RenderedPrompt
from server.sampled_ids import SampledIds
from server.schemas import Bounds
from server.tenants import Tenants
from server.text import Text
from server.turn_memory import TurnMemory, with_reasoning
from server.workers import Workers


@dataclass(slots=True)
class Front:
    """Shared by all routes; everything happens on the event loop's thread except what `workers` run."""

    launch: Launch
    pool: RankPool
    metrics: FrontMetrics
    workers: Workers
    bodies: Bodies
    grammars: GrammarCheck
    sampled: SampledIds
    turns: TurnMemory
    tenants: Tenants = field(default_factory=Tenants)
    poison: Poison = field(default_factory=Poison)
    keys: list[bytes] = field(default_factory=list)
    tell: Callable[[dict[str, Any]], None] = lambda _message: None
    intervals: dict[str, int] = field(default_factory=dict)
    interval_change_pending: bool = False
    _text: Text | None = None
    _drain_told: bool = False

    @property
    def config(self) -> ServerConfig:
        return self.launch.server

    @property
    def text(self) -> Text:
        if self._text is None:
            raise Unavailable("starting", "the tokenizer is not loaded yet", retry_after_s=1)
        return self._text

    @property
    def text_loaded(self) -> bool:
        return self._text is not None

    def set_text(self, text: Text) -> None:
        self._text = text

    async def render_chat(self, body: dict[str, Any], salt: str, *, inline: bool = False) -> RenderedPrompt:
        """The prompt of one tenant's chat request, with what is remembered of its history. `inline`: not in a worker.

        Raises:
            BadRequest: the first problem, with the field that has it.
        """
        turns = self.turns.among(body.get("messages"), salt)
        if self.config.reattach_reasoning:
            body = {**body, "messages": with_reasoning(body.get("messages"), turns)}
        splices = self.config.splice_sampled_ids
        known = self.sampled.view(salt) if splices else None
        return await self.workers.run(self.text.render_chat, body, known, turns if splices else None, inline=inline)

    async def checked_grammar(self, constraint: Constraint | None) -> Grammar | None:
        """The grammar of a constraint, after it has proved harmless.

        Raises:
            ApiError: see `GrammarCheck.check`.
        """
        if constraint is None:
            return None
        await self.grammars.check(constraint, self.limits.vocab_size, self.limits.eos_token_id)
        return constraint.grammar

    @property
    def limits(self) -> protocol.RankLimits:
        """Raises Unavailable while no engine is ready."""
        self.pool.check_available()
        limits = self.pool.limits
        assert limits is not None
        return limits

    @property
    def bounds(self) -> Bounds:
        salted = self.tenants.mode == "field"
        return Bounds((self.launch.served_name,), self.limits.vocab_size, self.config.max_tokens_limit, salted)

    @property
    def state(self) -> str:
        if self.pool.dead:
            return "dead"
        if self.pool.draining:
            return "draining"
        if self.pool.serving and not (self.pool.warming and self.pool.incarnation <= 1):
            return "degraded" if self.pool.complaint() else "ready"
        return "starting" if self.pool.incarnation <= 1 else "degraded"

    def check_drained(self) -> None:
        """While draining, tell the supervisor once when the last request is gone."""
        if self.pool.draining and not self._drain_told and self.pool.num_open == 0:
            self._drain_told = True
            self.tell({"event": "drained"})
