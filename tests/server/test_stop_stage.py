from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from server.scanner import Markers, Scanner
from server.stop_stage import StopStage

LETTERS = st.text("abc", max_size=14)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)
CUTS = st.lists(st.integers(0, 14), max_size=5)


def pieces(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in itertools.pairwise(sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)}))]


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Cut at the match that is complete after the fewest characters, the longest of those."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(LETTERS, STOPS, CUTS)
def test_any_split_cuts_like_the_naive_search(text: str, stops: list[str], cuts: list[int]) -> None:
    stage = StopStage(stops)
    shown = "".join(stage.push(piece)[0] for piece in pieces(text, cuts))
    if stage.matched is None:
        shown += stage.flush()[0]
    assert (shown, stage.matched) == naive(text, stops)


@settings(max_examples=400, deadline=None)
@given(LETTERS, STOPS, CUTS)
def test_tokens_come_with_their_first_character(text: str, stops: list[str], cuts: list[int]) -> None:
    stage = StopStage(stops)
    shown, indexes, position = "", [], 0
    for piece in pieces(text, cuts):
        new, tokens = stage.push(piece, [(i, position + i) for i in range(len(piece))])
        shown, indexes, position = shown + new, indexes + tokens, position + len(piece)
        assert indexes == list(range(len(shown)))
    if stage.matched is None:
        indexes += stage.flush()[1]
        assert indexes == list(range(len(text)))


def test_nothing_of_a_possible_match_is_shown_early() -> None:
    stage = StopStage(["END"])
    assert [stage.push(piece)[0] for piece in ("a", "E", "N", "X", "E")] == ["a", "", "", "ENX", ""]
    assert stage.flush()[0] == "E"


@settings(max_examples=400, deadline=None)
@given(LETTERS, st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), CUTS)
def test_scanner_finds_what_a_search_of_the_whole_text_finds(text: str, markers: list[str], cuts: list[int]) -> None:
    scanner, searched = Scanner(), Markers(*markers)
    found = []
    for piece in pieces(text, cuts):
        scanner.push(piece)
        marker = "-"
        while marker:
            _, marker = scanner.until(searched)
            found += [(scanner.offset - len(marker), marker)] if marker else []
    # Without a marker that stands inside another one, the way of arrival does not matter.
    if not any(a != b and a in b for a in markers for b in markers):
        expected, position = [], 0
        while (hit := searched.find(text, position)) is not None:
            expected.append(hit)
            position = hit[0] + len(hit[1])
        held_back = [hit for hit in expected if hit not in found]
        assert found == expected[: len(found)]
        assert not held_back
    assert scanner.rest() == "" or searched.overlap(text, 0) > 0
