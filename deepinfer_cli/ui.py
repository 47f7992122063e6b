"""The two consoles, five colour roles, tables and progress. The only importer of rich.

stdout carries the answer (a table or JSON), stderr the conversation (progress, notes, warnings, errors).
"""

from __future__ import annotations

import json as json_module
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from deepinfer_cli.layout import GAP, blocks, extent

ROLES = {"good": "green", "warning": "yellow", "bad": "red", "accent": "cyan", "quiet": "dim"}
ASCII = {"✓": "ok", "→": "->", "·": "-", "–": "-", "━": "#", "≥": ">=", "×": "x", "−": "-", "±": "+/-", "…": "..."}
# They move the cursor, set titles and clipboards, or ask the terminal to type: everything but line end and tab.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
PLAIN_INTERVAL_S = 10.0
REDRAWS_PER_S = 4
PIPED_WIDTH = 200


@dataclass(frozen=True, slots=True)
class UiOptions:
    """What the user asked for. `color`, `unicode`: None follows the terminal and the locale."""

    json: bool = False
    quiet: bool = False
    verbose: int = 0
    color: bool | None = None
    progress: bool = True
    unicode: bool | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A table column. Numbers are right-aligned; `unit` joins the head once instead of every cell."""

    head: str
    right: bool = True
    role: str = ""


class Ui:
    """Everything a command prints. Widths and terminal state come from the streams themselves, not from rich's guesses."""

    def __init__(self, options: UiOptions, environ: Mapping[str, str], stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.options = options
        self.stdout = stdout or sys.stdout
        self.stderr = stderr or sys.stderr
        self.unicode = _unicode(options, environ, self.stderr)
        self.live = self._may_draw(environ)
        self.out = _console(self.stdout, options, environ)
        self.err = _console(self.stderr, options, environ)
        self.warnings: list[str] = []
        self._scrolled = False

    def _may_draw(self, environ: Mapping[str, str]) -> bool:
        wanted = self.options.progress and not self.options.json and not self.options.quiet
        return wanted and self.stderr.isatty() and environ.get("TERM") != "dumb" and not environ.get("CI")

    def glyphs(self, text: str) -> str:
        """The text in the characters that this terminal has."""
        if self.unicode:
            return text
        for glyph, plain in ASCII.items():
            text = text.replace(glyph, plain)
        return text.encode("ascii", "replace").decode()

    # -- the answer ---------------------------------------------------------------------------------------------------------------
    def print(self, text: str = "", role: str = "", *, prose: bool = False) -> None:
        """One line or several as they are. prose: a terminal may break it between words."""
        shown = _visible(self.glyphs(text), self.stdout)
        self.out.print(Text(_folded(shown, self.stdout, self.out.width) if prose else shown, style=role), soft_wrap=True)

    def write(self, text: str) -> None:
        """Text of a model, as it comes, without a line end."""
        self.stdout.write(_visible(text, self.stdout))
        self.stdout.flush()

    def think(self, text: str) -> None:
        """A model's reasoning, as it comes, beside the answer."""
        self.err.print(_visible(text, self.stderr), style="quiet", end="", soft_wrap=True)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> None:
        """Boxless table on stdout. What does not fit goes on below (`layout.py`)."""
        built = self.build_table(columns, rows, self.out.width)
        if self.stdout.isatty():
            self.out.print(built, soft_wrap=False, crop=False)
            return
        with self.out.capture() as text:
            self.out.print(built, soft_wrap=False, crop=False)
        self.stdout.writelines(line.rstrip(" ") + "\n" for line in text.get().split("\n")[:-1])

    def build_table(self, columns: Sequence[Column], rows: Sequence[Sequence[Any]], width: int) -> Group:
        heads = [self.glyphs(column.head) for column in columns]
        cells = [[_visible(self.glyphs(_cell(value)), self.stdout) for value in row] for row in rows]
        extents = [extent([head, *(row[i] for row in cells)], words=not columns[i].right, wide=cell_len) for i, head in enumerate(heads)]
        made: list[Table | str] = []
        for block in blocks(extents, width - GAP):  # the last column has its gap too
            table = Table(
                box=None, padding=(0, GAP, 0, 0), show_edge=False, header_style="quiet", show_header=any(heads),
                width=sum(place.width + GAP for place in block),
            )  # fmt: skip
            for place in block:
                column = columns[place.column]
                justify: Literal["right", "left"] = "right" if column.right else "left"
                table.add_column(Text(heads[place.column]), justify=justify, style=column.role, width=place.width, no_wrap=column.right)
            for row in cells:
                if made and not any(row[place.column] for place in block[1:]):
                    continue  # it has said everything above
                table.add_row(*(Text(row[place.column], style=_verdict_role(row[place.column])) for place in block))
            made += ["", table] if made else [table]
        return Group(*made)

    def document(self, schema: str, body: Mapping[str, Any]) -> None:
        """One JSON document on stdout; missing values are null."""
        self.stdout.write(json_module.dumps({"schema": schema, **body}, ensure_ascii=False, allow_nan=False, default=str) + "\n")
        self.stdout.flush()

    def event(self, event: str, **fields: Any) -> None:
        """One line of JSON Lines on stdout, for commands that stream."""
        self.stdout.write(json_module.dumps({"event": event, **fields}, ensure_ascii=False, allow_nan=False, default=str) + "\n")
        self.stdout.flush()

    # -- the conversation ---------------------------------------------------------------------------------------------------------
    def _say(self, text: str, role: str, lead: str = "", lead_role: str = "") -> None:
        folded = _folded(_visible(self.glyphs(lead + text), self.stderr), self.stderr, self.err.width)
        shown = Text(folded, style=role)
        if lead_role:
            shown.stylize(lead_role, 0, len(lead))
        self.err.print(shown, soft_wrap=True)

    def note(self, text: str, role: str = "") -> None:
        if not self.options.quiet:
            self._say(text, role)

    def step(self, name: str, text: str, *, done: bool = True, took_s: float | None = None) -> None:
        """One stage of a longer job: `✓ weights  1.2 GiB   3.1 s`."""
        took = f"  {took_s:.1f} s" if took_s is not None else ""
        if not self.options.quiet:
            sign = Text(self.glyphs("✓ " if done else "· "), style="good" if done else "quiet")
            self.err.print(sign + Text(_visible(self.glyphs(f"{name:<10}{text}"), self.stderr)) + Text(took, style="quiet"), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        if not self.options.quiet:
            self._say(f"warning: {text}", "warning")

    def error(self, message: str, hint: str = "") -> None:
        self._say(message, "", "error: ", "bad")
        if hint:
            self._say(hint, "", " hint: ", "accent")

    def finish(self) -> None:
        """Repeat warnings that a live view may have scrolled away."""
        if self._scrolled and not self.options.quiet:
            for text in dict.fromkeys(self.warnings):
                self._say(f"warning: {text}", "warning")

    @contextmanager
    def progress(self, name: str, total: float | None = None) -> Iterator[Bar]:
        """A bar on a terminal, otherwise a plain line every 10 s; silent with --quiet."""
        if not self.live:
            yield Bar(self, name, total)
            return
        self._scrolled = True
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24, complete_style="accent", finished_style="good"),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self.err,
            refresh_per_second=REDRAWS_PER_S,
            transient=True,
        )
        with bar:
            task = bar.add_task(name, total=total, detail="")
            yield Bar(self, name, total, bar, task)

    @contextmanager
    def watch(self, interval_s: float) -> Iterator[Live]:
        """A region of stdout that is redrawn."""
        with Live(console=self.out, refresh_per_second=max(1, min(REDRAWS_PER_S, 1 / interval_s)), transient=False) as live:
            yield live


