"""Replay prompts through index and policy alone: what does this cache hit, and what could any cache hit?

Same decisions as the live cache (it shares every rule), no bytes, no model: a trace of a day takes seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hicache.admission import AdmissionPolicy, LargePrompts
from hicache.host_cache import HostCache
from hicache.index import NONE, StateReason
from hicache.keys import KeySpace
from hicache.policy import chunk_states, prefill_states, restore_cap
from hicache.priority import Use
from hicache.replay import WindowReplay
from hicache.reservation import PageReservation, StateReservation


@dataclass(frozen=True, slots=True)
class SimulatedCache:
    """The cache to imagine. Sizes as the live one has them; the others as the knobs of the same names.

    window, encoder_layers: of the model, for replays.
    """

    num_frames: int
    page_tokens: int = 128
    frames_per_state: int = 13
    keep_tokens: int = 140
    min_restore_tokens: int = 128
    states_per_path: int = 6
    state_interval_tokens: int = 16384
    store_tail_state: bool = True
    store_threshold: int = 1
    eviction: str = "lru"
    scan_share: float = 0.25
    replay: str = "off"
    window: int = 128
    encoder_layers: int = 20


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """One prompt of a trace. anchor_tokens: its system and tools part, 0 if unknown."""

    tokens: Sequence[int]
    anchor_tokens: int = 0


@dataclass(slots=True)
class SimulationResult:
    """Token sums over all prompts. oracle_tokens: unlimited memory and a state at every page. replays: prompts that resumed by one;
    replay_tokens: what that added to the hit tokens, beyond the deepest state.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    oracle_tokens: int = 0
    replays: int = 0
    replay_tokens: int = 0
    evicted_pages: int = 0

    @property
    def share_of_oracle(self) -> float:
        return self.hit_tokens / self.oracle_tokens if self.oracle_tokens else 1.0


def simulate(prompts: Iterable[TracePrompt], shape: SimulatedCache) -> SimulationResult:
    """Serve prompts one after the other, each prefill complete before the next begins."""
    simulator = _Simulator(shape)
    for prompt in prompts:
        simulator.serve(prompt)
    simulator.result.evicted_pages = simulator.cache.evicted_pages
    return simulator.result


