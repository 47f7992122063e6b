"""Options of scripts that start themselves once per rank."""

from __future__ import annotations

import argparse
import sys
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


def exchanging_alone() -> AbstractContextManager[object]:
    """Runners made meanwhile exchange rows between ranks even when there is one: every collective runs, in a group of one."""
    return patch("engine.model_runner.make_exchange", build_exchange)
