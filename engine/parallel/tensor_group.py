"""Collectives on tensors between ranks that step together: gloo for CPU tensors, NCCL for GPU tensors, one interface."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed import GroupError, PeerWaits, first_line

# Newer releases of torch have renamed it.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
Piece = tuple[Tensor, int]  # a contiguous tensor, and the rank that it goes to or comes from


class TensorGroup(Protocol):
    """Ranks 0 .. size-1 of a group; every rank makes the same calls in the same order. Tensors are contiguous, of equal shape on all ranks.

    Collectives of CPU tensors return when the result is there; those of GPU tensors are ordered on the current stream and never wait on
    the host. All raise GroupError when a peer is gone; for GPU tensors see `TorchTensors`.
    """

    rank: int
    size: int

    def max(self, values: list[int]) -> list[int]:
        """Element-wise maximum of host integers, on the host."""

    def gather_ints(self, mine: list[int]) -> list[list[int]]:
        """What every rank gave, in rank order, on the host. Any number of integers below 2**63 in magnitude."""

    def all_gather(self, out: Tensor, mine: Tensor) -> None:
        """out [size, *mine.shape]: what every rank gave, in rank order."""

    def all_to_all(self, out: Tensor, mine: Tensor) -> None:
        """out[i] of rank j becomes mine[j] of rank i. Both [size, ...]."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place. The order of the sum is the library's: use it for integers."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` with that of rank `source`."""

    def swap(self, sends: list[Piece], receives: list[Piece]) -> None:
        """Point-to-point copies, all at once. Between two ranks they match in list order."""


class TorchTensors:
    """A `TensorGroup` over torch.distributed. It ends with the default group, which its owner destroys.

    A dead or hung peer is found in a gloo collective: at once when its connection breaks, else after `timeout_s`. NCCL kernels wait on
    the device instead; torch's watchdog ends the process after `timeout_s`, unless a supervisor has ended it before. It does not see
    those that a recorded step replays: there the peers' next vote and the supervisor are what ends a wait.
    """

    def __init__(self, host: Any, device: Any, rank: int, size: int, timeout_s: float, waits: PeerWaits) -> None:
        """host: a gloo process group; device: the one for tensors, the same as `host` on CPUs. waits: of the group that it is a part of."""
        self.rank, self.size, self.timeout_s, self._waits = rank, size, timeout_s, waits
        self._host, self._device = host, device

    def max(self, values: list[int]) -> list[int]:
        packed = torch.tensor(values, dtype=torch.int64)
        self._guard(dist.all_reduce, packed, op=dist.ReduceOp.MAX, group=self._host)
        return packed.tolist()

    def gather_ints(self, mine: list[int]) -> list[list[int]]:
        [longest] = self.max([len(mine)])
        packed = torch.zeros(longest + 1, dtype=torch.int64)
        packed[0] = len(mine)
        packed[1 : len(mine) + 1] = torch.tensor(mine, dtype=torch.int64)
        out = torch.empty(self.size * len(packed), dtype=torch.int64)
        self._guard(_all_gather, out, packed, group=self._host)
        return [row[1 : row[0] + 1] for row in out.view(self.size, -1).tolist()]

    def all_gather(self, out: Tensor, mine: Tensor) -> None:
        self._guard(_all_gather, _bytes(out), _bytes(mine), group=self._device)

    def all_to_all(self, out: Tensor, mine: Tensor) -> None:
        self._guard(dist.all_to_all_single, _bytes(out), _bytes(mine), group=self._device)

    def all_reduce(self, tensor: Tensor) -> None:
        self._guard(dist.all_reduce, tensor, group=self._device)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._guard(dist.broadcast, _bytes(tensor), group=self._device, group_src=source)

    def swap(self, sends: list[Piece], receives: list[Piece]) -> None:
        group = self._device
        copies = [dist.P2POp(dist.isend, _bytes(tensor), group=group, group_peer=peer) for tensor, peer in sends]
        copies += [dist.P2POp(dist.irecv, _bytes(tensor), group=group, group_peer=peer) for tensor, peer in receives]
        if not copies:
            return
        for work in self._guard(dist.batch_isend_irecv, copies):
            self._guard(work.wait)

    def _guard(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with self._waits:
                return action(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            raise GroupError(
                f"rank {self.rank} of {self.size} lost a peer in {action.__name__}: {first_line(error)}",
                hint=f"a rank died or did not answer for {self.timeout_s:g} s; see the other ranks' logs, then restart the group",
            ) from error


class SoloTensors:
    """A group of one: every collective is a copy."""

    rank = 0
    size = 1

    def max(self, values: list[int]) -> list[int]:
        return values

    def gather_ints(self, mine: list[int]) -> list[list[int]]:
        return [mine]

    def all_gather(self, out: Tensor, mine: Tensor) -> None:
        out.copy_(mine.view(out.shape))

    def all_to_all(self, out: Tensor, mine: Tensor) -> None:
        out.copy_(mine)

    def all_reduce(self, tensor: Tensor) -> None:
        return None

    def broadcast(self, tensor: Tensor, source: int) -> None:
        assert source == 0, f"rank {source} of a group of one"

    def swap(self, sends: list[Piece], receives: list[Piece]) -> None:
        assert sends + receives == [], "copies to other ranks in a group of one"


def split_group(rank: int, world: int, size: int, device: str, timeout_s: float, waits: PeerWaits) -> TorchTensors:
    """This rank's group of `size` consecutive ranks. All `world` ranks of the default process group call it together.

    device: "cpu", or "cuda" for tensors on the current GPU. Connections are made here rather than in the first step.

    Raises:
        GroupError: a peer is gone, or the libraries cannot connect.
    """
    assert world % size == 0, f"{world} ranks do not divide into groups of {size}"
    timeout = timedelta(seconds=timeout_s)
    mine: TorchTensors | None = None
    for first in range(0, world, size):
        ranks = list(range(first, first + size))
        try:
            host = dist.new_group(ranks, timeout=timeout, backend="gloo")
            tensors = dist.new_group(ranks, timeout=timeout, backend="nccl") if device == "cuda" else host
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"rank {rank} of {world} could not make its group of {size}: {first_line(error)}") from error
        if rank in ranks:
            mine = TorchTensors(host, tensors, rank - first, size, timeout_s, waits)
    assert mine is not None
    mine.max([0])
    mine.all_reduce(torch.zeros(1, device=device))
    return mine


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: moving data needs no support for its type."""
    assert tensor.is_contiguous(), "collectives need contiguous tensors"
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
