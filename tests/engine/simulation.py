"""Pieces of a simulated rank: a clock that moves when told, a model without a model, and a group of threads in lockstep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from engine.batch import StepKind
from engine.cache_contract import NoPlan, NoPrefixCache, PlanKind
from engine.distributed import Group, SoloGroup
from engine.prefill_gate import PrefillGate, VoteRule
from engine.request import Output, Request, SamplingParams, Sequence
from engine.scheduler import Scheduler
from engine.step import Sampled, SchedulerLimits, Step
from tests.parallel.thread_tensors import MEETING_S, ThreadTensors

EOS = 1


class FakeClock:
    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def limits(**changes: Any) -> SchedulerLimits:
    """Numbers that a reader can follow: blocks of 4 tokens, 15 usable blocks, steps of 16 tokens."""
    base: dict[str, Any] = {
        "max_model_len": 48,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "num_blocks": 16,
        "num_state_slots": 7,
        "block_size": 4,
        "eos_token_ids": frozenset([EOS]),
        "history_len": 2,
    }
    return SchedulerLimits(**{**base, **changes})


def make_scheduler(
    group: Group | None = None,
    *,
    cache: Any = None,
    attempt: int = 70,
    any_: int = 100,
    rule: VoteRule = VoteRule.INTERVALS,
    clock: FakeClock | None = None,
    **changes: Any,
) -> Scheduler:
    gate = PrefillGate(group or SoloGroup(), attempt, any_, rule)
    return Scheduler(limits(**changes), gate, cache or NoPrefixCache(), clock or FakeClock())


def make_sequence(name: str, prompt: list[int] | int, max_tokens: int = 4, **params: Any) -> Sequence:
    """A greedy request; an integer prompt means that many tokens, different for every name."""
    ids = [2 + (sum(name.encode()) + 3 * i) % 27 for i in range(prompt)] if isinstance(prompt, int) else prompt
    request = Request(name, ids, SamplingParams(temperature=0, max_tokens=max_tokens, **params))
    return Sequence(next(_ids), request, 1.0, 0, list(ids), len(ids), len(ids))


_ids = iter(range(10**9))


def next_token(token_ids: list[int]) -> int:
    """The simulated model: a function of all tokens; now and then EOS."""
    return 1 + (sum(token_ids) * 31 + 7 * len(token_ids)) % 29


def expected_tokens(seq: Sequence, max_model_len: int) -> list[int]:
    """What a sequence produces when nothing disturbs it."""
    tokens = list(seq.request.prompt_token_ids)
    for _ in range(seq.request.params.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS or len(tokens) > max_model_len:
            break
    return tokens[seq.prompt_len :]


def run_step(scheduler: Scheduler) -> tuple[Step, list[Output]]:
    """One iteration: schedule, compute, commit."""
    step = scheduler.schedule()
    outputs = scheduler.take_finals()
    if step.seqs:
        check_step(scheduler, step)
        outputs += scheduler.commit(step, Sampled([[next_token(seq.token_ids)] for seq in step.rows]))
    check_blocks(scheduler)
    return step, outputs


def check_step(scheduler: Scheduler, step: Step) -> None:
    """Rules that every step obeys: one kind, the token budget, at most one chunk at the end, contiguous pieces, tables long enough."""
    limits = scheduler.limits
    for seq, piece in zip(step.seqs, step.slices, strict=True):
        assert piece.token_ids == seq.token_ids[piece.start : piece.end]
        assert len(piece.block_table) * limits.block_size >= piece.end
        assert list(piece.history) == seq.token_ids[max(0, piece.start - limits.history_len) : piece.start]
    if step.kind is StepKind.DECODE:
        assert all(piece.end == len(seq.token_ids) for seq, piece in zip(step.seqs, step.slices, strict=True))
        assert len(step.seqs) <= limits.max_num_seqs
        return
    assert sum(len(piece.token_ids) for piece in step.slices) <= limits.max_num_batched_tokens
    assert all(piece.start == seq.num_computed for seq, piece in zip(step.seqs, step.slices, strict=True))
    assert all(piece.end == seq.prefill_len for seq, piece in zip(step.seqs[:-1], step.slices[:-1], strict=True))
    assert len(scheduler.running) + len(step.seqs) <= limits.max_num_seqs


def check_blocks(scheduler: Scheduler) -> None:
    """Conservation: what sequences own and what is free make the pools, and nothing is owned twice."""
    blocks, slots = scheduler.blocks.blocks, scheduler.blocks.slots
    alive = [*scheduler.waiting, *scheduler.running]
    owned = [block for seq in alive for block in seq.block_table]
    states = [seq.state_slot for seq in alive if seq.state_slot != -1]
    assert len(owned) == len(set(owned)) == blocks.num_used
    assert len(states) == len(set(states)) == slots.num_used
    assert blocks.num_used + blocks.num_free == blocks.size - 1
    assert {0} & {*owned, *states} == set()


def drain(scheduler: Scheduler, max_steps: int = 5000) -> list[Output]:
    """Step until nothing is left. Fails when the scheduler does not come to an end."""
    outputs: list[Output] = []
    for _ in range(max_steps):
        step, new = run_step(scheduler)
        outputs += new
        if step.idle:
            return outputs
    raise AssertionError(f"still {len(scheduler.waiting)} waiting and {len(scheduler.running)} running after {max_steps} steps")


def tokens_of(outputs: list[Output], name: str) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


def finals_of(outputs: list[Output], name: str) -> list[Output]:
    return [output for output in outputs if output.request_id == name and output.finish_reason is not None]


class RecordingCache(NoPrefixCache):
    """A cache that stores nothing but writes down its calls, with chosen checkpoints, restore lengths and held requests."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ends: dict[str, list[int]] = {}
        self.restores: dict[str, int] = {}
        self.holds: set[str] = set()
        self.pinned: set[int] = set()

    def plan(self, seq: Sequence) -> NoPlan:
        self.pinned.add(seq.seq_id)
        self.calls.append(("plan", seq.request.request_id))
        return NoPlan(PlanKind.HOLD if seq.request.request_id in self.holds else PlanKind.MISS)

    def abandon(self, plan: NoPlan) -> None:
        self.calls.append(("abandon",))

    def restore(self, seq: Sequence, plan: NoPlan) -> None:
        assert seq.block_table, "restore into a sequence without blocks"
        seq.num_computed = self.restores.get(seq.request.request_id, 0)
        if seq.cached_tokens is None:
            seq.cached_tokens = seq.num_computed
        self.calls.append(("restore", seq.request.request_id))

    def checkpoints(self, seq: Sequence) -> list[int]:
        return self.ends.get(seq.request.request_id, [])

    def store_chunk(self, seq: Sequence, start: int, end: int) -> None:
        assert seq.block_table, "store of a sequence without blocks"
        self.calls.append(("store", seq.request.request_id, start, end))

    def finish(self, seq: Sequence) -> None:
        self.calls.append(("finish", seq.request.request_id, bool(seq.block_table)))


