"""The screen: streams, widths, colour, glyphs and progress without a terminal."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_cli.layout import GAP, blocks, extent
from deepinfer_cli.ui import Column, Ui, UiOptions
from deepinfer_cli.units import parse_duration, parse_fraction, parse_size, show_bytes, show_duration, show_number
from hicache.errors import ConfigError


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def make(environ: dict[str, str] | None = None, *, tty: bool = False, **options: Any) -> tuple[Ui, io.StringIO, io.StringIO]:
    out, err = (Terminal(), Terminal()) if tty else (io.StringIO(), io.StringIO())
    return Ui(UiOptions(**options), environ or {}, out, err), out, err


COLUMNS = [Column("name", right=False), Column("tok/s"), Column("share")]


def test_the_answer_goes_to_stdout_and_the_talk_to_stderr() -> None:
    ui, out, err = make()
    ui.print("answer")
    ui.note("note")
    ui.warn("careful")
    ui.error("broken", "fix it")
    assert out.getvalue() == "answer\n"
    assert err.getvalue() == "note\nwarning: careful\nerror: broken\n hint: fix it\n"


def test_quiet_leaves_errors_and_the_answer() -> None:
    ui, out, err = make(quiet=True)
    ui.print("answer")
    ui.note("note")
    ui.warn("careful")
    ui.error("broken")
    assert (out.getvalue(), err.getvalue()) == ("answer\n", "error: broken\n")


def test_numbers_are_right_aligned_and_missing_ones_are_dashes() -> None:
    ui, out, _ = make()
    ui.table(COLUMNS, [("a", "9,870", None), ("long", "7", float("nan"))])
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines == ["name  tok/s  share", "a     9,870      –", "long      7      –"]


def lines_of(out: io.StringIO) -> list[str]:
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_on_a_narrow_terminal_columns_go_on_below_and_rows_keep_their_names() -> None:
    ui, out, _ = make({"COLUMNS": "14"})
    ui.table(COLUMNS, [("a", "9,870", "12 %"), ("b", "7", None)])
    assert lines_of(out) == ["name  tok/s", "a     9,870", "b         7", "", "name  share", "a      12 %", "b         –"]


def test_words_wrap_before_columns_go_on_below() -> None:
    ui, out, _ = make({"COLUMNS": "50"})
    ui.table(
        [Column("", right=False), Column("", right=False), Column("n")], [("warn", "no compiler was found, so steps take longer", "12")]
    )
    assert max(map(len, lines_of(out))) <= 50
    assert " ".join(out.getvalue().split()) == "n warn no compiler was found, so steps take 12 longer"


def test_a_row_with_nothing_more_to_say_is_not_named_again() -> None:
    ui, out, _ = make({"COLUMNS": "40"})
    texts = ("a text of some words that needs room " * 2, "a remedy that also needs some room")
    ui.table([Column("", right=False)] * 3, [("ok", texts[0], ""), ("warn", texts[0], texts[1])])
    assert out.getvalue().split().count("ok") == 1
    assert out.getvalue().split().count("warn") == 2


@given(st.lists(st.lists(st.text("ab1 ", max_size=30), min_size=1, max_size=5), min_size=1, max_size=7), st.integers(1, 120))
def test_every_column_is_placed_once_and_blocks_fit_where_they_can(cells: list[list[str]], room: int) -> None:
    extents = [extent(column, words=index % 2 == 0) for index, column in enumerate(cells)]
    placed = blocks(extents, room)
    assert [place.column for block in placed for place in block if place.column or block is placed[0]] == list(range(len(cells)))
    for block in placed:
        assert block[0].column == 0
        assert all(extents[place.column].least <= place.width <= extents[place.column].full for place in block)
        width = sum(place.width for place in block) + GAP * (len(block) - 1)
        assert width <= room or len(block) <= 2, "only what cannot be divided is wider than the room"


@pytest.mark.parametrize(
    ("environ", "options", "colored"),
    [
        ({}, {}, True),
        ({"NO_COLOR": "1"}, {}, False),
        ({"TERM": "dumb"}, {}, False),
        ({}, {"color": False}, False),
        ({"FORCE_COLOR": "0"}, {}, True),
    ],
)
def test_colour_on_a_terminal(environ: dict[str, str], options: dict[str, Any], colored: bool) -> None:
    ui, out, _ = make(environ, tty=True, **options)
    ui.print("fine", "good")
    assert ("\x1b[" in out.getvalue()) is colored


def test_a_pipe_gets_no_colour_whatever_the_environment_says() -> None:
    ui, out, _ = make({"FORCE_COLOR": "0", "TERM": "xterm"})
    ui.print("fine", "good")
    assert out.getvalue() == "fine\n"


def test_a_pipe_gets_no_blanks_behind_a_table() -> None:
    ui, out, _ = make()
    ui.table([Column("name", right=False), Column("what", right=False)], [("a", "one"), ("b", "a longer text"), ("c", "x\u2028y")])
    assert out.getvalue() == "name  what\na     one\nb     a longer text\nc     x\u2028y\n"


def test_sentences_break_between_words_and_paths_stay_whole() -> None:
    ui, out, err = make({"COLUMNS": "20"}, tty=True, color=False)
    path = "/a/path/that-is/longer/than/the/line"
    ui.note(f"kept in {path} for later")
    ui.warn("a word or two that wrap")
    ui.error("it broke in the middle", "do it again with care")
    assert err.getvalue().splitlines() == [
        "kept in",
        f"  {path}",
        "  for later",
        "warning: a word or",
        "  two that wrap",
        "error: it broke in",
        "  the middle",
        " hint: do it again",
        "   with care",
    ]
    ui.print("an answer is printed as it is, however long")
    ui.print("a verdict may be broken", prose=True)
    assert out.getvalue() == "an answer is printed as it is, however long\na verdict may be\n  broken\n"


def test_a_pipe_gets_whole_lines() -> None:
    ui, _, err = make({"COLUMNS": "20"})
    ui.note("a line that is longer than twenty columns")
    assert err.getvalue() == "a line that is longer than twenty columns\n"


def test_wide_characters_keep_the_columns_in_line() -> None:
    from rich.cells import cell_len

    ui, out, _ = make()
    ui.table([Column("name", right=False), Column("tok/s")], [("模型模型", "9"), ("tiny", "12"), ("e\u0301", "3")])
    lines = out.getvalue().splitlines()
    assert len(lines) == 4, "nothing wraps"
    assert {cell_len(line) for line in lines} == {cell_len("模型模型") + 2 + len("tok/s")}


EVIL = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J\x9b31m\rgone\x00\x7f"


@pytest.mark.parametrize("say", ["print", "write", "think", "note", "warn", "error", "table", "step"])
def test_no_text_of_others_commands_the_terminal(say: str) -> None:
    """An answer, a served name, a log line, a checkpoint's config: an escape sequence may fill the clipboard or type for the user."""
    for tty in (True, False):
        ui, out, err = make({}, tty=tty, color=False)
        match say:
            case "table":
                ui.table([Column("name", right=False)], [(EVIL,)])
            case "step":
                ui.step("model", EVIL)
            case _:
                getattr(ui, say)(EVIL)
        shown = out.getvalue() + err.getvalue()
        if tty:
            assert not set(shown) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}
            assert "\\x1b]52" in shown
    assert "\x1b]52" in shown, "a pipe gets what was said"


