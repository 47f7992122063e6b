"""Ranks in lockstep with real cache indexes behind the real router: what each routing does to the time to first token.

`python -m tests.server.routing_simulation` prints the table of `docs/routing.md`. Costs are those of a large GPU model; time is simulated.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from deepinfer_cli.tune.simulator import StepCosts, Tally
from engine.prefill_gate import PrefillGate
from engine.request import Timing
from hicache.index import NONE
from hicache.simulate import SimulatedCache, TracePrompt, _Simulator
from server.prompt_keys import BLOCK, PromptKeys, prompt_keys
from server.route_cost import CostModel, RankLoad, RestoreRule
from server.router import Router

COSTS = StepCosts(vote_s=0.0003, decode_s=0.014, decode_row_s=0.00005, prompt_s=0.010, prompt_token_s=0.000035)
CHUNK = 8192
HERD_MIN = 1024
RESTORE_TOKEN_S = 20e-9 * 10  # ten times the bus alone: pessimistic


@dataclass(slots=True, eq=False)
class Request:
    """One prompt of the load. follow_up: what its conversation asks next, after `think_s`."""

    at_s: float
    tokens: list[int]
    output_tokens: int
    session: str | None = None
    anchor: int = 0
    turns_left: int = 0
    kind: str = ""
    rank: int = -1
    name: str = ""
    keys: PromptKeys | None = None
    source: str = ""
    left: int = 0
    restored: int = -1
    work: int = 0
    admitted_s: float = 0.0
    first_s: float = 0.0
    emitted: int = 0


@dataclass(slots=True)
class SimulatedRank:
    """One rank: its queue, its decoding sequences and its cache."""

    cache: _Simulator
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    _found: dict[str, tuple[int, int]] = field(default_factory=dict)

    def restorable(self, request: Request) -> int:
        """Tokens that this rank's own cache has of a prompt; looked up anew when the cache has changed."""
        changes = self.cache.result.requests
        known = self._found.get(request.name)
        if known is None or known[0] != changes:
            self._found[request.name] = known = changes, self._look_up(request)
        return known[1]

    def _look_up(self, request: Request) -> int:
        assert request.keys is not None
        index, shape = self.cache.cache.index, self.cache.shape
        path = index.match(request.keys.chain[1:])
        state, _ = self.cache.cache.restore_point(path, len(request.tokens), shape.keep_tokens, shape.min_restore_tokens)
        return index.position[state] if state != NONE else 0


