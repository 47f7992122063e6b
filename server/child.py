"""First steps of every child process: tie it to its supervisor, ignore the terminal's signals, prepare to dump its stacks."""

from __future__ import annotations

import argparse
import faulthandler
import signal
from collections.abc import Sequence
from pathlib import Path

from server import parent_death


def enter(program: str, numbers: Sequence[str], arguments: list[str]) -> argparse.Namespace:
    """The first call of the front and of every rank: the path of a launch file, --parent, and an integer option for each of `numbers`.

    SIGUSR1 writes the stacks of all threads to standard error; the supervisor asks for them before it kills a process that hangs.
    """
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("launch", type=Path)
    for name in ("parent", *numbers):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args(arguments)
    parent_death.arm(options.parent)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for number in (signal.SIGINT, signal.SIGHUP):  # a Ctrl-C reaches the whole group; the supervisor alone decides what it means
        signal.signal(number, signal.SIG_IGN)
    return options
