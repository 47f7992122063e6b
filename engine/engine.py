"""One rank's engine: scheduler, model, cache and sampler, driven one step at a time by its owner."""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from csrc.loader import waits_for_build
from engine.assembly import build_cache, load_runner, make_drafter, overlaps_steps, path_of, scheduler_limits
from engine.batch import StepKind
from engine.choices import drawing_of
from engine.config import EngineConfig
from engine.distributed import Group, SoloGroup
from engine.drafter import DrafterLike
from engine.errors import RequestError
from engine.forced_accept import make_forced_accept
from engine.grammar_compiler import Build, GrammarBuilds, GrammarCompiler, vocabulary_bytes
from engine.metrics import rank_record
from engine.pipeline import Pipeline
from engine.prefill_gate import PrefillGate, VoteRule
from engine.request import FinishReason, Output, Request, Sequence
from engine.request_check import check_ids
from engine.runner import Runner
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.spec_lengths import ThroughputLength
from engine.step import Step
from engine.step_runner import StepRunner
from engine.step_timing import MEASURE_S, measure, step_timer
from engine.stream import CallerStream, Stream, WorkerStream
from engine.structured_output import Matcher
from engine.tokenizer import Tokenizer
from hicache.config import HiCacheConfig
from hicache.replay import check_replay
from hicache.segment import CacheHome

GRAMMAR_WAIT_S = 0.002  # how long a step without other work waits for a grammar that is being compiled


