"""What the next step is, and taking its results in. Host data only, one caller thread.

A step is a prompt step or a decode step on all ranks of the group (`engine/prefill_gate.py`). `schedule()` plans it, the engine
computes it, `commit()` takes its tokens in. A decode step may be planned while the one before it is still computed: what it needs to
know exactly makes it call `land`, which commits that step first. Prompt steps and preemption always do.

Who owns what: `PrefillQueue` the waiting sequences, `DecodeSet` the running ones, `OutputProcessor` the live requests and their ends.
Clock, group and cache are handed in, so the same code runs in simulations and on any number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.batch import StepKind
from engine.block_manager import BlockManager
from engine.cache_contract import PrefixCacheLike
from engine.decode_set import DecodeSet
from engine.output_processor import OutputProcessor
from engine.prefill_gate import PrefillGate
from engine.prefill_queue import PrefillQueue
from engine.request import FinishReason, Output, Sequence, Status
from engine.step import Sampled, SchedulerCounters, SchedulerLimits, Step


def _nothing_in_flight() -> None:
    return None


class Scheduler:
    """Every sequence from `add` to its final output, and the blocks and state slots of all of them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        gate: PrefillGate,
        cache: PrefixCacheLike,
        clock: Callable[[], float],
        land: Callable[[], None] = _nothing_in_flight,
    ) -> None:
        """land: commits the step that is still computed, if there is one."""
        self.limits = limits
        self.gate = gate
        self.cache = cache
        self.blocks = BlockManager(limits.num_blocks, limits.num_state_slots, limits.block_size, limits.part)
        self.counters = SchedulerCounters(verified_at=[0] * limits.max_drafts, accepted_at=[0] * limits.max_drafts)
        self._land = land
        self._outputs = OutputProcessor(limits, self.blocks, cache, clock, self.counters)
        self._queue = PrefillQueue(limits, self.blocks, cache, clock, self._outputs)
        self._decode = DecodeSet(limits, self.blocks, cache, self._queue, self._outputs, self.counters)

    # ---- requests in and out

    @property
    def waiting(self) -> deque[Sequence]:
        return self._queue.waiting

    @property
    def running(self) -> list[Sequence]:
        return self._decode.running

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self._outputs.add(seq)
        self.waiting.append(seq)

    def __contains__(self, request_id: str) -> bool:
        return self._outputs.find(request_id) is not None

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is, between steps. Its blocks are free at once, or when the step in flight has landed; its final
        output comes with `take_finals`."""
        seq = self._outputs.find(request_id)
        if seq is None:
            return False
        (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
        self._outputs.end(seq, FinishReason.ABORT)
        return True

    def take_finals(self) -> list[Output]:
        """Final outputs of sequences that ended outside `commit`: aborted, refused, or preempted without recompute."""
        return self._outputs.take_finals()

    # ---- choosing a step

    def schedule(self) -> Step:
        """Vote with the group, then choose this rank's part of the step. All ranks call it the same number of times.

        The step that it returns has to be committed, unless it has no sequences.
        """
        gate = self.gate
        decoding = bool(self.running)
        queue = self._queue
        ballot = gate.vote(
            unfinished=self.has_work,
            wants=queue.wants_step,
            decoding=decoding,
            begun=queue.has_begun,
            urgent=queue.is_urgent(decoding),
        )
        if not ballot.unfinished:
            self._land()
            return Step(StepKind.DECODE, idle=True)
        if ballot.prefill:
            self._land()
            step = queue.select(len(self.running)) if queue.wants_step else Step(StepKind.PREFILL)
            if gate.obtained_work(bool(step.seqs)):
                gate.count_prompt_step()
                self.counters.prompt_steps += 1
                self.counters.computed_prefill_tokens += step.batch().num_tokens
                return step
        gate.count_decode_step()
        self.counters.decode_steps += 1
        if self._decode.num_in_flight and not self._decode.fits:
            self._land()
        return self._decode.select()

    # ---- results of a step

    def commit(self, step: Step, sampled: Sampled) -> list[Output]:
        """Take in the tokens of a step, in row order; sequences that ended meanwhile are skipped.

        A prefill's chunk is stored only here, after the sampler has found its logits sound.
        """
        if step.kind is StepKind.PREFILL:
            return self._commit_prefill(step, sampled)
        return self._decode.commit(step, sampled)

    def _commit_prefill(self, step: Step, sampled: Sampled) -> list[Output]:
        outputs = []
        row = 0
        for seq, piece in zip(step.seqs, step.slices, strict=True):
            start, end = piece.start, piece.end
            seq.num_computed = end
            if end < seq.prefill_len:
                self.cache.store_chunk(seq, start, end)
                self.waiting.appendleft(seq)
                continue
            if row not in sampled.errors:
                self.cache.store_chunk(seq, start, end)
            seq.status = Status.RUNNING
            outputs.append(self._outputs.append(seq, row, sampled))
            if seq.status is Status.RUNNING:
                self.running.append(seq)
            row += 1
        return outputs
