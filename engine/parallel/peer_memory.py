"""Memory on the GPUs of one host that the ranks of a group write to for each other: made, shared and given back by all of them together."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.distributed import GroupError
from engine.errors import ConfigError
from engine.ops.cuda.library import PeerCalls, peer_calls
from engine.ops.peer_rows import BRING_HOME, MOST_CHOICES, MOST_RANKS, SEND_ROWS, PeerLayout, PeerMemory
from engine.parallel.tensor_group import TensorGroup

log = logging.getLogger(__name__)

# Rows of a rank beyond which a step's rows travel by collectives, whose bandwidth then counts more than what they take to start. Decode
# steps have fewer; at the released sizes it makes 5 MiB per rank of the group, for rows and results together.
MOST_ROWS = 256
REMEDY = "--set engine.expert_exchange=gather"
_HANDLE_BYTES, _HOST = 64, Path("/proc/sys/kernel/random/boot_id")


class Peers(Protocol):
    """Open memory of all ranks of a group."""

    @property
    def memory(self) -> PeerMemory: ...

    def close(self) -> None:
        """Give it back. All ranks call it together, when no step runs or will."""


def check_peers(ranks: int, columns: int, item_bytes: int, chosen: int, device: str) -> None:
    """Raises: ConfigError where rows cannot travel through the memory of peers, whatever the devices can do."""
    if device != "cuda":
        raise ConfigError(f"engine.expert_exchange is peers, and there is no peer memory on device {device}", hint=REMEDY)
    if {SEND_ROWS.backend, BRING_HOME.backend} != {"cuda"}:
        why = "; ".join(SEND_ROWS.missing()) or f"engine.ops takes {SEND_ROWS.backend} and {BRING_HOME.backend}"
        raise ConfigError(f"engine.expert_exchange is peers, which needs kernels for send_rows and bring_home: {why}", hint=REMEDY)
    if ranks > MOST_RANKS:
        raise ConfigError(f"engine.expert_exchange is peers and engine.ep is {ranks}", hint=f"up to {MOST_RANKS} ranks, or {REMEDY}")
    if columns * item_bytes % 16 or chosen > MOST_CHOICES:
        raise ConfigError(
            f"engine.expert_exchange is peers, and rows of this model have {columns * item_bytes} bytes and {chosen} experts",
            hint=f"it takes rows of whole 16 bytes and up to {MOST_CHOICES} experts; {REMEDY}",
        )


class OpenPeers:
    """This rank's memory, and that of its peers as it is mapped here. All ranks of the group make it together.

    Raises:
        ConfigError: the ranks are on several hosts, or the devices of two cannot reach each other.
        BuildError: no nvcc, or its first error.
        GroupError: a peer is gone.
    """

    def __init__(self, group: TensorGroup, layout: PeerLayout, limit_s: float, calls: PeerCalls | None = None) -> None:
        """limit_s: longest wait for a peer, on the device. calls: the CUDA runtime's, of the current device where none are given."""
        self._group, self._device = group, torch.cuda.current_device()
        self._calls = peer_calls(self._device) if calls is None else calls
        self._opened: list[int] = []
        self._own = ctypes.c_void_p()
        addresses = self._open(layout.num_bytes)
        assert self._own.value is not None
        self._memory: PeerMemory | None = PeerMemory(group.rank, addresses, _tensor_at(self._own.value, layout.num_bytes), layout, limit_s)
        log.info("%.0f MiB for rows of peers; the devices of %d ranks reach each other", layout.num_bytes / 2**20, group.size)

    @property
    def memory(self) -> PeerMemory:
        assert self._memory is not None, "the memory of peers was given back"
        return self._memory

    def _open(self, num_bytes: int) -> tuple[int, ...]:
        """Addresses by rank. Every failure is told to all, who then give up with this one."""
        handle = ctypes.create_string_buffer(_HANDLE_BYTES)
        status = self._calls.allocate(num_bytes, ctypes.byref(self._own), handle)
        failure = f"{num_bytes / 2**20:.0f} MiB cannot be shared: {self._text(status)}" if status else ""
        told = self._group.gather_ints([*self._host(), *handle.raw])
        hosts = [ints[:-_HANDLE_BYTES] for ints in told]
        others = [rank for rank, host in enumerate(hosts) if host != hosts[self._group.rank]]
        if others and not failure:
            failure = f"ranks {others} of its group are on another host"
        self._agree(failure)
        addresses = []
        for rank, ints in enumerate(told):
            place = ctypes.c_void_p(self._own.value)
            if rank != self._group.rank:
                status = self._calls.open(bytes(ints[-_HANDLE_BYTES:]), ctypes.byref(place))
                if status:
                    failure = failure or f"its device cannot reach that of rank {rank} of its group: {self._text(status)}"
                    continue
                self._opened.append(place.value or 0)
            addresses.append(place.value or 0)
        self._agree(failure)
        return tuple(addresses)

    @staticmethod
    def _host() -> list[int]:
        """The same numbers for all processes of a host, other ones elsewhere."""
        return list(_HOST.read_bytes().strip())

    def _agree(self, failure: str) -> None:
        """Raises ConfigError on all ranks when one cannot take part. Nothing has been written to anybody's memory yet."""
        [somewhere] = self._group.max([int(bool(failure))])
        if not somewhere:
            return
        self._unmap()
        self._group.max([0])  # nobody has it mapped
        self._release()
        raise ConfigError(
            f"engine.expert_exchange is peers, and rank {self._group.rank}: {failure}"
            if failure
            else "engine.expert_exchange is peers, which another rank of this group cannot take part in; see its log",
            hint=f"it needs ranks of one host whose GPUs reach each other's memory; {REMEDY}",
        )

    def close(self) -> None:
        """Behind the recordings that write to it. When a peer is gone the memory stays until this process ends."""
        if self._memory is None:
            return
        self._memory = None
        torch.cuda.synchronize(self._device)
        try:
            self._group.max([0])  # nobody writes any more
            self._unmap()
            self._group.max([0])  # nobody has it mapped
        except GroupError as error:
            log.warning("memory of peers is not given back: %s", error)
            return
        self._release()

    def _unmap(self) -> None:
        for address in self._opened:
            self._check(self._calls.close(address), "unmapping the memory of a peer")
        self._opened.clear()

    def _release(self) -> None:
        if self._own.value is not None:
            self._check(self._calls.free(self._own), "freeing the memory of peers")
            self._own = ctypes.c_void_p()

    def _check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what}: {self._text(status)}")

    def _text(self, status: int) -> str:
        return f"{self._calls.text(status).decode()} (CUDA error {status})"


class _Array:
    """What torch needs to see device memory that it did not allocate."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _tensor_at(address: int, num_bytes: int) -> Tensor:
    """[num_bytes] uint8 on the current device, owned by somebody else."""
    return torch.as_tensor(_Array(address, num_bytes), device="cuda")
