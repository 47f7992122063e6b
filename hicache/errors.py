"""The base of every failure that a user can cause or repair, and hicache's own failures."""


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
