"""Failures of the serving layer that a user can cause or repair."""

from engine.errors import ConfigError, DixError, MachineError

__all__ = ["ConfigError", "DixError", "MachineError", "PortInUse", "ServerUnreachable"]


class PortInUse(MachineError):
    """The port is taken. Names the owner when it is one of ours."""


class ServerUnreachable(DixError):
    """No server answers, it did not become ready in time, or a rank died."""

    exit_code = 4
