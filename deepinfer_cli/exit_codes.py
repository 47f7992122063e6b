"""The exit codes of `dix`. The only place with the numbers."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the caller learns from `$?`; it never depends on how much was printed."""

    OK = 0
    NO = 1
    USAGE = 2
    MACHINE = 3
    UNREACHABLE = 4
    INVALID = 5
    BUG = 70
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143
