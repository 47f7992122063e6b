"""The host prefix cache as the scheduler sees it: plan, restore, store, finish. The only class that knows sequences and hicache.

A sequence holds pins on its path from `plan` to the end of its prefill (or `finish`), so nothing it relies on can be evicted by its
own stores. Copies are enqueued on the model's stream; a page is visible only after that.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from engine.cache_counters import CacheCounters
from engine.errors import ConfigError
from engine.request import Sequence
from hicache.audit import EXPONENT_BYTE, Checksums, flip_bytes
from hicache.config import HiCacheConfig
from hicache.host_cache import HostCache
from hicache.host_pool import HostArena, Owner, frame_bytes_for
from hicache.index import NONE, StateReason
from hicache.keys import KeySpace
from hicache.policy import Miss, align_down, prefill_states, restore_cap
from hicache.reservation import PageReservation, StateReservation
from hicache.sizing import arena_bytes
from hicache.transfer import CpuTransfer, Transfer

if TYPE_CHECKING:
    from engine.kv_cache import KVCache
    from engine.model_runner import Limits

_MAX_KEY_MEMOS = 4096  # waiting sequences whose keys are remembered between planning attempts


class PlanKind(StrEnum):
    """What the scheduler may do with a fresh sequence."""

    HIT = "hit"
    MISS = "miss"
    HOLD = "hold"


@dataclass(slots=True, eq=False)
class _Match:
    """What one sequence found and still pins. `path`: frames of its leading pages; grows as the prefill stores more."""

    seq_id: int
    epoch: int
    keys: list[bytes] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    state: int = NONE
    matched_pages: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to `plan`. restore_tokens: where prefill may start (0 unless HIT). reason: of the state, or of the miss."""

    kind: PlanKind
    restore_tokens: int
    reason: str
    match: _Match = field(repr=False)