class Engine:
    """Requests in, outputs out. One thread calls all methods; with several ranks every rank keeps calling `step`."""

    def __init__(
        self,
        config: EngineConfig,
        hicache: HiCacheConfig,
        group: Group | None = None,
        *,
        runner: Runner | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_progress: Callable[[str, float], None] | None = None,
        cache_home: CacheHome | None = None,
        stream: Stream | None = None,
    ) -> None:
        """Load the model unless a runner is given, build the prefix cache unless it is off. cache_home: where the cache's memory may
        outlive this process. stream: where steps are computed instead of where the settings say.

        Raises:
            ConfigError, CheckpointError, NotEnoughMemory: with the remedy in the message.
        """
        check_replay(hicache.replay, config.batch_invariant)
        self.group: Group = SoloGroup() if group is None else group
        self.config = config
        self.clock = clock
        self.runner = load_runner(config, on_progress, self.group) if runner is None else runner
        self.limits = self.runner.limits
        self.cache = build_cache(hicache, self.runner, config.dp if cache_home is None else cache_home.ranks, cache_home)
        self.idle = False
        self._steps = 0
        self._next_seq_id = 0
        self._seeds = random.Random(f"{config.seed}/{self.group.rank}")
        drafter = make_drafter(config, self.runner)
        limits = scheduler_limits(config, self.limits, self.runner.kv.block_size, drafter)
        forced = make_forced_accept(config, limits.max_drafts)
        sampler = Sampler(self.limits.tokenizer_size, limits.eos_token_ids, forced, partial(drawing_of, self.runner))
        self.overlaps = overlaps_steps(config, self.limits.device, drafter)
        # Enqueueing for a GPU leaves the caller free. Drafts need the host between two steps, and a CPU computes in a thread.
        in_caller = not self.overlaps or (self.limits.device == "cuda" and drafter is None)
        self._step_runner = StepRunner(self.runner, sampler, drafter, limits.history_len, keep_on_device=self.overlaps and in_caller)
        self._pipeline = Pipeline(stream or (CallerStream() if in_caller else WorkerStream()), self._step_runner)
        gate = PrefillGate(self.group, config.prefill_attempt_interval, config.prefill_any_interval, VoteRule(config.prefill_vote))
        self.scheduler = Scheduler(limits, gate, self.cache, clock, self._land)
        self._outputs: list[Output] = []
        self._measured_path = ""
        self._measure_costs()
        self.grammars = GrammarBuilds(self._grammar_compiler, clock)
        self._stop_token_ids = sorted(limits.eos_token_ids)

    # ---- requests

    def check_request(self, request: Request) -> None:
        """Whether a request can be served at all.

        Raises:
            RequestError: empty or too long prompt, token id or bias id outside the vocabulary, id of a live request.
        """
        self._checked(request)

    def _checked(self, request: Request) -> array[int] | None:
        """`check_request`. Returns the prompt as machine integers, which whoever hashes it would make once more."""
        packed = check_ids(request, self.limits)
        if request.request_id in self.scheduler or request.request_id in self.grammars:
            raise RequestError(f"request id {request.request_id!r} is in use", hint="give every request its own id")
        return packed

    def add_request(self, request: Request) -> None:
        """Queue a request; its outputs come from `step`.

        Raises:
            RequestError: see `check_request`.
        """
        packed = self._checked(request)
        if request.grammar is None:
            self._enqueue(request, None, self.clock(), packed)
        else:
            self.grammars.submit(request)

    def _enqueue(self, request: Request, matcher: Matcher | None, arrival_s: float, packed: array[int] | None = None) -> None:
        seed = request.params.seed
        prompt_len = len(request.prompt_token_ids)
        self.scheduler.add(
            Sequence(
                seq_id=self._next_seq_id,
                request=request,
                arrival_s=arrival_s,
                seed=(self._seeds.getrandbits(64) if seed is None else seed) & (2**64 - 1),
                token_ids=list(request.prompt_token_ids),
                prompt_len=prompt_len,
                prefill_len=prompt_len,
                matcher=matcher,
                packed_prompt=packed,
            )
        )
        self._next_seq_id += 1

    def _take_grammars(self) -> None:
        """Queue the requests whose grammars are compiled; end those whose grammars failed."""
        for build in self.grammars.poll():
            request = build.request
            if build.error:
                self._outputs.append(Output(request.request_id, [], FinishReason.ERROR, error=build.error))
            else:
                self._enqueue(request, self._matcher(build), build.submitted_s)

    def _matcher(self, build: Build) -> Matcher:
        assert build.request.grammar is not None, f"request {build.request.request_id} has no grammar"
        return Matcher(build.compiled, build.request.grammar, self._stop_token_ids, self.limits.vocab_size)

    def _grammar_compiler(self) -> GrammarCompiler:
        vocabulary = vocabulary_bytes(Tokenizer.from_dir(self.config.model), self.limits.vocab_size)
        return GrammarCompiler(vocabulary, self._stop_token_ids)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is. Its final output, reason ABORT, comes with the next step; unknown ids are ignored."""
        if self.grammars.cancel(request_id):
            self._outputs.append(Output(request_id, [], FinishReason.ABORT))
        self.scheduler.abort(request_id)

    # ---- the loop

    def step(self) -> list[Output]:
        """One iteration in lockstep with the group. Sets `idle` when nobody had work and no step was taken.

        Raises:
            GroupError: a peer is gone. Other exceptions of the model end the rank as well; its owner fails the open requests.
        """
        self._take_grammars()
        self.cache.begin_step(decoding=bool(self.scheduler.running))
        self._measure_costs()
        step = self.scheduler.schedule()
        # Behind the tokens of a step that was read meanwhile: a sequence that has ended says so last.
        self._outputs.extend(self.scheduler.take_finals())
        self.idle = step.idle and not self.grammars
        if step.idle:
            if self.grammars:
                self.grammars.wait(GRAMMAR_WAIT_S)
            return self._take_outputs()
        self._steps += 1
        if step.seqs:
            self._run(step)
        else:
            self._land()
            # Alone in its work, a rank has nothing to take part in beyond the vote. Others may need its experts, or its part of a prompt.
            if self.config.ep > 1 or self.config.cp > 1:
                self.runner.join(step.kind)
        return self._take_outputs()

    def _run(self, step: Step) -> None:
        """Start a step, read the tokens of the one before it meanwhile. A prompt step, or every step without overlap, is waited for."""
        launched = self._pipeline.launch(step)
        self._land()
        self._pipeline.sample(launched)
        if not self.overlaps or step.kind is StepKind.PREFILL:
            self._land()

    def _land(self) -> None:
        """Take in the tokens of the step in flight, if there is one."""
        landed = self._pipeline.land()
        if landed is not None:
            self._outputs.extend(self.scheduler.commit(*landed))

    def _take_outputs(self) -> list[Output]:
        """What has been produced since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- control

    def reset_prefix_cache(self) -> None:
        """Forget all stored prefixes; running sequences keep what they restored."""
        self.cache.reset()

    def set_prefill_intervals(self, attempt: int | None, any_: int | None) -> None:
        """Change the intervals of the whole group. The change travels with the next vote, so all ranks take it in the same step.

        Raises:
            ConfigError: an interval below 1.
        """
        self.scheduler.gate.propose(attempt, any_)

    def _measure_costs(self) -> None:
        """Take the cost curve of the model's present path, on blocks and slots that nobody owns. None free: ask again later."""
        drafter = self.drafter
        if drafter is None or not self.config.chooses_draft_lengths or self._measured_path == path_of(self.runner):
            return
        self._land()
        pools = self.scheduler.blocks
        per_seq = pools.blocks_for(drafter.max_drafts + 1)
        count = min(self.limits.max_num_seqs, pools.slots.num_free, pools.blocks.num_free // per_seq)
        budget_s = MEASURE_S
        if self.config.ep > 1:  # every step is one of all ranks: all measure the same ones, however long it takes
            count, budget_s = -self.group.max([-count])[0], math.inf
        if count == 0:
            return
        timer = step_timer(path_of(self.runner))
        self._step_runner.time_with(timer)
        slots, blocks = pools.slots.allocate(count), pools.blocks.allocate(count * per_seq)
        places = [(slot, blocks[i * per_seq : (i + 1) * per_seq]) for i, slot in enumerate(slots)]
        drafter.policy = ThroughputLength(
            measure(self.runner, drafter.max_drafts, places, budget_s=budget_s, timer=timer), drafter.max_drafts
        )
        self._measured_path = path_of(self.runner)
        pools.blocks.free_all(blocks)
        pools.slots.free_all(slots)

    @property
    def drafter(self) -> DrafterLike | None:
        """Where drafts come from; None without speculation. Another one may take its place while nothing runs."""
        return self._step_runner.drafter

    @drafter.setter
    def drafter(self, drafter: DrafterLike | None) -> None:
        self._step_runner.drafter = drafter

    @property
    def prefill_intervals(self) -> tuple[int, int]:
        """(attempt, any): the intervals in force, in decode steps."""
        return self.scheduler.gate.attempt_interval, self.scheduler.gate.any_interval

    @property
    def kv_format(self) -> str:
        """Names the bytes of a page and a state, which with the model's fingerprint decide the keys of the prefix cache."""
        return str(self.runner.kv.format_id)

    def stats(self) -> dict[str, Any]:
        """This rank's figures: see `engine/metrics.py`. Numbers only."""
        record = rank_record(self.scheduler, self._steps, self.cache.stats(), getattr(self.runner, "expert_stats", {}))
        record["waiting"] += len(self.grammars)
        record["compiling"] = int(getattr(self.runner, "compiling", False))
        return record

    def inject_fault(self, kind: str, **where: Any) -> dict[str, Any]:
        """Break something on purpose: make one row of the next logits "nan", or harm the host cache ("flip", "drop", "short", "delay").

        where: which page, bytes and copies, see `PrefixCache.inject_fault`. Returns what was broken.

        Raises:
            ConfigError: unknown kind, no host cache to break, nothing stored yet, or the place does not exist.
        """
        if kind == "nan":
            self._step_runner.sampler.poison_next_row = True
            return {"kind": kind}
        return self.cache.inject_fault(kind, **where)

    def explain_prompt(self, tokens: list[int], salt: str = "", scope: str = "") -> dict[str, Any]:
        """What a prompt would restore from the host cache now, and why not more; see `hicache.explain`. Changes nothing."""
        return self.cache.explain(tokens, salt, scope)

    def keep_prefix(self, tokens: list[int], salt: str, ttl_s: float) -> dict[str, Any]:
        """Pin what the host cache holds of a prompt for `ttl_s` seconds. Returns `pinned_tokens` and `restorable_tokens`.

        Raises:
            ConfigError: no host cache, or more than the share of it that may be pinned.
        """
        return self.cache.keep(tokens, salt, ttl_s)

    def leave(self) -> None:
        """Ask the group to end. It travels with the next vote: `left` becomes True on all ranks in the same step."""
        self.scheduler.gate.leave()

    @property
    def left(self) -> bool:
        """Whether the group has agreed to end: no rank may step any more."""
        return self.scheduler.gate.left

    @property
    def waits_for_peers(self) -> bool:
        """Whether `step` waits for other ranks just now, for a vote or for kernels that one of them compiles. Any thread may ask."""
        return self.group.waits.now or waits_for_build()

    def close(self) -> None:
        """Leave the group and give the cache's memory back. Open requests get no output; calling it twice is harmless."""
        self.grammars.close()
        self._pipeline.close()  # first: steps write to memory that the cache's copies read
        self.cache.close()
        if hasattr(self.runner, "close"):
            self.runner.close()
        self.group.close()
