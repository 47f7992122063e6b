"""What a CUDA device can do."""

from __future__ import annotations

from functools import cache

import torch


@cache
def has_clusters(device: torch.device) -> bool:
    """Whether thread blocks can share their memory: from SM90 on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
