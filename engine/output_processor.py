"""From sampled tokens to outputs: appends them to sequences, decides what ends one, and retires it."""

from __future__ import annotations

from collections.abc import Callable

from engine.block_manager import BlockManager
from engine.cache_contract import PrefixCacheLike
from engine.request import FinishReason, Output, Sequence, Status, Timing, TokenLogprob
from engine.step import Sampled, SchedulerCounters, SchedulerLimits


class OutputProcessor:
    """Owns the table of live requests, and every sequence's way out.

    A sequence that ends while a step with it is still computed keeps its blocks until that step has landed (`land`): its rows are
    written until then.
    """

    def __init__(
        self, limits: SchedulerLimits, blocks: BlockManager, cache: PrefixCacheLike, clock: Callable[[], float], counters: SchedulerCounters
    ) -> None:
        self._limits, self._blocks, self._cache, self._clock = limits, blocks, cache, clock
        self._counters = counters
        self._by_id: dict[str, Sequence] = {}
        self._finals: list[Output] = []

    def add(self, seq: Sequence) -> None:
        assert seq.request.request_id not in self._by_id, f"request {seq.request.request_id} is already here"
        self._by_id[seq.request.request_id] = seq
        limits, params = self._limits, seq.request.params
        seq.max_len = min(seq.prompt_len + params.max_tokens, limits.max_model_len + 1)
        seq.stop_ids = frozenset(params.stop_token_ids) if params.ignore_eos else limits.eos_token_ids.union(params.stop_token_ids)

    def find(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def take_finals(self) -> list[Output]:
        """Final outputs of sequences that ended outside a commit: aborted, refused, or preempted without recompute."""
        finals, self._finals = self._finals, []
        return finals

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence that is in no queue any more, outside a commit."""
        self._finals.append(self._output(seq, [], reason))

    def append(self, seq: Sequence, row: int, sampled: Sampled) -> Output:
        """Append a row's tokens up to the first that ends the sequence."""
        if row in sampled.errors:
            return self._output(seq, [], FinishReason.ERROR, error=sampled.errors[row])
        tokens, token_ids, stop_ids, max_len = sampled.token_ids[row], seq.token_ids, seq.stop_ids, seq.max_len
        reason = stop_token_id = None
        for count, token in enumerate(tokens, 1):
            token_ids.append(token)
            if token in stop_ids:
                reason, stop_token_id = FinishReason.STOP, token
            elif len(token_ids) >= max_len:
                reason = FinishReason.LENGTH
            else:
                continue
            tokens = tokens[:count]
            break
        seq.num_computed = len(token_ids) - 1
        self._counters.generated_tokens += len(tokens)
        logprobs = tuple(sampled.logprobs[row][: len(tokens)]) if row in sampled.logprobs else ()
        drafted = sampled.drafted[row] if sampled.drafted else 0
        # Drafts behind a sequence's end are not kept.
        accepted = self._count_drafts(drafted, min(len(sampled.token_ids[row]) - 1, len(tokens))) if drafted else 0
        if reason is None and seq.first_token_s:
            return Output(seq.request.request_id, tokens, None, None, logprobs, None, None, drafted, accepted)
        return self._output(seq, tokens, reason, stop_token_id, logprobs, drafted, accepted)

    def land(self, seq: Sequence) -> None:
        """A step with this sequence is computed."""
        seq.flights -= 1
        assert seq.flights >= 0, f"sequence {seq.seq_id} has landed more often than it was scheduled"
        if seq.flights:
            return
        seq.pending = 0
        if seq.status is Status.FINISHED:
            self._release(seq)

    def _count_drafts(self, drafted: int, accepted: int) -> int:
        """Note how many drafts were checked and kept. Returns the latter."""
        counters = self._counters
        counters.verifications += 1
        for place in range(drafted):
            counters.verified_at[place] += 1
            counters.accepted_at[place] += place < accepted
        return accepted

    def _output(
        self,
        seq: Sequence,
        tokens: list[int],
        reason: FinishReason | None,
        stop_token_id: int | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        drafted: int = 0,
        accepted: int = 0,
        error: str = "",
    ) -> Output:
        """An output that is a request's first, its last, or both."""
        timing = None
        cached_tokens = None
        if not seq.first_token_s:
            now = self._clock()
            admitted = seq.admitted_s or now
            restored = seq.restored_s or admitted
            timing = Timing(admitted - seq.arrival_s, restored - admitted, now - restored)
            cached_tokens = seq.cached_tokens or 0
            seq.first_token_s = now
            self._counters.prompt_tokens += seq.prompt_len
            self._counters.cached_tokens += cached_tokens
        if reason is not None:
            self._retire(seq, reason)
        request_id = seq.request.request_id
        return Output(request_id, tokens, reason, stop_token_id, logprobs, cached_tokens, timing, drafted, accepted, error)

    def _retire(self, seq: Sequence, reason: FinishReason) -> None:
        """The one exit of every sequence."""
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        self._counters.finished += 1
        del self._by_id[seq.request.request_id]
        if seq.flights == 0:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """The cache lets go first, then the blocks are free."""
        self._cache.finish(seq)
        self._blocks.release(seq)
