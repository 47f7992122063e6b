"""Which sequences run next: queues, admission, chunked prefill, preemption, abort. Host data only, one caller thread.

A step is a prompt step or a decode step on all ranks of the group (`engine/prefill_gate.py`). `schedule()` chooses it,
the engine computes it, `commit()` takes its tokens in. A sequence being prefilled is in no queue in between.
Clock, group and cache are handed in, so the same code runs in simulations and on any number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.block_manager import Admit, BlockManager
from engine.cache_contract import HOLD, PrefixCacheLike
from engine.prefill_gate import PrefillGate
from engine.request import FinishReason, Output, Sequence, Status, Timing, TokenLogprob

# Above this share of used blocks no new prompt starts; the rest is room for the running sequences to grow.
WATERMARK = 0.9


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that do not change while the engine runs. Tokens, sequences and blocks; block 0 and slot 0 are included in the counts.

    history_len: tokens before a slice that the model's n-gram tables look at.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    num_state_slots: int
    block_size: int
    eos_token_ids: frozenset[int]
    history_len: int = 0
    chunked_prefill: bool = True
    stop_preempted_request: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler chose for the rows of a step, in row order. `errors` maps a failed row to its reason."""

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of this rank. Empty `seqs`: the rank takes part without work of its own.

    rows: the sequences whose logits the batch asks for, in order. idle: nobody in the group has work, no step is taken.
    drafts: in a verify step the drafted tokens of each sequence, which stand in its slice behind its last token.
    """

    kind: StepKind
    seqs: list[Sequence] = field(default_factory=list)
    slices: list[SequenceSlice] = field(default_factory=list)
    rows: list[Sequence] = field(default_factory=list)
    idle: bool = False
    drafts: list[list[int]] = field(default_factory=list)

    @property
    def batch(self) -> Batch:
        return Batch(self.kind, self.slices)


class Drafter(Protocol):
    """Proposes tokens that a verify step then checks."""

    max_drafts: int

    def propose(self, seqs: list[Sequence], rooms: list[int]) -> list[list[int]]:
        """Drafts for each sequence, at most as many as its room; an empty list where none are worth it."""


@dataclass(slots=True)
class SchedulerCounters:
    """Cumulative figures of one rank; tokens unless the name says otherwise.

    verifications: sequences times verify steps. verified_at, accepted_at: drafts checked and kept, by place in the block.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    computed_prefill_tokens: int = 0
    prompt_steps: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    verifications: int = 0
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)


