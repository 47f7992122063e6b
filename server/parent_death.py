"""Tie a child to its parent: the kernel signals the child when the parent's forking thread ends."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def arm(expected_parent: int, number: int = signal.SIGKILL) -> None:
    """Ask for a signal at the parent's death, and exit at once when the parent is already gone.

    Call it in the first lines of a child. The signal belongs to the parent *thread*, so the parent forks from its main thread only.
    Raises:
        OSError: the kernel refused.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != expected_parent:
        os._exit(70)


def become_subreaper() -> None:
    """Orphaned grandchildren become children of this process, so that it can wait for them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")