class Stored:
    """The router's view of the caches."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.shared = cluster.shared

    def __len__(self) -> int:
        return len(self._cluster.ranks)

    def tokens(self, keys: PromptKeys, most_tokens: int) -> dict[int, int]:
        found = {}
        for number, rank in enumerate(self._cluster.ranks):
            index = rank.cache.cache.index
            state = index.states.deepest(index.match(keys.chain[1:]), most_tokens // BLOCK)
            found[number] = index.position[state] if state != NONE else 0
        return found


class Cluster:
    """A front with one router, and ranks in lockstep."""

    def __init__(self, policy: str, ranks: int, frames: int, *, shared: bool, running_tokens: float = 64.0) -> None:
        shape = SimulatedCache(frames)
        self.shared = shared
        self.ranks = [SimulatedRank(_Simulator(shape)) for _ in range(ranks)]
        self.space = self.ranks[0].cache.keys
        self.tally = Tally()
        self.gate = PrefillGate(self.tally, 70, 2)
        rule = RestoreRule(shape.keep_tokens, shape.min_restore_tokens, HERD_MIN)
        self.router = Router(policy, costs=CostModel(rule, running_tokens))
        if policy == "cost":
            self.router.stored = Stored(self)
        self.now = 0.0
        self._count = 0
        self._work: dict[str, int] = {}

    def arrive(self, request: Request) -> None:
        request.keys = prompt_keys(request.tokens, "", self.space)
        loads = [
            RankLoad(number, sum(self._work[r.name] for r in rank.waiting), len(rank.waiting) + len(rank.running))
            for number, rank in enumerate(self.ranks)
        ]
        decision = self.router.route(request.session, request.keys, loads)
        request.rank, request.name, request.source = decision.rank, str(self._count), decision.source
        self._count += 1
        self._work[request.name] = max(1, len(request.tokens) - decision.saved_tokens)
        self.router.sent(request.name, request.keys, decision.rank)
        self.ranks[request.rank].waiting.append(request)

    def step(self) -> list[Request] | None:
        """One iteration; None when nobody has work. Returns what finished."""
        wants = [any(self._startable(rank, request) for request in rank.waiting) for rank in self.ranks]
        ballot = self.tally.vote(
            self.gate,
            [
                {
                    "unfinished": bool(rank.waiting or rank.running),
                    "wants": want,
                    "decoding": bool(rank.running),
                    "begun": any(request.restored >= 0 for request in rank.waiting),
                }
                for want, rank in zip(wants, self.ranks, strict=True)
            ],
        )
        if not ballot.unfinished:
            return None
        if ballot.prefill and any(wants):
            self.gate.count_prompt_step()
            self._prompt_step()
        else:
            self.gate.count_decode_step()
            self.now += max(COSTS.decode(len(rank.running)) for rank in self.ranks) + COSTS.vote_s
            for rank in self.ranks:
                for request in rank.running:
                    request.emitted += 1
        return self._retire()

    def _startable(self, rank: SimulatedRank, request: Request) -> bool:
        """Not held on a prompt in front that computes what it needs."""
        if request.restored >= 0:
            return True
        assert request.keys is not None
        have = rank.restorable(request)
        for other in rank.waiting:
            if other.restored < 0 or other is request or other.keys is None:
                continue
            shared = 0
            for mine, theirs in zip(request.keys.chain[1:], other.keys.chain[1:], strict=False):
                if mine != theirs:
                    break
                shared += BLOCK
            if min(shared, len(request.tokens) - 140) - have >= HERD_MIN:
                return False
        return True

    def _prompt_step(self) -> None:
        longest, complete = 0.0, []
        for rank in self.ranks:
            budget, restore_s = CHUNK, 0.0
            for request in list(rank.waiting):
                if budget <= 0:
                    break
                if not self._startable(rank, request):
                    continue
                if request.restored < 0:
                    restore_s += self._admit(rank, request)
                piece = min(budget, request.left)
                budget -= piece
                request.left -= piece
                if request.left:
                    break
                rank.waiting.remove(request)
                complete.append((rank, request))
            longest = max(longest, COSTS.prompt(CHUNK - budget) + restore_s)
        self.now += longest + 2 * COSTS.vote_s
        for rank, request in complete:
            self._first_token(rank, request)

    def _admit(self, rank: SimulatedRank, request: Request) -> float:
        restored = rank.restorable(request)
        if self.shared:
            restored = max(restored, *(other.restorable(request) for other in self.ranks))
        request.restored, request.left = restored, len(request.tokens) - restored
        request.admitted_s = self.now
        return restored * RESTORE_TOKEN_S

    def _first_token(self, rank: SimulatedRank, request: Request) -> None:
        assert request.keys is not None
        request.first_s, request.emitted = self.now, 1
        rank.cache.serve(TracePrompt(request.tokens, request.anchor))
        rank.running.append(request)
        self.router.computed(request.name)
        restore_s = request.restored * RESTORE_TOKEN_S
        timing = Timing(request.admitted_s - request.at_s, restore_s, self.now - request.admitted_s - restore_s)
        self.router.learn(request.source, len(request.tokens), request.restored, timing)

    def _retire(self) -> list[Request]:
        done = []
        for rank in self.ranks:
            done += [request for request in rank.running if request.emitted >= request.output_tokens]
            rank.running = [request for request in rank.running if request.emitted < request.output_tokens]
        for request in done:
            ids = request.tokens + _text(f"answer {request.name}", request.output_tokens)
            self.router.ended(prompt_keys(ids, "", self.space), len(request.tokens), request.rank)
        return done


def mixed_load(seed: int, seconds: float) -> list[Request]:
    """Agents of four fleets with a long common head, questions to many long templates, documents, bursts of equal prompts, short chats."""
    draw = random.Random(seed)
    heads = [_text(f"head {seed} {fleet}", 12_000 + 4_000 * fleet) for fleet in range(4)]
    templates = [_text(f"template {seed} {number}", draw.randrange(8_000, 20_000)) for number in range(48)]
    load: list[Request] = []
    for agent in range(48):
        fleet = agent % 4
        at, own = draw.uniform(0, seconds * 0.5), _text(f"task {seed} {agent}", draw.randrange(300, 3_000))
        load.append(Request(at, heads[fleet] + own, draw.randrange(60, 300), f"agent {agent}", len(heads[fleet]), 8, "agent"))
    for number, at in enumerate(_poisson(draw, 5.0, seconds)):
        template = templates[int(len(templates) * draw.random() ** 2)]  # some are asked more often than others
        question = _text(f"question {seed} {number}", draw.randrange(50, 800))
        load.append(Request(at, template + question, draw.randrange(30, 150), anchor=len(template), kind="template"))
    for number, at in enumerate(_poisson(draw, 0.3, seconds)):
        load.append(Request(at, _text(f"document {seed} {number}", draw.randrange(20_000, 50_000)), 200, kind="document"))
    for number, at in enumerate(_poisson(draw, 0.08, seconds)):
        head = _text(f"herd {seed} {number}", 16_000)
        burst = [head + _text(f"herd question {seed} {number} {i}", 60) for i in range(12)]
        load += [Request(at + 0.002 * i, tokens, 100, anchor=len(head), kind="herd") for i, tokens in enumerate(burst)]
    for number, at in enumerate(_poisson(draw, 3.0, seconds)):
        load.append(Request(at, _text(f"chat {seed} {number}", draw.randrange(100, 1_500)), draw.randrange(50, 250), kind="chat"))
    return sorted(load, key=lambda request: request.at_s)


def run_policy(
    policy: str, seed: int, *, ranks: int = 4, frames: int = 6_000, shared: bool = False, seconds: float = 60.0
) -> list[Request]:
    """Serve the whole load; conversations go on as their answers come."""
    cluster = Cluster(policy, ranks, frames, shared=shared)
    draw = random.Random(seed + 1)
    coming = [(request.at_s, number, request) for number, request in enumerate(mixed_load(seed, seconds))]
    heapq.heapify(coming)
    served: list[Request] = []
    number = len(coming)
    while True:
        while coming and coming[0][0] <= cluster.now:
            cluster.arrive(heapq.heappop(coming)[2])
        done = cluster.step()
        if done is None:
            if not coming:
                return served
            cluster.now = coming[0][0]
            continue
        for request in done:
            served.append(request)
            if request.turns_left:
                number += 1
                answer = _text(f"answer {request.name}", request.output_tokens)
                result = _text(f"result {seed} {request.session} {request.turns_left}", draw.randrange(200, 4_000))
                at = cluster.now + draw.uniform(0.5, 6.0)
                turn = Request(
                    at,
                    request.tokens + answer + result,
                    draw.randrange(60, 300),
                    request.session,
                    request.anchor,
                    request.turns_left - 1,
                    "agent",
                )
                heapq.heappush(coming, (at, number, turn))


@dataclass(frozen=True, slots=True)
class Summary:
    """Times to first token in seconds, and the share of prompt tokens that no rank had to compute."""

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    cached: float

    @staticmethod
    def of(requests: list[Request]) -> Summary:
        times = sorted(request.first_s - request.at_s for request in requests)
        cuts = statistics.quantiles(times, n=100)
        prompt = sum(len(request.tokens) for request in requests)
        return Summary(statistics.mean(times), cuts[49], cuts[94], cuts[98], sum(request.restored for request in requests) / prompt)


def _text(name: str, count: int) -> list[int]:
    first = random.Random(name).randrange(1 << 24) << 6
    return [(first + i) & 0xFFFFFFFF for i in range(count)]


def _poisson(draw: random.Random, rate: float, seconds: float) -> Iterator[float]:
    at = draw.expovariate(rate)
    while at < seconds:
        yield at
        at += draw.expovariate(rate)


def main() -> None:
    print(f"{'arenas':9} {'routing':13} {'mean':>7} {'p50':>7} {'p95':>7} {'p99':>7} {'cached':>7}")
    for shared in (False, True):
        for policy in ("affinity", "least-loaded", "cost"):
            rows = [Summary.of(run_policy(policy, seed, shared=shared)) for seed in range(3)]
            mean = [statistics.mean(getattr(row, name) for row in rows) for name in ("mean_s", "p50_s", "p95_s", "p99_s", "cached")]
            print(f"{'shared' if shared else 'own':9} {policy:13} " + " ".join(f"{value:7.3f}" for value in mean))


if __name__ == "__main__":
    main()
