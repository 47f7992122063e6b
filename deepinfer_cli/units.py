"""Durations, sizes and percentages as people write them, and numbers as they read them."""

from __future__ import annotations

import re

from hicache.errors import ConfigError

SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_QUANTITY = re.compile(r"\s*([+-]?\d[\d_]*(?:\.\d+)?|[+-]?\.\d+)\s*([A-Za-z%]*)\s*")


def parse_duration(text: str, name: str = "duration") -> float:
    """`90s`, `250ms`, `2m`, `1h` or a bare number of seconds -> seconds."""
    return _parse(text, SECONDS, name, "a time such as 90s, 250ms, 2m or 1h")


def parse_size(text: str, name: str = "size") -> int:
    """`64GiB`, `512MiB`, `10MB` or a bare number of bytes -> bytes."""
    return int(_parse(text, BYTES, name, "a size such as 64GiB, 512MiB or 1000000"))


def parse_fraction(text: str, name: str = "percentage") -> float:
    """`2%` -> 0.02; `0.02` stays 0.02."""
    return _parse(text, {"%": 0.01}, name, "a percentage such as 2%")


def _parse(text: str, units: dict[str, float] | dict[str, int], name: str, wanted: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or (match[2] and match[2] not in units):
        raise ConfigError(f"{name} is {text!r}", hint=f"give {wanted}")
    return float(match[1].replace("_", "")) * (units[match[2]] if match[2] else 1)


def show_duration(seconds: float) -> str:
    """`0.8 s`, `2h 14m`, `3d 4h`: at most two parts."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


def show_bytes(count: float) -> str:
    """Bytes in the largest binary unit that keeps a digit before the point."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= BYTES[unit]:
            return f"{count / BYTES[unit]:,.1f} {unit}"
    return f"{count:.0f} B"


def show_number(value: float | None, digits: int = 1) -> str:
    """A number with thousands separators; `–` when there is none to show."""
    return "–" if value is None or value != value else f"{value:,.{digits}f}"
