"""Scripts that start themselves once per rank: their options, and ranks that end together."""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

from engine.parallel.expert_setup import build_exchange


def rank_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """out and --device are the user's; the others say to a rank who it is, which model it runs and where the ranks meet."""
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--model", default="")
    parser.add_argument("--meeting", default="")
    return parser


def rank_command(module: str, options: argparse.Namespace, rank: int, model: Path, meeting: Path) -> list[str]:
    """What starts a rank with these options."""
    command = [sys.executable, "-m", module, str(options.out), "--device", options.device]
    return [*command, "--rank", str(rank), "--model", str(model), "--meeting", str(meeting)]


# NVLink multicast stays off: communicators of several processes hang in it where the fabric does not grant it.
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "GLOO_SOCKET_IFNAME": "lo"}
POLL_S, GRACE_S = 0.1, 2.0


def run_together(commands: Sequence[Sequence[str]], *, own_gpus: bool = False, until: float = math.inf) -> list[int]:
    """Run the ranks and return their exit codes. own_gpus: each sees only the GPU of its number. until: when they are ended, by
    `time.monotonic`.

    When one fails, or this process is told to end, the others are ended too: they would wait for it and keep their GPUs.
    """
    told: list[int] = []  # not an exception: it could fall between the start of a rank and its entry here
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            devices = {"CUDA_VISIBLE_DEVICES": str(number)} if own_gpus else {}
            ranks.append(subprocess.Popen(command, env={**os.environ, **QUIET, **devices}))
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes) and not told and time.monotonic() < until:
            time.sleep(POLL_S)
        deadline = min(until, time.monotonic() + GRACE_S)  # a cause and its echo come close together; both codes tell
        while None in [rank.poll() for rank in ranks] and not told and time.monotonic() < deadline:
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.kill()
        ended = [rank.wait() for rank in ranks]
        signal.signal(signal.SIGTERM, before)
    if told:
        sys.exit(128 + told[0])
    return ended


def exchanging_alone() -> AbstractContextManager[object]:
    """Runners made meanwhile exchange rows between ranks even when there is one: every collective runs, in a group of one."""
    return patch("engine.model_runner.make_exchange", build_exchange)
