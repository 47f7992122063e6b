"""What a group of ranks would do with a load at given intervals: the engine's own gate, and step times that were measured.

Pure: no clock, no process, no model. Every rank runs the same kind of step, so one gate stands for the gates of all ranks, which are
equal by construction; a step takes as long as its slowest rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.prefill_gate import Ballot, PrefillGate, VoteRule
from engine.prefill_queue import PATIENCE_S


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds. vote_s: a step in which nobody computes. Decode: base and per sequence; prompt: base and per token.

    wake_s: until an idle group has noticed that somebody has work. overhead_s: what the client's TTFT has beyond the engine's.
    tokens_per_step: above 1 with speculation.
    """

    vote_s: float
    decode_s: float
    decode_row_s: float
    prompt_s: float
    prompt_token_s: float
    wake_s: float = 0.0
    overhead_s: float = 0.0
    tokens_per_step: float = 1.0

    def decode(self, rows: int) -> float:
        return self.decode_s + self.decode_row_s * rows if rows else 0.0

    def prompt(self, tokens: int) -> float:
        return self.prompt_s + self.prompt_token_s * tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Independent requests. arrivals_s: an open loop's starts; without any, `concurrency` at a time with `think_s` in between.

    trace: prompt and output tokens of each request, in order of their starts; without any, all have `prompt_tokens` and `output_tokens`.
    """

    prompt_tokens: int
    output_tokens: int
    count: int
    arrivals_s: tuple[float, ...] = ()
    concurrency: int = 1
    think_s: float = 0.0
    trace: tuple[tuple[int, int], ...] = ()

    def tokens(self, number: int) -> tuple[int, int]:
        return self.trace[number] if self.trace else (self.prompt_tokens, self.output_tokens)


@dataclass(slots=True)
class Simulated:
    """One request: when it came, how many decode steps it waited for its first prompt step and between its chunks, when its first token
    came, and its gaps."""

    at_s: float
    rank: int
    prompt_left: int
    output_left: float
    waited_steps: int = 0
    paused_steps: int = 0
    started: bool = False
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s


class Tally:
    """The group as the gate sees it: every all-reduce returns what all ranks together said."""

    def __init__(self) -> None:
        self._said: list[int] = []

    def vote(self, gate: PrefillGate, ranks: list[dict[str, bool]]) -> Ballot:
        """ranks: the arguments of each rank's `PrefillGate.vote`. gate: one for all of them, whose group this is."""
        self._said = [max(column) for column in zip(*[gate.said(**rank) for rank in ranks], strict=True)]
        return gate.vote(**ranks[0])

    def max(self, values: list[int]) -> list[int]:
        return self._said


class Rank:
    """Queues of one rank. waiting: prompts not yet finished; running: sequences that decode."""

    def __init__(self) -> None:
        self.waiting: deque[Simulated] = deque()
        self.running: list[Simulated] = []

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def has_begun(self) -> bool:
        """As `engine.prefill_queue`, and so is `is_urgent`."""
        return bool(self.waiting) and self.waiting[0].started

    def is_urgent(self, now_s: float) -> bool:
        return bool(self.waiting) and (self.has_begun or not self.running or now_s - self.waiting[0].at_s > PATIENCE_S)


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """attempt, any_: intervals of the prompt votes, in decode steps."""

    ranks: int
    attempt: int
    any_: int
    costs: StepCosts
    chunk_tokens: int = 8192
    max_num_seqs: int = 256
    rule: VoteRule = VoteRule.INTERVALS


