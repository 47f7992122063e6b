"""The base of every failure that a user can cause or repair, and hicache's own failures."""

import errno
import re

DENIED = "check its owner and mode, or set DIX_HOME to a directory of your own"
FULL = "free some space; what was written before is kept"
_NO_MEMORY = ("can't allocate memory", "failed to map segment")  # torch's allocator; the loader of libraries
# What the machine refuses is no bug of ours.
REMEDIES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EFBIG: "the size of files is limited here: ulimit -f",
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EROFS: DENIED,
    errno.ENOTDIR: DENIED,
    errno.ENAMETOOLONG: "set DIX_HOME to a shorter path",
    errno.ELOOP: "a symbolic link points to itself",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.ENFILE: "the machine has no open files left",
    errno.ENOMEM: "free some memory",
    errno.EAGAIN: "the number of processes is limited here: ulimit -u",
    errno.EIO: "a device or the terminal failed",
}


class DixError(Exception):
    """A failure with a remedy. The command line prints `error: <message>` and ` hint: <hint>`.

    `exit_code` follows the table of exit codes in `deepinfer_cli/exit_codes.py`:
    2 asked wrongly, 3 this machine cannot, 4 server not there, 5 measured but not valid.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(DixError):
    """A setting has a value outside its range, or two settings contradict each other."""

    exit_code = 2


class MachineError(DixError):
    """The machine lacks memory, disk, a driver, a compiler or a port."""

    exit_code = 3


def machine_error(error: BaseException) -> MachineError | None:
    """What the operating system refused, with its remedy; None for any other failure. The message names the file."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        wanted = re.search(r"tried to allocate \d+ bytes", str(error))  # as torch says it
        more = f": {wanted[0]}" if wanted else ""
        return MachineError(f"not enough memory{more}", hint="free some, raise the limit (ulimit -v), or lower --kv-cache-gb")
    if not isinstance(error, OSError) or error.errno not in REMEDIES:
        return None
    return MachineError(f"{error.filename or 'this machine'}: {error.strerror}", hint=REMEDIES[error.errno])
