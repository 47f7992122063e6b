"""Which prompts run next: the queue of sequences to prefill, their admission, and the pieces that fit a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.batch import LogitRows, SequenceSlice, StepKind
from engine.block_manager import Admit, BlockManager
from engine.cache_contract import PlanKind, PrefixCacheLike
from engine.output_processor import OutputProcessor
from engine.request import FinishReason, Sequence
from engine.step import SchedulerLimits, Step

# Above this share of used blocks no new prompt starts; the rest is room for the running sequences to grow.
WATERMARK = 0.9
PATIENCE_S = 0.05  # a prompt that waited longer is urgent: about three decode steps of a large model


class PrefillQueue:
    """Owns `waiting`: new sequences at its end; one in progress at its head, preempted ones next. One in a step is in no queue."""

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        cache: PrefixCacheLike,
        clock: Callable[[], float],
        outputs: OutputProcessor,
    ) -> None:
        self._limits, self._blocks, self._cache, self._clock, self._outputs = limits, blocks, cache, clock, outputs
        self.waiting: deque[Sequence] = deque()

    def requeue(self, seq: Sequence) -> None:
        """Take in a preempted sequence. Behind a prompt in progress: that one holds blocks, and at the head it can always finish and
        free them."""
        self.waiting.insert(1 if self.waiting and self.waiting[0].block_table else 0, seq)

    @property
    def has_begun(self) -> bool:
        """Whether a prompt is in progress: it stands at the head and owns all its blocks."""
        return bool(self.waiting) and bool(self.waiting[0].block_table)

    @property
    def wants_step(self) -> bool:
        """A prompt in progress needs no more blocks, so the watermark does not hold it back."""
        return self.has_begun or (bool(self.waiting) and self._blocks.blocks.usage <= WATERMARK)

    def is_urgent(self, decoding: bool) -> bool:
        """Whether the head should not wait for other ranks: it is in progress, its rank has nothing else to do, or it waited long."""
        if not self.waiting:
            return False
        return self.has_begun or not decoding or self._clock() - self.waiting[0].arrival_s > PATIENCE_S

    def select(self, num_running: int) -> Step:
        """Fill the token budget from the head of `waiting`. At most one piece is a chunk, and it ends the batch."""
        step = Step(StepKind.PREFILL)
        held: list[Sequence] = []
        budget = self._limits.max_num_batched_tokens
        while self.waiting and budget > 0 and num_running + len(step.seqs) < self._limits.max_num_seqs:
            seq = self.waiting[0]
            fresh = not seq.block_table
            if fresh:
                admit = self._admit(seq, budget)
                if admit is Admit.LATER:
                    break
                if admit is None:
                    held.append(self.waiting.popleft())
                if admit is not Admit.OK:
                    continue
            end = self._chunk_end(seq, budget)
            self.waiting.popleft()
            budget -= end - seq.num_computed
            self._add(step, seq, end, max(seq.num_computed, seq.entries_start) if fresh else 0)
            if end < seq.prefill_len:
                break
        self.waiting.extendleft(reversed(held))
        return step

    def _admit(self, seq: Sequence, budget: int) -> Admit | None:
        """Give a fresh sequence its blocks and restore its prefix. None: its prefix is being computed, others may pass.

        NEVER also takes the sequence out of `waiting` and ends it.
        """
        limits = self._limits
        never = seq.prefill_len > limits.max_model_len or (not limits.chunked_prefill and seq.prefill_len > limits.max_num_batched_tokens)
        admit = Admit.NEVER if never else self._blocks.admit(seq.prefill_len)
        if admit is Admit.NEVER:
            self.waiting.popleft()
            self._outputs.end(seq, FinishReason.PREEMPTED if seq.num_preemptions else FinishReason.TOO_LONG)
        if admit is not Admit.OK:
            return admit
        plan = self._cache.plan(seq)
        if plan.kind is PlanKind.HOLD:
            self._cache.abandon(plan)
            return None
        if not limits.chunked_prefill and seq.prefill_len > budget:
            self._cache.abandon(plan)
            return Admit.LATER
        self._blocks.allocate(seq, seq.prefill_len)
        if seq.num_preemptions == 0:
            seq.admitted_s = self._clock()
        self._cache.restore(seq, plan)
        if seq.num_preemptions == 0:
            seq.restored_s = self._clock()
        assert 0 <= seq.num_computed < seq.prefill_len, (
            f"restored {seq.num_computed} of {seq.prefill_len} tokens: one must be left to compute"
        )
        seq.checkpoints = list(self._cache.checkpoints(seq))
        return Admit.OK

    def _chunk_end(self, seq: Sequence, budget: int) -> int:
        """End of the next piece: all that is left, cut by the budget and by the next checkpoint."""
        start = seq.num_computed
        end = min(seq.prefill_len, start + budget)
        if self._limits.chunked_prefill:
            while seq.checkpoints and seq.checkpoints[0] <= start:
                seq.checkpoints.pop(0)
            if seq.checkpoints and seq.checkpoints[0] < end:
                end = seq.checkpoints[0]
        return end

    def _add(self, step: Step, seq: Sequence, end: int, restored: int) -> None:
        start = seq.num_computed
        last = end == seq.prefill_len
        step.seqs.append(seq)
        step.slices.append(
            SequenceSlice(
                token_ids=seq.token_ids[start:end],
                start=start,
                total_len=seq.prefill_len,
                block_table=seq.block_table,
                state_slot=seq.state_slot,
                history=tuple(seq.token_ids[max(0, start - self._limits.history_len) : start]),
                swa_valid_start=seq.swa_valid_start,
                logit_rows=LogitRows.LAST if last else LogitRows.NONE,
                restored=restored,
                entries_start=seq.entries_start,
            )
        )
        if last:
            step.rows.append(seq)