class Simulation:
    """Runs one workload to its end."""

    def __init__(self, group: SimulatedGroup) -> None:
        self._tally = Tally()
        self._gate = PrefillGate(self._tally, group.attempt, group.any_, group.rule)
        self._costs, self._chunk, self._limit = group.costs, group.chunk_tokens, group.max_num_seqs
        self._ranks = [Rank() for _ in range(group.ranks)]
        self._now = 0.0
        self._sent = 0
        self._turn = 0  # ties between equally loaded ranks go round

    def run(self, work: Workload) -> list[Simulated]:
        """Every request, in order of arrival."""
        done: list[Simulated] = []
        coming = deque(work.arrivals_s if work.arrivals_s else [0.0] * min(work.concurrency, work.count))
        while len(done) < work.count:
            self._take_in(coming, work)
            finished = self._step()
            if finished is None:
                self._now = coming[0]  # nobody has work: idle until somebody comes
                self._take_in(coming, work)
                self._now += self._costs.wake_s
                continue
            done += finished
            if not work.arrivals_s:
                starts = [self._now + work.think_s] * min(len(finished), work.count - self._sent - len(coming))
                coming = deque(sorted([*coming, *starts]))
        return sorted(done, key=lambda request: request.at_s)

    def _take_in(self, coming: deque[float], work: Workload) -> None:
        while coming and coming[0] <= self._now + 1e-12:
            self._arrive(coming.popleft(), work)
            self._sent += 1

    def _arrive(self, at_s: float, work: Workload) -> None:
        order = [(rank + self._turn) % len(self._ranks) for rank in range(len(self._ranks))]
        rank = min(order, key=lambda index: self._ranks[index].load)
        self._turn = rank + 1
        prompt, output = work.tokens(self._sent)
        self._ranks[rank].waiting.append(Simulated(at_s, rank, prompt, float(output)))

    def _step(self) -> list[Simulated] | None:
        """One iteration of the group; None when it is idle. Returns the requests that ended."""
        wants = [bool(rank.waiting) and len(rank.running) < self._limit for rank in self._ranks]
        ballot = self._tally.vote(
            self._gate,
            [
                {
                    "unfinished": rank.load > 0,
                    "wants": want,
                    "decoding": bool(rank.running),
                    "begun": rank.has_begun,
                    "urgent": rank.is_urgent(self._now),
                }
                for want, rank in zip(wants, self._ranks, strict=True)
            ],
        )
        if not ballot.unfinished:
            return None
        if ballot.prefill and any(wants):
            self._gate.count_prompt_step()
            return self._prompt_step()
        self._gate.count_decode_step()
        return self._decode_step()

    def _prompt_step(self) -> list[Simulated]:
        work_s, complete = 0.0, []
        for rank in self._ranks:
            budget = self._chunk
            while rank.waiting and budget > 0 and len(rank.running) < self._limit:
                request = rank.waiting[0]
                request.started = True
                piece = min(budget, request.prompt_left)
                budget -= piece
                request.prompt_left -= piece
                if request.prompt_left:
                    break
                complete.append(rank.waiting.popleft())
                rank.running.append(complete[-1])
            work_s = max(work_s, self._costs.prompt(self._chunk - budget))
        self._now += work_s + 2 * self._costs.vote_s  # the second vote: did anybody obtain work?
        for request in complete:
            request.first_s = request.last_s = self._now
            request.output_left -= 1
        return self._retire()

    def _decode_step(self) -> list[Simulated]:
        work_s = max(self._costs.decode(len(rank.running)) for rank in self._ranks)
        self._now += work_s + self._costs.vote_s
        for rank in self._ranks:
            for request in rank.waiting:
                request.waited_steps += not request.started
                request.paused_steps += request.started
            for request in rank.running:
                request.gaps_s.append(self._now - request.last_s)
                request.last_s = self._now
                request.output_left -= self._costs.tokens_per_step
        return self._retire()

    def _retire(self) -> list[Simulated]:
        ended = [request for rank in self._ranks for request in rank.running if request.output_left <= 1e-9]
        for rank in self._ranks:
            rank.running = [request for request in rank.running if request.output_left > 1e-9]
        return ended


def simulate(work: Workload, group: SimulatedGroup) -> list[Simulated]:
    """A fresh group does one workload. Times exclude `costs.overhead_s`, which callers add to a TTFT that they compare with a client's."""
    return Simulation(group).run(work)


def mean_wait_steps(requests: Sequence[Simulated]) -> float:
    """Decode steps before the first token, between chunks too."""
    return sum(request.waited_steps + request.paused_steps for request in requests) / len(requests)
