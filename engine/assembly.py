"""The parts that an engine is made of, and what settings and model decide about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.cache_contract import NoPrefixCache, PrefixCacheLike
from engine.config import EngineConfig
from engine.distributed import Group
from engine.drafter import Drafter
from engine.process_env import resolve_threads
from engine.runner import Runner
from engine.step import SchedulerLimits
from hicache.config import HiCacheConfig
from hicache.segment import CacheHome


def load_runner(config: EngineConfig, on_progress: Callable[[str, float], None] | None, group: Group) -> Runner:
    """The model of the settings, ready to run."""
    import torch

    from engine.model_runner import ModelRunner  # the model's modules load only when a model is wanted

    # Threads share elementwise work by elements: which of them a vector loop leaves to other code would depend on the batch.
    torch.set_num_threads(1 if config.batch_invariant else resolve_threads(config.num_threads, config.dp))
    return ModelRunner(config, draft=config.spec and config.num_draft_tokens > 0, on_progress=on_progress, group=group)


def overlaps_steps(config: EngineConfig, device: str, drafter: Drafter | None) -> bool:
    """Whether scheduling overlaps computing. It takes a tenth off a recorded decode step of 64 rows on a GPU. In a thread beside a CPU, or
    with drafts, nothing has been measured that is more than noise."""
    if config.zero_overhead_scheduling == "auto":
        return device == "cuda" and drafter is None
    return config.zero_overhead_scheduling is True


def make_drafter(config: EngineConfig, runner: Any) -> Drafter | None:
    """None when speculation is off or the model has no draft stages."""
    num_drafts = min(config.num_draft_tokens, runner.limits.draft_block_size) if config.spec else 0
    if num_drafts == 0:
        return None
    return Drafter(runner, num_drafts, end_token_ids(runner.limits), temperatures=config.confidence_temperatures(num_drafts))


def path_of(runner: Any) -> str:
    """Names how the model runs; another path costs something else. Runners with one path need no name."""
    path: str = getattr(runner, "path", "only")
    return path


def build_cache(hicache: HiCacheConfig, runner: Runner, ranks: int, home: CacheHome | None) -> PrefixCacheLike:
    """ranks: of this host, which share what the cache may take. home: where its memory may outlive this process."""
    if not hicache.enabled:
        return NoPrefixCache()
    from engine.cache_start import build_prefix_cache

    return build_prefix_cache(hicache, runner.kv, runner.limits, ranks, home) or NoPrefixCache()


def end_token_ids(limits: Any) -> frozenset[int]:
    """Tokens at which a sequence ends by itself."""
    eos = limits.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or ())


def scheduler_limits(config: EngineConfig, limits: Any, block_size: int, drafter: Drafter | None) -> SchedulerLimits:
    """What the scheduler must know of runner and settings."""
    return SchedulerLimits(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_blocks=limits.num_blocks,
        num_state_slots=limits.num_state_slots,
        block_size=block_size,
        eos_token_ids=end_token_ids(limits),
        history_len=limits.ngram_history,
        chunked_prefill=config.chunked_prefill,
        stop_preempted_request=config.stop_preempted_request,
        max_drafts=0 if drafter is None else drafter.max_drafts,
        part=getattr(limits, "part", 0),
    )
