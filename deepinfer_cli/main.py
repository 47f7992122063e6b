"""The console script. Plain `dix --help` is answered from a recorded page before anything is imported."""

from __future__ import annotations

import os
import sys

PAGE = os.path.join(os.path.dirname(__file__), "help.txt")


def fill_standard_streams() -> None:
    """A caller may have closed any of the three, as services and `<&-` do: the null device takes its place, before a file of ours does."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115


def run() -> None:
    """Exit with the command's code."""
    fill_standard_streams()
    if sys.argv[1:] in (["--help"], ["-h"]) and "_DIX_COMPLETE" not in os.environ:
        try:
            with open(PAGE, encoding="utf-8") as page:
                sys.stdout.write(page.read())
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(main(None))


def main(arguments: list[str] | None = None) -> int:
    """Run one command line, `sys.argv` when none is given, and return its exit code."""
    from deepinfer_cli.app import main as answer

    return answer(arguments)
