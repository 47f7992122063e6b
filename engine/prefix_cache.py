"""The host prefix cache as the scheduler sees it: plan, restore, store, finish. The only class that knows sequences and hicache.

A sequence holds pins on its path from `plan` to the end of its prefill (or `finish`), so nothing it relies on can be evicted by its
own stores. Copies are enqueued on the model's stream; a page is visible only after that.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cache_answers import AnswerWriter
from engine.cache_contract import PlanKind
from engine.cache_counters import CacheCounters, arena_leaves
from engine.cache_faults import flip
from engine.cache_herd import Herd
from engine.cache_keys import SequenceKeys, prompt_tokens
from engine.cache_lookup import PrefixLookup
from engine.cache_pins import KeptPrefixes
from engine.cache_restore import PrefixReader, unpin_state
from engine.cache_sources import CacheSources
from engine.cache_store import CopyFailures, PrefixWriter
from engine.page_mover import PageMover
from engine.prefix_plan import Match, Plan
from engine.request import FinishReason, Sequence
from hicache.admission import AdmissionPolicy, LargePrompts
from hicache.config import HiCacheConfig
from hicache.errors import MachineError
from hicache.explain import Explainer
from hicache.host_cache import HostCache
from hicache.index import NONE
from hicache.keys import KeySpace
from hicache.miss_history import MissHistory
from hicache.native_keys import open_chain
from hicache.native_page_map import open_page_map
from hicache.page_map import PageMap
from hicache.policy import Miss, align_down, chunk_states
from hicache.priority import UNUSED
from hicache.replay import WindowReplay
from hicache.restore_budget import RestoreBudget
from hicache.segment import CacheHome
from hicache.sizing import arena_bytes

if TYPE_CHECKING:
    from engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class _Admitted:
    """What is remembered of a running sequence. drops: `index.drops` when it restored. num_known: see `Match`."""

    drops: int
    num_known: int


class PrefixCache:
    """One rank's host prefix cache. One thread; no call blocks on the device.

    keep_tokens: prompt tokens that are always recomputed. num_bytes: arena size, states included.

    Raises:
        ConfigError: the arena is too small for one page and one state.
        MachineError: the arena cannot be mapped.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        kv: KVCache,
        fingerprint: str,
        keep_tokens: int,
        *,
        num_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        home: CacheHome | None = None,
    ) -> None:
        self._config, self._keep_tokens, self._clock = config, keep_tokens, clock
        self._page_tokens = kv.block_size
        needed = kv.window + kv.block_size + keep_tokens
        assert kv.ring_rows >= needed, (
            f"rings of {kv.ring_rows} rows lose the windows at s0 and s1 before the prefill ends; {needed} are needed"
        )
        num_bytes = arena_bytes(config, kv.blocks.device.type) if num_bytes is None else num_bytes
        secret = home.secret if home is not None else secrets.token_bytes(32)
        self._keys = KeySpace(fingerprint, kv.format_id, self._page_tokens, secret=secret)
        self.mover = PageMover(config, kv, num_bytes, home, self._keys.proof)
        self._interval = align_down(config.state_interval_tokens, self._page_tokens)
        num_frames = self.mover.arena.num_frames
        self.cache = HostCache(
            num_frames,
            self._page_tokens,
            self.mover.frames_per_state,
            config.state_slots,
            self._interval,
            self.mover.forget,
            self.mover.num_usable,
            segmented=config.eviction == "slru",
            scan_share=config.scan_share,
            audit_tokens=config.audit == "full",
            ranks=self.mover.ranks,
            clock=clock,
        )
        self.sources = CacheSources(config, self._keys, self.cache, self.mover, home, clock)
        self.counters = CacheCounters()
        self._failures = CopyFailures(self.counters)
        self._admission, self._large = AdmissionPolicy(config.store_threshold), LargePrompts(self.cache.scan_pages)
        self._misses = MissHistory(lambda key: self.cache.index.find(key) != NONE)
        self._writer = PrefixWriter(config, self.cache, self.mover, self.counters, self._admission, self._misses, keep_tokens)
        self._answers = AnswerWriter(config, self.cache, self._writer, self._keys)
        self._herd = Herd(config, self._page_tokens, keep_tokens, clock, self._admission.see)
        budget = RestoreBudget(config.max_restore_bytes_per_step, config.max_restore_share, self.mover.restore_gb_s, clock)
        self._kept = KeptPrefixes(self.cache, clock)
        self._next_map: Callable[[int], PageMap] | None = None
        self._reader = PrefixReader(self.cache, self.mover, self.counters, self._kept)
        shape = (kv.window, kv.num_encoder_layers, self._page_tokens)
        self._replay = WindowReplay(config.replay, *shape, keep_tokens, config.min_restore_tokens)
        self._explainer = Explainer(self.cache, self._replay, self._misses, keep_tokens, config.min_restore_tokens)
        self._sequence_keys = SequenceKeys(self._keys)
        self.lookup = PrefixLookup(
            config,
            self.cache,
            self.mover,
            self._sequence_keys,
            self.sources,
            self._herd,
            self._replay,
            self._misses,
            budget,
            keep_tokens,
        )
        self._planned: dict[int, Match] = {}
        self._active: dict[int, Match] = {}
        self._running: dict[int, _Admitted] = {}

    def hash_compiled(self, build_dir: Path) -> None:
        """Use the compiled hash of page keys from now on, if it can be had. From any thread: both give the same keys."""
        self._keys.chain = open_chain(build_dir)

    def index_compiled(self, build_dir: Path) -> None:
        """Keep the map of page keys in compiled code from the next step on, if it can be had. From any thread."""
        self._next_map = open_page_map(build_dir)

    # -- admission ---------------------------------------------------------------------------------------------------------

    def plan(self, seq: Sequence) -> Plan:
        """Find the deepest usable state of a sequence without blocks, and pin what it needs until `restore` or `abandon`."""
        self._release(self._planned.pop(seq.seq_id, None))
        match = Match(seq, self._keys.epoch)
        self._planned[seq.seq_id] = match
        if self._failures.off:
            return Plan(PlanKind.MISS, 0, Miss.COPY_ERROR, match)
        return self.lookup.find(seq, match)

    def begin_step(self, *, decoding: bool = False) -> None:
        """A scheduling step begins: what it may restore is bounded, see `RestoreBudget`. Without this call there is no limit."""
        self.lookup.budget.begin_step(decoding=decoding)
        if self._next_map is not None:
            self.cache.index.use_map(self._next_map(self.cache.pool.num_frames))
            self._next_map = None
        self.mover.settle()
        self.sources.step()
        for frames in self.mover.take_fresh():
            self.cache.pool.add(frames)
        self.cache.pool.collect_leased()
        self._kept.expire()
        self.cache.expire()

    def abandon(self, plan: Plan) -> None:
        """The scheduler cannot admit the sequence now: unpin; no counter moves."""
        seq_id = plan.match.seq.seq_id
        if self._planned.get(seq_id) is plan.match:
            del self._planned[seq_id]
            self._release(plan.match)

    def restore(self, seq: Sequence, plan: Plan) -> None:
        """Enqueue the copies of a plan into the sequence's blocks and state slot, and set where its prefill starts.

        `num_computed` becomes the restored length, less what is replayed; `cached_tokens` is set at the first admission only.
        """
        match = self._planned.pop(seq.seq_id, None)
        assert match is plan.match, f"sequence {seq.seq_id} is restored with a plan that is not its latest"
        began = time.perf_counter()
        tokens, reason, drops = plan.restore_tokens, plan.reason, self.cache.index.drops
        if tokens:
            tokens, reason = self._try_copy_in(seq, match, tokens, reason)
            self.counters.restored(self.lookup.restore_bytes(match, tokens), time.perf_counter() - began)
        if tokens and match.state != NONE:
            self.sources.note_hit(match.keys[tokens // self._page_tokens - 1])
        unpin_state(self.cache, match)
        self._count_admission(seq, match, tokens, reason)
        seq.num_computed = tokens
        self._running[seq.seq_id] = _Admitted(drops if tokens else self.cache.index.drops, match.num_known)
        self._set_replay(seq, match, tokens)
        if seq.cached_tokens is None:
            seq.cached_tokens = tokens
        # What follows an approximate window is approximate: it must not be what exact prompts find.
        if seq.request.cache_write and not self._approximates(seq):
            self._begin(seq, match, tokens)
        else:
            self._release(match, used=True)
        if plan.restore_tokens:
            self.lookup.budget.spend(self.lookup.restore_bytes(match, tokens), match.plan_seconds + time.perf_counter() - began)

    def _set_replay(self, seq: Sequence, match: Match, tokens: int) -> None:
        """The prefill starts at `tokens`: whether that is a replay, or the end of what was restored."""
        seq.swa_valid_start = seq.entries_start = 0
        if tokens and match.replay_end:
            seq.swa_valid_start, seq.entries_start = tokens, match.replay_end
            self._replay.resumed(match.keys[match.replay_end // self._page_tokens - 1])
            self.counters.replayed_tokens += match.replay_end - tokens

    def _approximates(self, seq: Sequence) -> bool:
        """Whether what the sequence computes follows an approximate window."""
        return seq.entries_start > 0 and self._replay.approximate

    def _count_admission(self, seq: Sequence, match: Match, tokens: int, reason: str) -> None:
        before = self.lookup.fetched.pop(seq.seq_id, tokens)
        if seq.cached_tokens is None and tokens > before and reason != "peer":
            self.counters.disk_tokens += tokens - before
        self.counters.admitted(seq, tokens, reason)
        if seq.request.cache_write and seq.cached_tokens is None:
            match.num_known = self._large.num_known(match.keys, match.num_known)
        held_s = self._herd.admitted(seq.seq_id)
        if held_s is not None:
            self.counters.held(held_s)
        elif seq.request.cache_write and seq.cached_tokens is None:
            self._admission.see(match.keys)

    def _try_copy_in(self, seq: Sequence, match: Match, tokens: int, reason: str) -> tuple[int, str]:
        """(tokens restored, reason). 0 when a copy failed or brought wrong bytes: then all is computed anew."""
        try:
            tokens = self._reader.copy_in(seq, match, tokens)
        except MachineError as error:
            self._failures.failed(error)
            return 0, Miss.COPY_ERROR
        self._failures.worked()
        return (tokens, reason) if tokens else (0, Miss.AUDIT)

    def _begin(self, seq: Sequence, match: Match, restored: int) -> None:
        """The prefill starts: decide where it keeps states, and announce what it computes."""
        self._active[seq.seq_id] = match
        matched, anchor = len(match.path) * self._page_tokens, seq.request.cache_anchor_tokens
        wanted = chunk_states(restored, matched, seq.prefill_len, anchor, self._interval, self._keep_tokens, self._page_tokens)
        match.wanted = {p: reason for p, reason in wanted.items() if p >= seq.entries_start}  # before that the windows are not yet right
        self._herd.lead(seq, match, max(restored, seq.entries_start))

    # -- store -------------------------------------------------------------------------------------------------------------

    def checkpoints(self, seq: Sequence) -> list[int]:
        """Ascending positions where a chunk must end. s0 and s1 need none: the rings still hold both windows when the prefill ends.

        A follower's wish may add one later, directly in `seq.checkpoints`.
        """
        match = self._active.get(seq.seq_id)
        return sorted(match.wanted) if match is not None else []

    def store_chunk(self, seq: Sequence, start: int, end: int) -> None:
        """Write through what a chunk [start, end) completed; its forward pass is enqueued. Ends the sequence's pins with its prefill."""
        match = self._active.get(seq.seq_id)
        if match is None:
            return
        done = end >= seq.prefill_len
        if match.epoch == self._keys.epoch and not self.cache.index.has_dropped(match.path) and not self._failures.off:
            began = time.perf_counter()
            try:
                self._store(seq, match, start, end, done)
                self._failures.worked()
            except MachineError as error:  # what was reserved is free again; what was stored before stays
                self._failures.failed(error)
            self.counters.stored_for(time.perf_counter() - began)
        self._herd.progress(seq.seq_id, max(end, seq.entries_start))
        if done:
            self._close(seq.seq_id)

    def _store(self, seq: Sequence, match: Match, start: int, end: int, done: bool) -> None:
        self._writer.store_pages(seq, match, start, end)
        if end in match.wanted:
            self._writer.store_state(seq, match, end, match.wanted[end])
        if done:
            self._writer.store_end_states(seq, match)
            self._explainer.remember(prompt_tokens(seq), seq.request.cache_salt)
            if match.path and (scoped := self._sequence_keys.scoped(seq)) is not None:
                self._misses.prompt_stored(scoped, match.keys[0])

    # -- end ---------------------------------------------------------------------------------------------------------------

    def finish(self, seq: Sequence) -> None:
        """Let go of everything a sequence holds, before its blocks are freed. Idempotent; on every exit path."""
        match = self._active.get(seq.seq_id)
        # Wrong bytes that were found since it restored may be what it has gone on from.
        admitted = self._running.pop(seq.seq_id, None)
        sound = admitted is not None and admitted.drops == self.cache.index.drops
        if match is not None:
            if match.epoch == self._keys.epoch and not self._failures.off:
                try:
                    self._writer.snapshot(seq, match)
                except MachineError as error:
                    self._failures.failed(error)
                if seq.finish_reason is FinishReason.ABORT:
                    self._misses.cut_off(self._writer.states_missing(seq, match))
            self._close(seq.seq_id)
        elif admitted is not None and sound and not self._failures.off and not self._approximates(seq) and self._answers.wanted(seq):
            self._store_answer(seq, admitted.num_known)
        self._release(self._planned.pop(seq.seq_id, None))
        self._sequence_keys.forget(seq.seq_id)
        self._herd.forget(seq.seq_id)
        self.lookup.fetched.pop(seq.seq_id, None)

    def _store_answer(self, seq: Sequence, num_known: int) -> None:
        began, keys = time.perf_counter(), self._sequence_keys.known(seq)
        if keys is None:
            return
        try:
            self._answers.store(seq, keys, self._keys.epoch, num_known)
            self._failures.worked()
        except MachineError as error:
            self._failures.failed(error)
        self.counters.stored_for(time.perf_counter() - began)

    def _close(self, seq_id: int) -> None:
        """The prefill is over: nothing of it is pinned or awaited any more. Letting go of a long path takes time from others, too."""
        began = time.perf_counter()
        self._herd.drop_leader(seq_id)
        self._release(self._active.pop(seq_id, None), used=True)
        self.lookup.budget.charge(time.perf_counter() - began)

    def _release(self, match: Match | None, *, used: bool = False) -> None:
        """Unpin what a match holds. used: its sequence was admitted, so that its priority counts."""
        if match is not None:
            if match.peer is not None:
                match.peer.peer.release(match.peer)
                match.peer = None
            unpin_state(self.cache, match)
            self.cache.unpin(match.path, match.use() if used and match.epoch == self._keys.epoch else UNUSED)
            match.path = []

    def reset(self) -> None:
        """Forget every stored prefix in O(1). Old entries leave first; running sequences keep what they restored."""
        self._keys.reset()
        self.cache.forget()
        self._kept.clear()
        self.sources.remember_epoch()
        self._sequence_keys.clear()
        self._herd.clear()

    def close(self) -> None:
        """Write to disk what is worth it, and give page-locked memory back while the device is still there. Idempotent."""
        self.sources.close()
        self.mover.close()

    # -- what people look at -----------------------------------------------------------------------------------------------

    def explain(self, tokens: list[int], salt: str = "", scope: str = "") -> dict[str, Any]:
        """What a prompt would restore now and why not more; see `hicache.explain`. Changes nothing."""
        scoped = self._keys.first_key(tokens, scope) if scope else None
        return self._explainer.explain(tokens, self._keys.page_keys(tokens, salt), salt, scoped)

    def keep(self, tokens: list[int], salt: str, ttl_s: float) -> dict[str, Any]:
        """Pin what is stored of a prompt, see `KeptPrefixes.keep`."""
        return self._kept.keep(self._keys.page_keys(tokens, salt), ttl_s)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, numbers only: the leaves of `prefix_cache` in the JSON metrics and the host cache's own."""
        recovery, disk = self.sources.recovery, self.sources.leaves()
        return {
            **self.counters.leaves(len(self.cache.index) * self._page_tokens),
            **arena_leaves(self.cache, self.mover),
            "pinned_sequences": len(self._planned) + len(self._active),
            "held_requests": self._herd.num_held,
            "kept_prefixes": len(self._kept),
            "kept_frames": self._kept.num_frames,
            "switched_off": int(self._failures.off),
            "recovered": {"pages": recovery.pages, "states": recovery.states, "dropped": recovery.dropped},
            "disk_errors_total": disk.pop("errors_total", {}),
            "disk": disk,
        }

    def inject_fault(
        self, kind: str, *, target: str = "page", page: int = -1, byte: int | None = None, count: int = 1, seconds: float = 0.005
    ) -> dict[str, Any]:
        """Break something on purpose, to show that the proof notices. For servers started with fault injection.

        flip: see `engine.cache_faults.flip`. drop, short: spoil the next `count` store copies. delay: make the next `count` restore
        copies `seconds` late. refuse: the next `count` copies in any direction fail.

        Raises:
            ConfigError: unknown kind, nothing is stored yet, or an argument is out of range.
        """
        if kind == "flip":
            return flip(self.cache, self.mover.arena, self.mover.row_bytes, self.mover.state_bytes, target, page, byte, count)
        return self.mover.transfer.arm(kind, count, seconds)
