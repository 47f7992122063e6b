"""Kernels that cannot serve a shape say so once."""

from __future__ import annotations

import logging
from functools import cache

log = logging.getLogger(__name__)


@cache
def warn_once(op: str, reason: str) -> None:
    """Log that `op` runs its reference although a kernel is selected."""
    log.warning("op %s falls back to its reference: %s", op, reason)