class Scheduler:
    """Owns every sequence from `add` to its final output, and the blocks and state slots of all of them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        gate: PrefillGate,
        cache: PrefixCacheLike,
        clock: Callable[[], float],
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self.gate = gate
        self.cache = cache
        self.clock = clock
        self.drafter = drafter
        self.blocks = BlockManager(limits.num_blocks, limits.num_state_slots, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = SchedulerCounters()
        if drafter is not None:
            self.counters.verified_at = [0] * drafter.max_drafts
            self.counters.accepted_at = [0] * drafter.max_drafts
        self._by_id: dict[str, Sequence] = {}
        self._finals: list[Output] = []

    # ---- requests in and out

    def add(self, seq: Sequence) -> None:
        assert seq.request.request_id not in self._by_id, f"request {seq.request.request_id} is already here"
        self._by_id[seq.request.request_id] = seq
        self.waiting.append(seq)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is, between steps. Its blocks are free at once, its final output comes with `take_finals`."""
        seq = self._by_id.get(request_id)
        if seq is None:
            return False
        (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
        self.counters.aborted += 1
        self._end(seq, FinishReason.ABORT)
        return True

    def take_finals(self) -> list[Output]:
        """Final outputs of sequences that ended outside `commit`: aborted, refused, or preempted without recompute."""
        finals, self._finals = self._finals, []
        return finals

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # ---- choosing a step

    def schedule(self) -> Step:
        """Vote with the group, then choose this rank's part of the step. All ranks call it the same number of times."""
        gate = self.gate
        ballot = gate.vote(unfinished=self.has_work, wants=self._wants_prefill(), decoding=bool(self.running))
        if not ballot.unfinished:
            return Step(StepKind.DECODE, idle=True)
        if ballot.prefill:
            step = self._select_prefill() if self._wants_prefill() else Step(StepKind.PREFILL)
            if gate.obtained_work(bool(step.seqs)):
                gate.count_prompt_step()
                self.counters.prompt_steps += 1
                return step
        gate.count_decode_step()
        self.counters.decode_steps += 1
        return self._select_decode()

    def _wants_prefill(self) -> bool:
        """A prompt in progress owns all its blocks already, so the watermark does not hold it back."""
        return bool(self.waiting) and (bool(self.waiting[0].block_table) or self.blocks.blocks.usage <= WATERMARK)

    def _select_prefill(self) -> Step:
        """Fill the token budget from the head of `waiting`. At most one piece is a chunk, and it ends the batch."""
        step = Step(StepKind.PREFILL)
        held: list[Sequence] = []
        budget = self.limits.max_num_batched_tokens
        while self.waiting and budget > 0 and len(self.running) + len(step.seqs) < self.limits.max_num_seqs:
            seq = self.waiting[0]
            if not seq.block_table:
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
            self._add_prefill(step, seq, end)
            if end < seq.prefill_len:
                break
        self.waiting.extendleft(reversed(held))
        return step

    def _admit(self, seq: Sequence, budget: int) -> Admit | None:
        """Give a fresh sequence its blocks and restore its prefix. None: its prefix is being computed, others may pass.

        NEVER also takes the sequence out of `waiting` and ends it.
        """
        limits = self.limits
        never = seq.prefill_len > limits.max_model_len or (not limits.chunked_prefill and seq.prefill_len > limits.max_num_batched_tokens)
        admit = Admit.NEVER if never else self.blocks.admit(seq.prefill_len)
        if admit is Admit.NEVER:
            self.waiting.popleft()
            self._end(seq, FinishReason.PREEMPTED if seq.num_preemptions else FinishReason.TOO_LONG)
        if admit is not Admit.OK:
            return admit
        plan = self.cache.plan(seq)
        if plan.kind == HOLD:
            self.cache.abandon(plan)
            return None
        if not limits.chunked_prefill and seq.prefill_len > budget:
            self.cache.abandon(plan)
            return Admit.LATER
        self.blocks.allocate(seq, seq.prefill_len)
        if seq.num_preemptions == 0:
            seq.admitted_s = self.clock()
        self.cache.restore(seq, plan)
        if seq.num_preemptions == 0:
            seq.restored_s = self.clock()
        assert 0 <= seq.num_computed < seq.prefill_len, (
            f"restored {seq.num_computed} of {seq.prefill_len} tokens: one must be left to compute"
        )
        seq.checkpoints = list(self.cache.checkpoints(seq))
        return Admit.OK

    def _chunk_end(self, seq: Sequence, budget: int) -> int:
        """End of the next piece: all that is left, cut by the budget and by the next checkpoint."""
        start = seq.num_computed
        end = min(seq.prefill_len, start + budget)
        if self.limits.chunked_prefill:
            while seq.checkpoints and seq.checkpoints[0] <= start:
                seq.checkpoints.pop(0)
            if seq.checkpoints and seq.checkpoints[0] < end:
                end = seq.checkpoints[0]
        return end

    def _add_prefill(self, step: Step, seq: Sequence, end: int) -> None:
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
                history=tuple(seq.token_ids[max(0, start - self.limits.history_len) : start]),
                logit_rows=LogitRows.LAST if last else LogitRows.NONE,
            )
        )
        if last:
            step.rows.append(seq)
        self.counters.computed_prefill_tokens += end - start

    def _select_decode(self) -> Step:
        """One token for every running sequence, after making room for those that cross into a new block."""
        drafts = self._propose() if self.drafter is not None else {}
        self._grow_tables()
        if drafts:
            return self._select_verify(drafts)
        history_len = self.limits.history_len
        seqs = list(self.running)
        slices = []
        for seq in seqs:
            token_ids = seq.token_ids
            last = len(token_ids) - 1
            history = tuple(token_ids[max(0, last - history_len) : last])
            slices.append(SequenceSlice(token_ids[last:], last, last + 1, seq.block_table, seq.state_slot, history))
        return Step(StepKind.DECODE, seqs, slices, seqs)

    # ---- drafts

    def _propose(self) -> dict[int, list[int]]:
        """Drafts by sequence id. A verification emits one token more than it keeps, so room ends one before the length limits do."""
        assert self.drafter is not None, "drafts without a drafter"
        most = self.drafter.max_drafts
        seqs = [seq for seq in self.running if self._remaining(seq) > 1]
        if not seqs:
            return {}
        proposed = self.drafter.propose(seqs, [min(most, self._remaining(seq) - 1) for seq in seqs])
        return {seq.seq_id: ids for seq, ids in zip(seqs, proposed, strict=True) if ids}

    def _select_verify(self, drafts: dict[int, list[int]]) -> Step:
        """As a decode step, with each sequence's drafts behind its last token as far as its blocks reach."""
        history_len = self.limits.history_len
        step = Step(StepKind.VERIFY)
        for seq in self.running:
            token_ids = seq.token_ids
            last = len(token_ids) - 1
            ids = self._fit(seq, drafts.get(seq.seq_id, []))
            history = tuple(token_ids[max(0, last - history_len) : last])
            tokens = [token_ids[last], *ids]
            step.slices.append(SequenceSlice(tokens, last, last + len(tokens), seq.block_table, seq.state_slot, history, 0, LogitRows.ALL))
            step.drafts.append(ids)
        step.seqs.extend(self.running)
        step.rows.extend(self.running)
        return step

    def _fit(self, seq: Sequence, ids: list[int]) -> list[int]:
        """Drafts that find blocks. Free ones are taken, but nobody is preempted for drafts."""
        blocks, block_size = self.blocks.blocks, self.limits.block_size
        end = len(seq.token_ids) + len(ids)
        while end > len(seq.block_table) * block_size and blocks.num_free:
            seq.block_table.extend(blocks.allocate())
        return ids[: len(seq.block_table) * block_size - len(seq.token_ids)]

    def _return_surplus(self) -> None:
        """Free the blocks that refused drafts have left behind their sequences."""
        for seq in self.running:
            needed = self.blocks.blocks_for(len(seq.token_ids))
            self.blocks.blocks.free_all(seq.block_table[needed:])
            del seq.block_table[needed:]

    # ---- blocks of running sequences

    def _grow_tables(self) -> None:
        """Give one block to each sequence whose newest token has none yet; preempt only when a block is really missing."""
        block_size = self.limits.block_size
        short = [seq for seq in self.running if len(seq.token_ids) > len(seq.block_table) * block_size]
        if self.drafter is not None and len(short) > self.blocks.blocks.num_free:
            self._return_surplus()
        for seq in short:
            while seq.status is Status.RUNNING and self.blocks.blocks.num_free == 0:
                self._preempt(self._victim())
            if seq.status is Status.RUNNING:
                seq.block_table.extend(self.blocks.blocks.allocate())

    def _victim(self) -> Sequence:
        """The cheapest to recompute per block that it frees, the latest arrival among equals; never the one closest to its end.

        Sparing that one guarantees progress: its remaining length falls with every decode step.
        """
        if len(self.running) == 1:
            return self.running[0]
        closest = min(self.running, key=lambda seq: (self._remaining(seq), seq.seq_id))
        return min(
            (seq for seq in self.running if seq is not closest),
            key=lambda seq: (len(seq.token_ids) / len(seq.block_table), -seq.seq_id),
        )

    def _remaining(self, seq: Sequence) -> int:
        """Most tokens that a sequence may still produce."""
        return min(seq.request.params.max_tokens - seq.output_len, self.limits.max_model_len + 1 - len(seq.token_ids))

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it is prefilled again, prompt and output, when there is room."""
        self.running.remove(seq)
        self.counters.preemptions += 1
        if self.limits.stop_preempted_request:
            self._end(seq, FinishReason.PREEMPTED)
            return
        self.cache.finish(seq)
        self.blocks.release(seq)
        seq.status = Status.WAITING
        seq.num_computed = 0
        seq.prefill_len = len(seq.token_ids)
        seq.num_preemptions += 1
        seq.checkpoints = []
        seq.draft_rates = []
        # Behind a prompt in progress: that one holds blocks, and at the head it can always finish and free them.
        self.waiting.insert(1 if self.waiting and self.waiting[0].block_table else 0, seq)

    # ---- results of a step

    def commit(self, step: Step, sampled: Sampled) -> list[Output]:
        """Take in the tokens of a step, in row order; sequences that ended meanwhile are skipped.

        A prefill's chunk is stored only here, after the sampler has found its logits sound.
        """
        if step.kind is StepKind.PREFILL:
            return self._commit_prefill(step, sampled)
        append = self._append
        finished = self.counters.finished
        outputs = [append(seq, row, sampled) for row, seq in enumerate(step.rows) if seq.status is Status.RUNNING]
        if step.drafts:
            self._count_drafts(step.drafts, sampled, outputs)
        if self.counters.finished != finished:
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        return outputs

    def _count_drafts(self, drafts: list[list[int]], sampled: Sampled, outputs: list[Output]) -> None:
        """Note in every output how many drafts were checked and kept; drafts behind a sequence's end are not kept."""
        counters = self.counters
        for ids, tokens, output in zip(drafts, sampled.token_ids, outputs, strict=True):
            if not ids:
                continue
            output.drafted = len(ids)
            output.accepted = min(len(tokens) - 1, len(output.token_ids))
            counters.verifications += 1
            for place in range(output.drafted):
                counters.verified_at[place] += 1
                counters.accepted_at[place] += place < output.accepted

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
            outputs.append(self._append(seq, row, sampled))
            if seq.status is Status.RUNNING:
                self.running.append(seq)
            row += 1
        return outputs

    def _append(self, seq: Sequence, row: int, sampled: Sampled) -> Output:
        """Append a row's tokens up to the first that ends the sequence."""
        if row in sampled.errors:
            return self._output(seq, [], FinishReason.ERROR, error=sampled.errors[row])
        tokens = sampled.token_ids[row]
        token_ids = seq.token_ids
        reason = stop_token_id = None
        for count, token in enumerate(tokens, 1):
            token_ids.append(token)
            reason = self._end_reason(seq, token)
            if reason is not None:
                tokens = tokens[:count]
                stop_token_id = token if reason is FinishReason.STOP else None
                break
        seq.num_computed = len(token_ids) - 1
        self.counters.generated_tokens += len(tokens)
        logprobs = sampled.logprobs[row][: len(tokens)] if row in sampled.logprobs else []
        if reason is None and seq.first_token_s:
            return Output(seq.request.request_id, tokens, None, None, logprobs)
        return self._output(seq, tokens, reason, stop_token_id, logprobs)

    def _end_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        """Why a sequence ends with the token just appended, or None."""
        params = seq.request.params
        limits = self.limits
        if (token in limits.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            return FinishReason.STOP
        length = len(seq.token_ids)
        if length - seq.prompt_len >= params.max_tokens or length > limits.max_model_len:
            return FinishReason.LENGTH
        return None

    def _output(
        self,
        seq: Sequence,
        tokens: list[int],
        reason: FinishReason | None,
        stop_token_id: int | None = None,
        logprobs: list[TokenLogprob] | None = None,
        error: str = "",
    ) -> Output:
        """An output that is a request's first, its last, or both."""
        timing = None
        cached_tokens = None
        if not seq.first_token_s:
            now = self.clock()
            admitted = seq.admitted_s or now
            restored = seq.restored_s or admitted
            timing = Timing(admitted - seq.arrival_s, restored - admitted, now - restored)
            cached_tokens = seq.cached_tokens or 0
            seq.first_token_s = now
            self.counters.prompt_tokens += seq.prompt_len
            self.counters.cached_tokens += cached_tokens
        if reason is not None:
            self._retire(seq, reason)
        return Output(seq.request.request_id, tokens, reason, stop_token_id, logprobs or [], cached_tokens, timing, error=error)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence that is in no queue any more, outside `commit`."""
        self._finals.append(self._output(seq, [], reason))

    def _retire(self, seq: Sequence, reason: FinishReason) -> None:
        """The one exit of every sequence: the cache lets go first, then the blocks are free."""
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        self.counters.finished += 1
        self.cache.finish(seq)
        self.blocks.release(seq)
        del self._by_id[seq.request.request_id]