class PrefixCache:
    """One rank's host prefix cache. One thread; no call blocks on the device.

    keep_tokens: prompt tokens that are always recomputed. num_bytes: arena size, states included.

    Raises:
        ConfigError: the arena is too small for one page and one state.
        MachineError: the arena cannot be mapped.
    """

    def __init__(self, config: HiCacheConfig, kv: KVCache, fingerprint: str, keep_tokens: int, *, num_bytes: int | None = None) -> None:
        self._config, self._kv, self._keep_tokens = config, kv, keep_tokens
        self._page_tokens = kv.block_size
        self._row_bytes = kv.blocks.shape[1]
        frame_bytes = frame_bytes_for(self._row_bytes)
        frames_per_state = max(1, -(-kv.state_bytes // frame_bytes))
        num_bytes = arena_bytes(config, kv.blocks.device.type) if num_bytes is None else num_bytes
        num_frames = num_bytes // frame_bytes
        if num_frames < frames_per_state + 1:
            raise ConfigError(
                f"hicache.size_gb is {num_bytes / 2**30:.4f} GiB, less than one page and one window state",
                hint=f"at least {(frames_per_state + 1) * frame_bytes / 2**30:.4f} GiB, or 0 for off",
            )
        self.arena = HostArena(num_frames, frame_bytes)
        self.cache = HostCache(num_frames, self._page_tokens, frames_per_state, config.state_slots)
        self._keys = KeySpace(fingerprint, kv.format_id, self._page_tokens, secret=secrets.token_bytes(32))
        self._transfer: Transfer = CpuTransfer(self.arena)
        self._staging = torch.empty(frames_per_state, frame_bytes, dtype=torch.uint8, device=kv.blocks.device)
        self._checksums = Checksums(config.audit, self.arena, self._row_bytes)
        self._planned: dict[int, _Match] = {}
        self._active: dict[int, _Match] = {}
        self._memos: dict[int, tuple[int, int, list[bytes]]] = {}
        self.counters = CacheCounters()

    # -- admission ---------------------------------------------------------------------------------------------------------

    def plan(self, seq: Sequence) -> Plan:
        """Find the deepest usable state of a sequence without blocks, and pin what it needs until `restore` or `abandon`."""
        self._release(self._planned.pop(seq.seq_id, None))
        match = _Match(seq.seq_id, self._keys.epoch)
        self._planned[seq.seq_id] = match
        if seq.request.cache_read or seq.request.cache_write:
            match.keys = self._keys_of(seq)
            match.path = self.cache.index.match(match.keys)
            match.matched_pages = len(match.path)
            self.cache.index.pin(match.path)
        if not seq.request.cache_read:
            return Plan(PlanKind.MISS, 0, Miss.BYPASS, match)
        return self._choose(seq, match)

    def _choose(self, seq: Sequence, match: _Match) -> Plan:
        """The restore point: the deepest state that leaves the tokens to recompute, or the reason why there is none."""
        index = self.cache.index
        cap = restore_cap(seq.prefill_len, self._keep_tokens, self._page_tokens)
        shortest = max(self._config.min_restore_tokens, self._page_tokens)
        if cap < shortest:
            return Plan(PlanKind.MISS, 0, Miss.SHORT, match)
        if not match.path:
            return Plan(PlanKind.MISS, 0, Miss.NO_PAGE, match)
        state = index.deepest_state(match.path, cap // self._page_tokens)
        if state == NONE or index.position[state] < shortest:
            beyond = index.deepest_state(match.path, len(match.path)) not in (NONE, state)
            return Plan(PlanKind.MISS, 0, Miss.KEEP_CAP if beyond else Miss.NO_STATE, match)
        index.pin_state(state)
        match.state = state
        return Plan(PlanKind.HIT, index.position[state], StateReason(index.reason[state]).name.lower(), match)

    def _keys_of(self, seq: Sequence) -> list[bytes]:
        """Page keys of the tokens to prefill, remembered between planning attempts."""
        memo = self._memos.get(seq.seq_id)
        if memo is not None and memo[:2] == (seq.prefill_len, self._keys.epoch):
            return memo[2]
        keys = self._keys.page_keys(seq.token_ids[: seq.prefill_len], seq.request.cache_salt)
        while len(self._memos) >= _MAX_KEY_MEMOS:
            self._memos.pop(next(iter(self._memos)))
        self._memos[seq.seq_id] = (seq.prefill_len, self._keys.epoch, keys)
        return keys

    def abandon(self, plan: Plan) -> None:
        """The scheduler cannot admit the sequence now: unpin; no counter moves."""
        if self._planned.get(plan.match.seq_id) is plan.match:
            del self._planned[plan.match.seq_id]
            self._release(plan.match)

    def restore(self, seq: Sequence, plan: Plan) -> None:
        """Enqueue the copies of a plan into the sequence's blocks and state slot, and set where its prefill starts.

        `num_computed` becomes the restored length; `cached_tokens` is set at the first admission only.
        """
        match = self._planned.pop(seq.seq_id, None)
        assert match is plan.match, f"sequence {seq.seq_id} is restored with a plan that is not its latest"
        began = time.perf_counter()
        tokens, reason = plan.restore_tokens, plan.reason
        if tokens:
            self._check_identity(seq, match.path[tokens // self._page_tokens - 1])
        if tokens and not self._intact(match, tokens):
            tokens, reason = 0, Miss.AUDIT
        if tokens:
            self._copy_in(seq, match, tokens)
            self.counters.restored(tokens // self._page_tokens * self._row_bytes + self._kv.state_bytes, time.perf_counter() - began)
        if match.state != NONE:
            self.cache.index.unpin_state(match.state)
            match.state = NONE
        self.counters.admitted(seq, tokens, reason)
        seq.num_computed = tokens
        if seq.cached_tokens is None:
            seq.cached_tokens = tokens
        if seq.request.cache_write:
            self._active[seq.seq_id] = match
        else:
            self._release(match)

    def _check_identity(self, seq: Sequence, page: int) -> None:
        """A key cannot collide; a page behind the wrong key would be a defect of ours, and its end tokens show it."""
        index, end = self.cache.index, self.cache.index.position[page]
        stored = index.first_token[page], index.last_token[page]
        asked = seq.token_ids[end - self._page_tokens], seq.token_ids[end - 1]
        assert stored == asked, f"the page at {end} begins and ends with tokens {stored}, the prompt's with {asked}"

    def _copy_in(self, seq: Sequence, match: _Match, tokens: int) -> None:
        num_pages = tokens // self._page_tokens
        self._transfer.copy_in(match.path[:num_pages], self._kv.blocks, seq.block_table[:num_pages])
        frames = self.cache.index.state_frames(match.state)
        self._transfer.copy_in(frames, self._staging, range(len(frames)))
        self._kv.load_window(seq.state_slot, tokens, self._staging.view(-1)[: self._kv.state_bytes])

    def _intact(self, match: _Match, tokens: int) -> bool:
        """Compare checksums before a restore. What fails is dropped, so that its tokens are recomputed and stored anew."""
        index = self.cache.index
        if index.has_dropped(match.path):
            return False
        if not self._checksums.enabled:
            return True
        for at in self._checksums.choose(tokens // self._page_tokens):
            if self._checksums.page(match.path[at]) != index.checksum[match.path[at]]:
                self._drop_page(match, at)
                return False
        if self._checksums.state(index.state_frames(match.state), self._kv.state_bytes) != index.checksum[match.state]:
            index.unpin_state(match.state)
            if index.ref[match.state] == 0:
                self.cache.remove_state(match.state, "audit")
            match.state = NONE
            self.counters.checksum_errors += 1
            return False
        return True

    def _drop_page(self, match: _Match, at: int) -> None:
        self.cache.index.unpin_state(match.state)
        match.state = NONE
        self.cache.drop(match.path[at])
        self.cache.unpin(match.path[at:])
        del match.path[at:]
        self.counters.checksum_errors += 1

    # -- store -------------------------------------------------------------------------------------------------------------

    def checkpoints(self, seq: Sequence) -> list[int]:
        """Positions where a chunk must end. s0 and s1 need none: the rings still hold both windows when the prefill ends."""
        return []

    def store_chunk(self, seq: Sequence, start: int, end: int) -> None:
        """Write through what a chunk [start, end) completed; its forward pass is enqueued. Ends the sequence's pins with its prefill."""
        match = self._active.get(seq.seq_id)
        if match is None:
            return
        done = end >= seq.prefill_len
        if match.epoch == self._keys.epoch and not self.cache.index.has_dropped(match.path):
            began = time.perf_counter()
            self._store_pages(seq, match, start, end)
            if done:
                self._store_states(seq, match)
            self.counters.store_seconds += time.perf_counter() - began
        if done:
            self._release(self._active.pop(seq.seq_id))

    def _store_pages(self, seq: Sequence, match: _Match, start: int, end: int) -> None:
        """Store every complete page that is absent. Also pages of earlier chunks that found no room: their blocks are still here."""
        index, size = self.cache.index, self._page_tokens
        upto = min(end // size, len(match.keys))
        present = index.match(match.keys[len(match.path) : upto])
        index.pin(present)
        match.path += present
        first = len(match.path)
        if first >= upto:
            return
        with PageReservation(self.cache, upto - first) as reservation:
            frames = reservation.frames
            until = first + len(frames)
            self._transfer.copy_out(self._kv.blocks, seq.block_table[first:until], frames)
            reservation.commit(match.path[-1] if match.path else NONE, match.keys[first:until], first, seq.token_ids)
        if self._checksums.enabled:
            for frame in frames:
                index.checksum[frame] = self._checksums.page(frame)
        match.path += frames
        skipped = upto - max(until, start // size)
        self.counters.stored(len(frames), size, self._row_bytes, skipped)

    def _store_states(self, seq: Sequence, match: _Match) -> None:
        """Keep the windows at s0 and, if frames are free, at s1."""
        for position, reason in prefill_states(seq.prefill_len, self._keep_tokens, self._page_tokens):
            if reason is StateReason.RESEND or self._config.store_tail_state:
                self._store_state(seq, match, position, reason)

    def _store_state(self, seq: Sequence, match: _Match, position: int, reason: StateReason) -> None:
        path = match.path[: position // self._page_tokens]
        if len(path) * self._page_tokens < position:
            self.counters.store_skipped["no_page"] += 1
            return
        index = self.cache.index
        existing = index.state_of[path[-1]]
        if existing != NONE:
            index.reason[existing] = min(index.reason[existing], reason)
            index.touch_state(existing)
            return
        with StateReservation(self.cache, path, evict=reason is not StateReason.TAIL) as reservation:
            if not reservation.frames:
                self.counters.store_skipped["no_state_frames"] += 1
                return
            self._kv.save_window(seq.state_slot, position, self._staging.view(-1)[: self._kv.state_bytes])
            self._transfer.copy_out(self._staging, range(len(reservation.frames)), reservation.frames)
            state = reservation.commit(reason)
        if self._checksums.enabled:
            index.checksum[state] = self._checksums.state(reservation.frames, self._kv.state_bytes)
        self.counters.states_written[reason.name.lower()] += 1
        self.counters.store_bytes += self._kv.state_bytes

    # -- end ---------------------------------------------------------------------------------------------------------------

    def finish(self, seq: Sequence) -> None:
        """Let go of everything a sequence holds, before its blocks are freed. Idempotent; on every exit path."""
        self._release(self._planned.pop(seq.seq_id, None))
        self._release(self._active.pop(seq.seq_id, None))
        self._memos.pop(seq.seq_id, None)

    def _release(self, match: _Match | None) -> None:
        if match is None:
            return
        if match.state != NONE:
            self.cache.index.unpin_state(match.state)
            match.state = NONE
        self.cache.unpin(match.path)
        match.path = []

    def reset(self) -> None:
        """Forget every stored prefix in O(1). Old entries leave by recency; running sequences keep what they restored."""
        self._keys.reset()
        self._memos.clear()

    # -- what people look at -----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, numbers only: the leaves of `prefix_cache` in the JSON metrics and the host cache's own."""
        pool, index, size = self.cache.pool, self.cache.index, self._page_tokens
        num_pages = pool.count(Owner.PAGE)
        leaves = self.counters.leaves()
        leaves["evictions_total"] = self.cache.evicted_pages
        leaves["evicted_tokens_total"] = self.cache.evicted_pages * size
        leaves["evicted_frames_total"] = dict(self.cache.evicted_frames)
        leaves["tiers"]["host"]["tokens_used"] = num_pages * size
        leaves["frames"] = {"free": pool.num_free, "page": num_pages, "state": pool.count(Owner.STATE)}
        leaves["states"] = index.num_states
        leaves["pinned_sequences"] = len(self._planned) + len(self._active)
        leaves["arena_bytes"] = self.arena.num_bytes
        leaves["frame_bytes"] = self.arena.frame_bytes
        return leaves

    def inject_fault(self, kind: str, *, target: str = "page", page: int = -1, byte: int | None = None, count: int = 1) -> dict[str, Any]:
        """Change stored bytes on purpose, to show that the proof notices. For servers started with fault injection.

        The victim is where a follow-up would resume: the most recent `resend` state. target: "page" or "state". page: index on that
        state's path, from the root, or from the restore point when negative. byte: offset of the first flipped byte; without one,
        `count` exponent bytes spread over the row.

        Raises:
            ConfigError: nothing is stored yet, or an argument is out of range.
        """
        if kind != "flip":
            raise ConfigError(f"fault {kind!r} is unknown", hint="choose one of: flip")
        index = self.cache.index
        state = index.newest_state(StateReason.RESEND)
        if state == NONE:
            raise ConfigError("no window state is stored yet", hint="send a prompt of several pages first")
        path = index.path_to(index.parent[state])
        if target not in ("page", "state") or not -len(path) <= page < len(path):
            raise ConfigError(
                f"fault target {target!r}, page {page}", hint=f"target page or state, page in [{-len(path)}, {len(path) - 1}]"
            )
        frame = path[page] if target == "page" else state
        length = self._row_bytes if target == "page" else min(self._kv.state_bytes, self.arena.frame_bytes)
        if count < 1 or not 0 <= (byte or 0) < length or count > length // 4:
            raise ConfigError(f"byte {byte}, count {count} do not fit {length} bytes", hint=f"count in [1, {length // 4}]")
        step = max(4, align_down(length // count, 4))
        offsets = [EXPONENT_BYTE + i * step for i in range(count)] if byte is None else [(byte + i * step) % length for i in range(count)]
        flips = flip_bytes(self.arena, frame, offsets)
        return {
            "kind": kind,
            "target": target,
            "frame": frame,
            "page": page % len(path),
            "position": index.position[frame],
            "flips": [asdict(flip) for flip in flips],
        }


def build_prefix_cache(config: HiCacheConfig, kv: KVCache, limits: Limits, ranks: int = 1) -> PrefixCache | None:
    """The host cache of one rank, or None when it is off.

    `auto` means off when decoder truncation is off: the cache restores no decoder windows, only recomputing the last tokens does.

    Raises:
        ConfigError: a size above 0 without decoder truncation.
    """
    if not config.enabled:
        return None
    if limits.keep_tokens <= 0:
        if config.size_gb == "auto":
            return None
        raise ConfigError(
            f"hicache.size_gb is {config.size_gb} but decoder truncation is off (--yoco-keep-tokens 0)",
            hint="--hicache-size-gb 0, or --yoco-keep-tokens 140",
        )
    num_bytes = arena_bytes(config, kv.blocks.device.type, ranks)
    return PrefixCache(config, kv, limits.fingerprint, limits.keep_tokens, num_bytes=num_bytes)
