"""One log file per process: a JSON object per line, rotated by size. Raw stdout and stderr go to a second file beside it."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import time
from pathlib import Path

MAX_BYTES = 64 * 2**20
KEPT_FILES = 5
TAIL_LINES = 40


class JsonLines(logging.Formatter):
    """UTC time, level, process, logger, message, and the request id where a record has one. Control characters come out escaped."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "source": self.source,
            "message": record.getMessage(),
        }
        for key in ("request_id", "event"):
            value = getattr(record, key, None)
            if value is not None:
                line[key] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class LogFile(logging.handlers.RotatingFileHandler):
    """Rotates by size, and begins anew where it was when somebody else moved or removed the file or its directory."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._find_again()
        except OSError:
            self.handleError(record)  # a full or read-only disk costs log lines, never a request
            return
        super().emit(record)

    def _find_again(self) -> None:
        try:
            there = os.stat(self.baseFilename)
        except FileNotFoundError:
            there = None
        if self.stream is not None and (there is None or not os.path.samestat(there, os.fstat(self.stream.fileno()))):
            stream, self.stream = self.stream, None
            with contextlib.suppress(OSError):  # what a full disk did not take is lost
                stream.close()
            os.makedirs(os.path.dirname(self.baseFilename), mode=0o700, exist_ok=True)
            self.stream = self._open()


def open_log(directory: Path, source: str, level: str) -> None:
    """Send this process's log to `directory/source.log`."""
    handler = LogFile(directory / f"{source}.log", maxBytes=MAX_BYTES, backupCount=KEPT_FILES, encoding="utf-8")
    handler.setFormatter(JsonLines(source))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a file; empty when there is no such file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 64 * 1024))
        return file.read().decode("utf-8", "replace").splitlines()[-lines:]