class ThreadGroup:
    """One rank's end of an all-reduce between threads of this process."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, board: list[list[int]], parts: dict[Any, Any]) -> None:
        """parts: what `split` has made so far, common to all ranks."""
        self.rank = rank
        self.size = size
        self._meeting = meeting
        self._board = board
        self._parts = parts

    def max(self, values: list[int]) -> list[int]:
        self._board[self.rank] = values
        self._meeting.wait(timeout=MEETING_S)
        result = [max(column) for column in zip(*self._board, strict=True)]
        self._meeting.wait(timeout=MEETING_S)
        return result

    def split(self, size: int, device: str) -> ThreadTensors:
        first = self.rank - self.rank % size
        part = self._parts.setdefault((size, first), (threading.Barrier(size), [None] * size))
        return ThreadTensors(self.rank - first, size, *part)

    def close(self) -> None:
        return None


def run_ranks(size: int, rank_main: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Run one thread per rank to its end; returns their results in rank order, or raises the first rank's own failure."""
    meeting = threading.Barrier(size)
    board: list[list[int]] = [[] for _ in range(size)]
    results: list[Any] = [None] * size
    failures: list[BaseException] = []
    parts: dict[Any, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = rank_main(ThreadGroup(rank, size, meeting, board, parts))
        except threading.BrokenBarrierError as error:
            failures.append(error)
        except BaseException as error:
            failures.insert(0, error)
            meeting.abort()
            for barrier, _ in parts.values():
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
