"""Errors of the server: those that a user of the command line can repair, and those that an HTTP client gets."""

from __future__ import annotations

from engine.errors import ConfigError, DixError, MachineError, machine_error

__all__ = [
    "ApiError",
    "BadRequest",
    "ConfigError",
    "DixError",
    "MachineError",
    "PortInUse",
    "ServerFailed",
    "ServerUnreachable",
    "Unauthorized",
    "Unavailable",
    "machine_error",
]


class PortInUse(MachineError):
    """The port is taken. Names the owner when it is one of ours."""


class ServerUnreachable(DixError):
    """No server answers, it did not become ready in time, or a rank died."""

    exit_code = 4


class ServerFailed(DixError):
    """A process of the server ended with a failure of its own; carries that failure's exit code."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 4) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class ApiError(Exception):
    """An answer other than success. Body: {"error": {"message", "type", "param", "code"}}.

    `retry_after_s` becomes a Retry-After header in whole seconds. Messages say what to change and never echo long input.
    """

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.type = type
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(ApiError):
    """The request cannot be served as asked: status 400, `param` names the field."""

    def __init__(self, param: str | None, message: str, code: str = "invalid_value") -> None:
        super().__init__(400, code, message, param=param)


class Unauthorized(ApiError):
    """The request needs an API key that is accepted, or a peer on this machine: status 401."""

    def __init__(self, message: str) -> None:
        super().__init__(401, "invalid_api_key", message, type="authentication_error")


class Unavailable(ApiError):
    """The server cannot take the request now: status 503 with Retry-After."""

    def __init__(self, code: str, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(503, code, message, type="server_error", retry_after_s=retry_after_s)
