"""Whether kernels run in Triton's interpreter: on the CPU, without inline assembly and without products of bf16 numbers."""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