class Bar:
    """One thing waited for."""

    def __init__(self, ui: Ui, name: str, total: float | None, drawn: Progress | None = None, task: Any = None) -> None:
        self.ui, self.name, self.total = ui, name, total
        self._drawn, self._task = drawn, task
        self._said_s = time.monotonic()

    def update(self, done: float, detail: str = "", total: float | None = None) -> None:
        self.total = total or self.total
        if self._drawn is not None:
            self._drawn.update(self._task, completed=done, total=self.total, detail=self.ui.glyphs(detail))
        elif time.monotonic() - self._said_s >= PLAIN_INTERVAL_S:
            self._said_s = time.monotonic()
            share = f" {done / self.total:.0%}" if self.total else ""
            self.ui.note(f"{time.strftime('%H:%M:%S')} {self.name}{share} {detail}".rstrip())


def _console(stream: TextIO, options: UiOptions, environ: Mapping[str, str]) -> Console:
    tty = stream.isatty()
    color = options.color
    if color is None:
        color = tty and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    size = shutil.get_terminal_size((PIPED_WIDTH, 50))
    width = int(environ.get("COLUMNS") or 0) or (size.columns if tty else PIPED_WIDTH)
    return Console(
        file=stream,
        theme=Theme(ROLES),
        width=width,
        height=size.lines,
        force_terminal=tty or bool(options.color),
        no_color=not color,
        color_system="standard" if color else None,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )


def _unicode(options: UiOptions, environ: Mapping[str, str], stream: TextIO) -> bool:
    if options.unicode is not None:
        return options.unicode
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return str(value)


def _visible(text: str, stream: TextIO) -> str:
    """Text of models, servers and files as a terminal may get it: controls are shown, not obeyed. A pipe gets them as they are."""
    return text.translate(CONTROLS) if stream.isatty() else text


def _folded(text: str, stream: TextIO, width: int) -> str:
    """Sentences broken between words where a terminal would break within them. Paths and URLs stay whole, and a pipe gets whole lines."""
    if not stream.isatty():
        return text
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + GAP)
        wrapped = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += wrapped if cell_len(line) > width else [line]
    return "\n".join(lines)


def _verdict_role(cell: str) -> str:
    return {"ok": "good", "same": "good", "better": "good", "ready": "good", "fail": "bad", "different": "bad", "worse": "bad"}.get(
        cell, "warning" if cell in ("warn", "cannot tell", "degraded") else ""
    )


def stdin_is_piped() -> bool:
    """Whether text waits on standard input. A closed or terminal stdin counts as no text."""
    try:
        return not sys.stdin.closed and not sys.stdin.isatty()
    except (ValueError, AttributeError):
        return False


def discard_stdout() -> None:
    """After a reader went away: let the interpreter flush into nothing instead of raising at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
