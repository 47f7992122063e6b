"""Failures of the engine that a user can cause or repair."""

from hicache.errors import ConfigError, DixError, MachineError, machine_error

__all__ = ["CheckpointError", "ConfigError", "DixError", "MachineError", "NotEnoughMemory", "RequestError", "machine_error"]


class CheckpointError(DixError):
    """A model directory is missing, truncated, inconsistent or not of this architecture."""

    exit_code = 2


class NotEnoughMemory(MachineError):
    """Weights or cache do not fit the device or the host."""


class RequestError(DixError):
    """A request cannot be served as asked (too long, id out of range, bad parameter)."""

    exit_code = 2