def test_markup_in_names_is_text() -> None:
    ui, out, _ = make()
    ui.print("[red]x[/red] :smile:")
    assert out.getvalue() == "[red]x[/red] :smile:\n"


def test_ascii_fallback_has_only_ascii() -> None:
    ui, out, err = make(unicode=False)
    ui.print("a → b · 3 × 4 – done ✓")
    ui.step("weights", "1.2 GiB", took_s=3.0)
    assert out.getvalue() == "a -> b - 3 x 4 - done ok\n"
    assert (out.getvalue() + err.getvalue()).isascii()


def test_without_a_terminal_progress_is_a_plain_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("deepinfer_cli.ui.time.monotonic", lambda: clock[0])
    ui, out, err = make()
    with ui.progress("weights", 100) as bar:
        for second in range(25):
            clock[0] = 100.0 + second
            bar.update(second * 4, f"{second} GiB")
    lines = err.getvalue().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["weights 40% 10 GiB", "weights 80% 20 GiB"]
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("environ", "options"),
    [({"CI": "1"}, {}), ({"TERM": "dumb"}, {}), ({}, {"quiet": True}), ({}, {"json": True}), ({}, {"progress": False})],
)
def test_no_bar_is_drawn_where_it_would_hurt(environ: dict[str, str], options: dict[str, Any]) -> None:
    ui, _, _ = make(environ, tty=True, **options)
    assert not ui.live


def test_a_terminal_gets_a_bar_and_warnings_again_at_the_end() -> None:
    ui, _, err = make({"COLUMNS": "100"}, tty=True, color=False)
    assert ui.live
    with ui.progress("load", 10) as bar:
        bar.update(5, "half")
        ui.warn("slow disk")
    ui.finish()
    assert err.getvalue().count("slow disk") >= 2


def test_json_documents_are_one_line_with_null_for_missing() -> None:
    ui, out, _ = make(json=True)
    ui.document("dix.x/1", {"a": None, "b": "–"})
    assert out.getvalue() == '{"schema": "dix.x/1", "a": null, "b": "–"}\n'
    with pytest.raises(ValueError):
        ui.document("dix.x/1", {"a": float("nan")})


def test_events_are_json_lines() -> None:
    ui, out, _ = make(json=True)
    ui.event("a", x=1)
    ui.event("b")
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [{"event": "a", "x": 1}, {"event": "b"}]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("250ms", 0.25), ("2m", 120), ("1h", 3600), ("1.5", 1.5), (" 3 s ", 3)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "count"), [("64GiB", 64 * 2**30), ("10MB", 10**7), ("1_000", 1000)])
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


def test_percentages() -> None:
    assert (parse_fraction("2%"), parse_fraction("0.02")) == (pytest.approx(0.02), 0.02)


@pytest.mark.parametrize("text", ["", "s", "3 parsecs", "1e400000s3", "--"])
def test_bad_quantities_name_the_value(text: str) -> None:
    with pytest.raises(ConfigError, match="wait is"):
        parse_duration(text, "wait")


def test_numbers_for_people() -> None:
    assert show_duration(0.84) == "0.8 s"
    assert show_duration(2 * 3600 + 14 * 60) == "2h 14m"
    assert show_duration(125) == "2m 05s"
    assert show_bytes(98.1 * 2**30) == "98.1 GiB"
    assert show_number(1234.56) == "1,234.6"
    assert show_number(None) == show_number(float("nan")) == "–"
