"""What a CUDA device can do."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def has_clusters(device: torch.device) -> bool:
    """Whether thread blocks can share their memory: from SM90 on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one thread block may ask for."""
    properties: Any = torch.cuda.get_device_properties(device)  # its stubs lack this one
    return int(properties.shared_memory_per_block_optin)