class _Simulator:
    def __init__(self, shape: SimulatedCache) -> None:
        self.shape = shape
        interval = shape.state_interval_tokens // shape.page_tokens * shape.page_tokens
        self.interval = interval
        self.cache = HostCache(
            shape.num_frames,
            shape.page_tokens,
            shape.frames_per_state,
            state_interval=interval,
            segmented=shape.eviction == "slru",
            scan_share=shape.scan_share,
        )
        self.admission, self.large = AdmissionPolicy(shape.store_threshold), LargePrompts(self.cache.scan_pages)
        self.keys = KeySpace("simulation", "", shape.page_tokens)
        self.replay = WindowReplay(
            shape.replay, shape.window, shape.encoder_layers, shape.page_tokens, shape.keep_tokens, shape.min_restore_tokens
        )
        self.seen: set[bytes] = set()
        self.result = SimulationResult()

    def serve(self, prompt: TracePrompt) -> None:
        """Look up, count, and store what the prefill leaves behind."""
        shape, index, num_tokens = self.shape, self.cache.index, len(prompt.tokens)
        keys = self.keys.page_keys(prompt.tokens)
        path = index.match(keys)
        num_hit = len(path)
        index.pin(path)
        state, _ = self.cache.restore_point(path, num_tokens, shape.keep_tokens, shape.min_restore_tokens)
        restored = index.position[state] if state != NONE else 0
        replay_end = self._replay(keys, path, num_tokens, restored)
        if replay_end:
            restored = replay_end - self.replay.tokens
        elif state != NONE:
            index.states.touch(state)
        self._count(keys, num_tokens, restored)
        self.admission.see(keys)
        num_known = self.large.num_known(keys, num_hit)
        if not (replay_end and self.replay.approximate):
            self._store(prompt, keys, path, restored, replay_end)
        self.cache.unpin(path, Use(num_hit=num_hit, num_new=max(0, len(path) - num_known)))

    def _replay(self, keys: list[bytes], path: list[int], num_tokens: int, restored: int) -> int:
        """Where the pages of a replay end, 0 without one."""
        end = self.replay.end(keys, len(path), num_tokens, restored)
        if end:
            self.replay.resumed(keys[end // self.shape.page_tokens - 1])
            self.result.replays += 1
            self.result.replay_tokens += end - self.replay.tokens - restored
        return end

    def _store(self, prompt: TracePrompt, keys: list[bytes], path: list[int], restored: int, replay_end: int) -> None:
        """What the prefill leaves behind. path: grows by what it stores."""
        shape, num_tokens, matched = self.shape, len(prompt.tokens), len(path) * self.shape.page_tokens
        states = chunk_states(restored, matched, num_tokens, prompt.anchor_tokens, self.interval, shape.keep_tokens, shape.page_tokens)
        wanted = {p: reason for p, reason in states.items() if p >= replay_end}
        for end in [*sorted(wanted), num_tokens]:
            self._store_pages(path, keys[: end // shape.page_tokens], prompt.tokens)
            if end in wanted:
                self._store_state(path, end, wanted[end])
        for position, reason in prefill_states(num_tokens, shape.keep_tokens, shape.page_tokens):
            if reason is StateReason.RESEND or shape.store_tail_state:
                self._store_state(path, position, reason)

    def _count(self, keys: list[bytes], num_tokens: int, restored: int) -> None:
        shared = next((i for i, key in enumerate(keys) if key not in self.seen), len(keys)) * self.shape.page_tokens
        cap = restore_cap(num_tokens, self.shape.keep_tokens, self.shape.page_tokens)
        self.seen.update(keys)
        result = self.result
        result.requests += 1
        result.prompt_tokens += num_tokens
        result.hit_tokens += restored
        result.oracle_tokens += min(shared, cap)

    def _store_pages(self, path: list[int], keys: list[bytes], tokens: Sequence[int]) -> None:
        first = len(path)
        keys = keys[: first + self.admission.admits(keys[first:])]
        with PageReservation(self.cache, max(0, len(keys) - first)) as reservation:
            until = first + len(reservation.frames)
            path += reservation.commit(path[-1] if path else NONE, keys[first:until], first, tokens)

    def _store_state(self, path: list[int], position: int, reason: StateReason) -> None:
        path = path[: position // self.shape.page_tokens]
        if len(path) * self.shape.page_tokens < position:
            return
        if self.cache.reuse_state(path[-1], reason):
            return
        if reason in (StateReason.FORK, StateReason.ASKED):
            self.cache.limit_forks(path, self.shape.states_per_path)
        with StateReservation(self.cache, path, evict=reason is not StateReason.TAIL) as reservation:
            if reservation.frames:
                reservation.commit(reason)


def trace_prompts(document: Mapping[str, Any]) -> Iterator[TracePrompt]:
    """The prompts of one recorded session in order of time: blocks become tokens that are equal exactly where ids are equal.

    document: a session with `id`, `block_size`, `tool_tokens`, `system_tokens` and `requests` (helpers nest their own). Text beyond the
    listed blocks is fresh in every request.
    """
    anchor = int(document.get("tool_tokens", 0)) + int(document.get("system_tokens", 0))
    scope = "" if document.get("hash_id_scope") == "global" else str(document["id"])
    size = int(document["block_size"])
    for number, request in enumerate(sorted(_flatten(document["requests"]), key=lambda r: float(r["t"]))):
        length = int(request["in"])
        tokens: list[int] = []
        for block in request["hash_ids"]:
            tokens += _block_tokens(f"{scope}/{block}", size)
        rest = length - len(tokens)
        tokens += _block_tokens(f"{scope}#{number}", rest) if rest > 0 else []
        yield TracePrompt(tokens[:length], anchor)


def _flatten(requests: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for request in requests:
        if "requests" in request:
            yield from _flatten(request["requests"])
        else:
            yield request


def _block_tokens(name: str, count: int) -> list[int]:
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "little") << 7
    return [(first + i) & 0xFFFFFFFF for i in range(count)]
