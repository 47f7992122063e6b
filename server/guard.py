"""The guard of one process group: `python -S server/guard.py PIPE_FD LEADER_PID`.

It is a member of the group, so the group's id cannot be reused while it lives. It blocks on a pipe whose only write end
the supervisor holds; at end-of-file, or when the group's leader is gone, it kills the whole group, itself included.
Standard library only: it must stay tiny.
"""

import os
import select
import signal
import sys

POLL_S = 1.0


def start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat, or "" when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def main(pipe: int, leader: int) -> None:
    born = start_time(leader)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while born and start_time(leader) == born:
        readable, _, _ = select.select([pipe], [], [], POLL_S)
        if readable and not os.read(pipe, 1):
            break
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
