"""The running sequences: one token for each per step, blocks for their growth, and preemption when there are none."""

from __future__ import annotations

from engine.batch import SequenceSlice, StepKind
from engine.block_manager import BlockManager
from engine.cache_contract import PrefixCacheLike
from engine.output_processor import OutputProcessor
from engine.prefill_queue import PrefillQueue
from engine.request import FinishReason, Output, Sequence, Status
from engine.step import Sampled, SchedulerCounters, SchedulerLimits, Step


class DecodeSet:
    """Owns `running` and the growth of its block tables.

    num_in_flight: decode steps that are planned and not committed.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        cache: PrefixCacheLike,
        queue: PrefillQueue,
        outputs: OutputProcessor,
        counters: SchedulerCounters,
    ) -> None:
        self._limits, self._blocks, self._cache = limits, blocks, cache
        self._queue, self._outputs, self._counters = queue, outputs, counters
        self.running: list[Sequence] = []
        self.num_in_flight = 0

    @property
    def fits(self) -> bool:
        """Whether the free blocks suffice, however many tokens a step in flight adds."""
        missing = sum(max(0, self._blocks.blocks_for(self._most_tokens(seq)) - len(seq.block_table)) for seq in self.running)
        return missing <= self._blocks.blocks.num_free

    def select(self) -> Step:
        """The last token of every running sequence. Nothing is in flight, or the blocks suffice anyway (`fits`).

        A sequence that the step in flight certainly brings to its length limit is left out.
        """
        self.grow_tables()
        # One pass per step over every sequence: what a step costs beyond the model is mostly spent here.
        limits = self._limits
        history_len, block_size, max_drafts = limits.history_len, limits.block_size, limits.max_drafts
        step = Step(StepKind.DECODE)
        slices, rooms, seqs = step.slices, step.rooms, step.seqs
        for seq in self.running:
            token_ids, table = seq.token_ids, seq.block_table
            count = len(token_ids)
            last, remaining = count - 1, seq.max_len - count
            if seq.flights and remaining <= 1:
                continue
            room, more = len(table) * block_size - count, seq.pending + max_drafts
            if max_drafts and room < more:
                self._reserve(seq, min(remaining - 1, more))
                room = len(table) * block_size - count
            history = tuple(token_ids[last - history_len : last] if last >= history_len else token_ids[:last])
            slices.append(SequenceSlice([token_ids[last]], last, count, table, seq.state_slot, history))
            room = room if room < remaining else remaining - 1
            rooms.append(room)
            seqs.append(seq)
            seq.flights += 1
            seq.pending = 1 + (room if room < max_drafts else max_drafts)
        step.rows.extend(seqs)
        self.num_in_flight += bool(seqs)
        return step

    def commit(self, step: Step, sampled: Sampled) -> list[Output]:
        """Take in the tokens of a step that `select` has planned."""
        append, land = self._outputs.append, self._outputs.land
        finished = self._counters.finished
        outputs = []
        for row, seq in enumerate(step.rows):
            if seq.status is Status.RUNNING:
                outputs.append(append(seq, row, sampled))
            land(seq)
        self.num_in_flight -= 1
        if self._counters.finished != finished:
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        return outputs

    # ---- blocks

    def grow_tables(self) -> None:
        """Give blocks to each sequence whose newest token may have none yet; preempt only when one is really missing."""
        blocks, block_size, most_tokens = self._blocks.blocks, self._limits.block_size, self._most_tokens
        short = [
            seq for seq in self.running if (most_tokens(seq) if seq.flights else len(seq.token_ids)) > len(seq.block_table) * block_size
        ]
        if len(short) > blocks.num_free:
            self._return_surplus()
        for seq in short:
            while seq.status is Status.RUNNING and self._blocks.blocks_for(self._most_tokens(seq)) > len(seq.block_table):
                if blocks.num_free:
                    seq.block_table.extend(blocks.allocate())
                else:
                    self._preempt(self.victim())

    def _most_tokens(self, seq: Sequence) -> int:
        """Tokens of a sequence when a step in flight adds as many as it can without ending it."""
        count = len(seq.token_ids)
        return count + min(seq.pending, seq.remaining - 1) if seq.flights else count

    def _reserve(self, seq: Sequence, more: int) -> None:
        """Blocks for tokens that may follow. Free ones are taken, but nobody is preempted for drafts."""
        blocks, end = self._blocks.blocks, len(seq.token_ids) + more
        while end > len(seq.block_table) * self._limits.block_size and blocks.num_free:
            seq.block_table.extend(blocks.allocate())

    def _return_surplus(self) -> None:
        """Free the blocks that refused drafts have left behind their sequences. A step in flight may still write to its own."""
        for seq in self.running:
            if seq.flights == 0:
                needed = self._blocks.blocks_for(len(seq.token_ids))
                self._blocks.blocks.free_all(seq.block_table[needed:])
                del seq.block_table[needed:]

    # ---- preemption

    def victim(self) -> Sequence:
        """The cheapest to recompute per block that it frees, the latest arrival among equals; never the one closest to its end.

        Sparing that one guarantees progress: its remaining length falls with every decode step.
        """
        if len(self.running) == 1:
            return self.running[0]
        closest = min(self.running, key=lambda seq: (seq.remaining, seq.seq_id))
        return min(
            (seq for seq in self.running if seq is not closest),
            key=lambda seq: (len(seq.token_ids) / len(seq.block_table), -seq.seq_id),
        )

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it is prefilled again, prompt and output, when there is room."""
        assert seq.flights == 0, f"sequence {seq.seq_id} is preempted while a step with it is computed"
        self.running.remove(seq)
        self._counters.preemptions += 1
        if self._limits.stop_preempted_request:
            self._outputs.end(seq, FinishReason.PREEMPTED)
            return
        self._cache.finish(seq)
        self._blocks.release(seq)
        seq.status = Status.WAITING
        seq.num_computed = 0
        seq.prefill_len = len(seq.token_ids)
        seq.num_preemptions += 1
        seq.checkpoints = []
        seq.draft_rates = []
        self._queue.requeue(seq)
