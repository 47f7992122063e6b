"""Rows on their way to the ranks that hold their experts and back, through memory that the ranks of one host write to for each other.

A trip is `send_rows`, the experts, then `bring_sums` or `bring_parts`. All ranks of a group make the same trips with the same capacity. One
copy of every buffer is enough: nobody writes to one before its reader has answered (csrc/kernels/peer_rows.cu says why).
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.exchange_rows import ADD_RANK_SUMS, LOCAL_CHOICES, PACK_ROWS, row_words, words_of
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

MOST_RANKS, MOST_BLOCKS = 8, 32  # as in csrc/include/peer.cuh
MOST_CHOICES = 32  # one per lane of a warp
_ALIGNED = 256  # bytes: where the parts of a rank's memory begin
_POLL_S = 2e-5


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """Where things are in a rank's memory, in bytes: flags of rows, flags of results, a counter of trips, rows, results.

    ranks: of the group. rows: the most that a rank sends in one trip. row_bytes: of a row as it travels. home_bytes: of all ranks' results
    for one row.
    """

    ranks: int
    rows: int
    row_bytes: int
    home_bytes: int

    @staticmethod
    def of(ranks: int, rows: int, columns: int, item_bytes: int, chosen: int, exact: bool) -> PeerLayout:
        """For rows of `columns` values and `chosen` experts. exact: every choice's term comes home, in fp32 at most, instead of every
        rank's sum."""
        home = chosen * columns * 4 if exact else ranks * columns * item_bytes
        return PeerLayout(ranks, rows, 4 * words_of(columns * item_bytes // 4, chosen), home)

    @property
    def returned(self) -> int:
        return self.ranks * MOST_BLOCKS * 8

    @property
    def counter(self) -> int:
        return 2 * self.returned

    @property
    def arrivals(self) -> int:
        return self.counter + _ALIGNED

    @property
    def home(self) -> int:
        return self.arrivals + -(-self.ranks * self.rows * self.row_bytes // _ALIGNED) * _ALIGNED

    @property
    def num_bytes(self) -> int:
        return self.home + self.rows * self.home_bytes


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The memory of all ranks of a group as it is mapped here, zero at first.

    addresses: by rank. own: [layout.num_bytes] uint8, that of `rank`. limit_s: a wait for a peer that takes longer ends with an error,
    on GPUs one of the device.
    """

    rank: int
    addresses: tuple[int, ...]
    own: Tensor
    layout: PeerLayout
    limit_s: float

    def section(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A part of this rank's memory from byte `first` on."""
        return _section(self.own, first, shape, dtype)


@dataclass(frozen=True, slots=True)
class Sent:
    """What a trip brought here, and what it left.

    rows: [ranks * capacity, C], valid until the results have been brought home; those without a choice here are of no meaning. slots:
    [ranks * capacity, K] int64, weights: fp32, as `local_choices` finds them. wanted: [T] int32, bit r for a rank r that computes
    something for this rank's row.
    """

    rows: Tensor
    slots: Tensor
    weights: Tensor
    wanted: Tensor


def send_rows(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    slots: Tensor,
    copies: Tensor,
    real: Tensor | None,
    capacity: int,
    slots_per_rank: int,
    memory: PeerMemory,
) -> Sent:
    """Begin a trip: this rank's rows to the ranks that hold their experts, and what came from all ranks.

    x: [T, C], C values in whole 16 bytes. ids: [T, K] int64, weights: [T, K] fp32. slots, copies, real: as in `pack_rows`, which takes this
    rank's number as its turn. capacity: the most rows of any rank, at least T and at least 1, the same on all. slots_per_rank: physical
    slots of a rank.
    """
    (count, columns), chosen, layout = x.shape, ids.shape[1], memory.layout
    fits = ids.shape == weights.shape and len(ids) == count <= capacity and 0 < capacity <= layout.rows and chosen <= MOST_CHOICES
    whole = columns * x.element_size() % 16 == 0 and 4 * row_words(x, chosen)[1] == layout.row_bytes
    check(fits and whole and weights.dtype == torch.float32, "send_rows", x=x, ids=ids, weights=weights, slots=slots)
    sent: Sent = SEND_ROWS(x, ids, weights, slots, copies, real, capacity, slots_per_rank, memory)
    return sent


def bring_sums(sums: Tensor, sent: Sent, shared: Tensor | None, memory: PeerMemory) -> Tensor | None:
    """End a trip: the ranks' sums of this rank's rows, added up as `add_rank_sums` does. None without rows, which are those of `shared`.

    sums: [ranks * capacity, C], what was computed for `sent.rows`. shared: [T, C], bf16 or fp32, as sums.
    """
    fits = len(sums) == len(sent.slots) and (shared is None or (shared.dtype == sums.dtype and len(shared) == len(sent.wanted)))
    whole = sums.shape[1] * sums.element_size() % 16 == 0 and sums.dtype in (torch.bfloat16, torch.float32)
    check(fits and whole, "bring_home", sums=sums, slots=sent.slots, wanted=sent.wanted)
    assert memory.layout.ranks * sums.shape[1] * sums.element_size() <= memory.layout.home_bytes, "the memory was made for something else"
    total: Tensor | None = BRING_HOME(sums, sent, shared, memory)
    return total


def bring_parts(parts: Tensor, sent: Sent, memory: PeerMemory) -> Tensor:
    """End a trip: [T, K, C], every choice's term from the rank that computed it, valid until the next trip. Those of no choice are of no
    meaning.

    parts: [ranks * capacity, K, C], bf16 or fp32, what was computed for `sent.rows`.
    """
    count, chosen, columns = parts.shape
    whole = columns * parts.element_size() % 16 == 0 and (count, chosen) == sent.slots.shape
    check(whole, "bring_home", parts=parts, slots=sent.slots)
    assert chosen * columns * parts.element_size() <= memory.layout.home_bytes, "the memory was made for something else"
    BRING_HOME(parts, sent, None, memory)
    return memory.section(memory.layout.home, (len(sent.wanted), chosen, columns), parts.dtype)


# ---- the definition: ranks are threads, or processes that share memory


def _section(memory: Tensor, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return memory[first : first + count].view(dtype).view(shape)


def _box(memory: PeerMemory, rank: int) -> Tensor:
    """A rank's memory as a tensor."""
    return torch.frombuffer((ctypes.c_uint8 * memory.layout.num_bytes).from_address(memory.addresses[rank]), dtype=torch.uint8)


def _flags(box: Tensor, first: int, ranks: int) -> Tensor:
    return _section(box, first, (ranks, MOST_BLOCKS), torch.int64)


def _meet(memory: PeerMemory, first: int, trip: int) -> None:
    """Tell all ranks that this one has written what it had for them, and wait until all have."""
    ranks, deadline = memory.layout.ranks, time.monotonic() + memory.limit_s
    for rank in range(ranks):
        _flags(_box(memory, rank), first, ranks)[memory.rank, 0] = trip
    mine = _flags(memory.own, first, ranks)[:, 0]
    while any(flag < trip for flag in mine.tolist()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {memory.rank} waited {memory.limit_s:g} s for a peer in trip {trip}, flags {mine.tolist()}")
        time.sleep(_POLL_S)


def _send(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    slots: Tensor,
    copies: Tensor,
    real: Tensor | None,
    capacity: int,
    slots_per_rank: int,
    memory: PeerMemory,
) -> Sent:
    rank, layout, (count, chosen) = memory.rank, memory.layout, ids.shape
    counter = memory.section(layout.counter, (1,), torch.int64)
    trip = int(counter) + 1
    width, words = row_words(x, chosen)
    packed = PACK_ROWS.reference(x, ids, weights, slots, copies, real, rank, capacity)
    owners = packed[:count, width : width + chosen].div(slots_per_rank, rounding_mode="floor")
    wanted = torch.zeros(count, dtype=torch.int32)
    for peer in range(layout.ranks):
        needed = (owners == peer).any(1)
        wanted += needed.int() << peer
        arrivals = _section(_box(memory, peer), layout.arrivals, (layout.ranks, capacity, words), torch.int32)[rank]
        arrivals[:, width:] = packed[:, width:]
        arrivals[:count, :width][needed] = packed[:count, :width][needed]
    _meet(memory, 0, trip)
    counter[0] = trip
    arrived = memory.section(layout.arrivals, (layout.ranks * capacity, words), torch.int32)
    local, shares = LOCAL_CHOICES.reference(arrived, width, chosen, rank * slots_per_rank, slots_per_rank)
    return Sent(arrived[:, :width].view(x.dtype), local, shares, wanted)


def _home(computed: Tensor, sent: Sent, shared: Tensor | None, memory: PeerMemory) -> Tensor | None:
    layout, ranks = memory.layout, memory.layout.ranks
    capacity, each = len(computed) // ranks, computed.shape[1:]
    by_home, known = computed.unflatten(0, (ranks, capacity)), (sent.slots >= 0).unflatten(0, (ranks, capacity))
    for home in range(ranks):
        if computed.ndim == 3:
            place = _section(_box(memory, home), layout.home, (capacity, *each), computed.dtype)
            place[known[home]] = by_home[home][known[home]]
        else:
            place = _section(_box(memory, home), layout.home, (ranks, capacity, *each), computed.dtype)[memory.rank]
            place[known[home].any(1)] = by_home[home][known[home].any(1)]
    _meet(memory, layout.returned, int(memory.section(layout.counter, (1,), torch.int64)))
    if shared is None:
        return None
    returned = memory.section(layout.home, (ranks, capacity, *each), computed.dtype)[:, : len(shared)]
    wanted = (sent.wanted >> torch.arange(ranks)[:, None]) & 1
    total: Tensor = ADD_RANK_SUMS.reference(torch.where(wanted[..., None] == 1, returned, 0), shared)
    return total


_KERNELS = "engine.ops.cuda.peer_rows"
SEND_ROWS = Op("send_rows", reference=_send, cuda=f"{_KERNELS}:send", tolerance=Tolerance())
BRING_HOME = Op("bring_home", reference=_home, cuda=f"{_KERNELS}:home", tolerance=Tolerance())
