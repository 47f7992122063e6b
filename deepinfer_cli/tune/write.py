"""One value into `dix.toml`, leaving every other line as it is."""

from __future__ import annotations

import platform
import re
import time
from pathlib import Path

from deepinfer_cli.outputs import write_text
from deepinfer_cli.settings import find_files


def with_value(text: str, section: str, key: str, value: int | str, comment: str) -> str:
    """The file's text with `key = value` in `[section]`: replaced where it stands, else below the section's head, else in a new section."""
    line = f"{key} = {value}  # {comment}"
    lines = text.splitlines()
    head = next((i for i, found in enumerate(lines) if re.fullmatch(rf"\s*\[{section}\]\s*(#.*)?", found)), None)
    if head is None:
        return "\n".join([*lines, *([""] if lines else []), f"[{section}]", line]) + "\n"
    end = next((i for i in range(head + 1, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
    for i in range(head + 1, end):
        if re.match(rf"\s*{key}\s*=", lines[i]):
            return "\n".join([*lines[:i], line, *lines[i + 1 :]]) + "\n"
    return "\n".join([*lines[: head + 1], line, *lines[head + 1 :]]) + "\n"


def write_value(path: Path, section: str, key: str, value: int | str, comment: str) -> None:
    """Replaces the file at once. Raises: OSError."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    write_text(path, with_value(text, section, key, value, comment))


def keep_tuned(user_config: Path, key: str, value: int | str, facts: str) -> Path:
    """Put a setting of the engine into the nearest `dix.toml` upwards, else into a new one here, with the day, the machine and `facts`.
    Returns the file. Raises: OSError.
    """
    path = next((path for path in find_files(None, Path.cwd(), user_config) if path.name == "dix.toml"), Path.cwd() / "dix.toml")
    write_value(path, "engine", key, value, f"tuned {time.strftime('%Y-%m-%d')} on {platform.node()}, {facts}")
    return path
