"""Groups of ranks that step together, and the one host collective that keeps them together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from engine.errors import MachineError

if TYPE_CHECKING:
    from engine.parallel.peer_watch import PeerWatch
    from engine.parallel.tensor_group import TensorGroup


WATCH_TIMEOUT_S = 5.0  # longest wait for an answer of the host that serves the rendezvous


class GroupError(MachineError):
    """A peer died, hung or cannot be reached. The rank must give up: lockstep cannot go on without it."""


class PeerWaits:
    """Whether this rank waits for others in a host collective just now. A context for such calls, of several threads where steps are
    computed beside the scheduler; any thread reads `now`."""

    def __init__(self) -> None:
        self._lock, self._calls = threading.Lock(), 0

    @property
    def now(self) -> bool:
        return self._calls > 0

    def __enter__(self) -> None:
        with self._lock:
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1


class Group(Protocol):
    """Ranks 0 .. size-1 in lockstep: every rank makes the same calls in the same order."""

    rank: int
    size: int
    waits: PeerWaits

    def max(self, values: list[int]) -> list[int]:
        """Element-wise maximum over the group; values fit in 63 bits.

        Raises:
            GroupError: a peer is gone or did not answer in time.
        """

    def split(self, size: int, device: str) -> TensorGroup:
        """Collectives on tensors of `device` among `size` consecutive ranks, this one included. All ranks call it together."""

    def close(self) -> None: ...


class SoloGroup:
    """A group of one; nothing to wait for."""

    rank = 0
    size = 1
    waits = PeerWaits()

    def max(self, values: list[int]) -> list[int]:
        return values

    def split(self, size: int, device: str) -> TensorGroup:
        from engine.parallel.tensor_group import SoloTensors

        assert size == 1, f"a group of one has no {size} ranks"
        return SoloTensors()

    def close(self) -> None:
        return None


class GlooGroup:
    """Ranks in separate processes over gloo. Rendezvous by a shared file, or by a store at host:port that rank 0 serves.

    A dead peer closes its connection and is noticed at once; a peer that hangs is noticed after `timeout_s`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        init_file: str | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        timeout_s: float = 45.0,
    ) -> None:
        """Blocks until all ranks have arrived.

        Raises:
            GroupError: a peer does not arrive within `timeout_s`.
        """
        import torch.distributed as dist  # here, so that the protocol above is usable without loading torch

        assert (init_file is None) != (port is None), "name either a rendezvous file or a port"
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.waits = PeerWaits()
        self._open = False
        self._watch: PeerWatch | None = None
        self._store_at = (host, port) if port is not None else None
        timeout = timedelta(seconds=timeout_s)
        url = f"file://{init_file}" if init_file is not None else f"tcp://{host}:{port}"
        try:
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=timeout)
            self._open = True
            self.max([0])  # connections are made lazily: fail here rather than in the first step
        except (RuntimeError, ValueError) as error:
            raise GroupError(
                f"rank {rank} of {size} could not join its group at {url}: {first_line(error)}",
                hint=f"all ranks must start within {timeout_s:g} s and use the same address",
            ) from error

    def max(self, values: list[int]) -> list[int]:
        import torch
        import torch.distributed as dist

        packed = torch.tensor(values, dtype=torch.int64)
        try:
            with self.waits:
                dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        except (RuntimeError, ValueError) as error:
            raise GroupError(
                f"rank {self.rank} of {self.size} lost a peer: {first_line(error)}",
                hint=f"a rank died or did not answer for {self.timeout_s:g} s; see the other ranks' logs, then restart the group",
            ) from error
        return packed.tolist()

    def split(self, size: int, device: str) -> TensorGroup:
        from engine.parallel.tensor_group import split_group

        return split_group(self.rank, self.size, size, device, self.timeout_s, self.waits)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """From now on call `on_lost`, from another thread, when a rank vanishes without closing its connections: its host is gone.
        All ranks call it together; only for groups that meet at a port.

        Raises:
            GroupError: the host of rank 0 is gone already.
        """
        import torch.distributed as dist

        from engine.parallel.peer_watch import PeerWatch

        assert self._store_at is not None, "ranks that meet at a file are on one host"
        host, port = self._store_at
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=WATCH_TIMEOUT_S))
            self._watch = PeerWatch(store, self.rank, self.size, on_lost)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"rank {self.rank} of {self.size} lost the rendezvous at {host}:{port}: {first_line(error)}") from error
        self.max([0])  # all have beaten
        self._watch.start()

    def close(self) -> None:
        """Leave the group. Calling it twice is harmless."""
        if self._watch is not None:
            self._watch.close()
        if self._open:
            import torch.distributed as dist

            self._open = False
            dist.destroy_process_group()


def first_line(error: Exception) -> str:
    """What torch says, without the stack of its C++ side. Empty for an error without a message."""
    return str(error).strip().split("\n", 1)[0]
