"""The console script. The first question, `dix --help`, is answered from a recorded page, before anything is imported to think about it."""

from __future__ import annotations

import os
import sys

PAGE = os.path.join(os.path.dirname(__file__), "help.txt")


def run() -> None:
    """Exit with the command's code."""
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
