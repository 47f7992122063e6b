"""Memory of peers for ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from engine.ops.peer_rows import PeerLayout, PeerMemory
from engine.parallel.tensor_group import TensorGroup

WAIT_S = 20.0


class ThreadPeers:
    """Made as `OpenPeers`. Their owners must outlive the last step of all ranks."""

    def __init__(self, group: TensorGroup, layout: PeerLayout, limit_s: float = WAIT_S) -> None:
        self._group = group
        own = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        addresses = tuple(address for [address] in group.gather_ints([own.data_ptr()]))
        self.memory = PeerMemory(group.rank, addresses, own, layout, limit_s)
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self._group.max([0])
        self.closed = True


@contextmanager
def peers_are_threads() -> Iterator[None]:
    """Runners that are made meanwhile on CPUs may take the route `peers`."""
    setup = "engine.parallel.expert_setup"
    with patch(f"{setup}.OpenPeers", ThreadPeers), patch(f"{setup}.check_peers", lambda *_: None):
        yield
