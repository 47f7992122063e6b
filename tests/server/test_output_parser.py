from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import FinishReason
from server import scanner
from server.output_parser import DeltaKind, OutputParser
from server.rendering import ParseStart
from tests.server.vectors import Answer, loaded, parse_text, vector_id, vectors

DIALECT = loaded()[0].dialect
TOKENIZER = loaded()[1]
PARSE = vectors("p")
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP

OPEN = "\n\n<｜DSML｜ calls>\n"
CLOSE = "</｜DSML｜ calls>"
INVOKE = '<｜DSML｜ invoke name="f">\n'
END = "</｜DSML｜ invoke>\n"


def parameter(name: str, value: str, kind: str = "true") -> str:
    return f'<｜DSML｜ parameter name="{name}" string="{kind}">{value}</｜DSML｜ parameter>\n'


def make(**options: Any) -> OutputParser:
    return OutputParser(DIALECT, TOKENIZER, **options)


def for_vector(vector: Any) -> OutputParser:
    start = ParseStart.REASONING if vector["thinking"] else ParseStart.CONTENT
    return make(start=start, parse_calls=vector["tools_declared"], tool_names=["get_weather"])


def splits(text: str) -> list[list[str]]:
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]


@pytest.mark.parametrize("vector", PARSE, ids=vector_id)
def test_golden_completion_parses_the_same_at_every_split(vector: Any) -> None:
    reason = FinishReason(vector["engine_finish"])
    for pieces in splits(vector["completion"]):
        parser = for_vector(vector)
        answer = parse_text(parser, pieces, vector["thinking"], reason)
        assert answer.message == vector["expected_message"], pieces
        assert parser.finish_reason == vector["expected_finish_reason"]


@pytest.mark.parametrize("vector", [v for v in PARSE if v["tools_declared"]], ids=vector_id)
def test_no_delta_of_text_holds_a_fragment_of_a_tag(vector: Any) -> None:
    for pieces in splits(vector["completion"]):
        answer = parse_text(for_vector(vector), pieces, vector["thinking"], FinishReason(vector["engine_finish"]))
        for delta in answer.deltas:
            if delta.kind in (DeltaKind.REASONING, DeltaKind.CONTENT):
                assert "｜" not in delta.text
                assert "think>" not in delta.text


@pytest.mark.parametrize("vector", PARSE, ids=vector_id)
def test_golden_completion_parses_the_same_from_token_ids(vector: Any) -> None:
    ids = TOKENIZER.encode(vector["completion"])
    for pieces in ([ids], [[i] for i in ids]):
        parser = for_vector(vector)
        answer = Answer(vector["thinking"])
        for piece in pieces:
            answer.add(parser.push(piece))
        answer.add(parser.finish(FinishReason(vector["engine_finish"])))
        if vector["id"] == "p05_string_values_verbatim":
            assert json.loads(answer.message["tool_calls"][0]["function"]["arguments"])["city"].startswith(' a "b"')
        else:
            assert answer.message == vector["expected_message"]


def ids_of(*parts: str) -> list[int]:
    """Parts that are exactly a control spelling become control ids, the others plain text."""
    ids: list[int] = []
    for part in parts:
        ids += [TOKENIZER.added[part]] if part in TOKENIZER.added else TOKENIZER.encode_plain(part)
    return ids


def parse_ids(parser: OutputParser, ids: list[int], reason: FinishReason = STOP, thinking: bool = False, step: int = 1) -> Answer:
    answer = Answer(thinking)
    for i in range(0, len(ids), step):
        answer.add(parser.push(ids[i : i + step]))
    answer.add(parser.finish(reason))
    return answer


def test_spelled_out_control_tokens_stay_text_and_sampled_ones_act() -> None:
    spelled = parse_ids(make(start=ParseStart.REASONING), TOKENIZER.encode_plain("a</think>b"), thinking=True)
    assert spelled.message["reasoning_content"] == "a</think>b"
    sampled = parse_ids(make(start=ParseStart.REASONING), ids_of("a", "</think>", "b<think>", "<think>", "c"), thinking=True)
    assert (sampled.message["reasoning_content"], sampled.message["content"]) == ("a", "b<think>c")


def test_spelled_out_tags_are_no_calls() -> None:
    text = f"{OPEN}{INVOKE}{END}{CLOSE}"
    parser = make(parse_calls=True)
    assert parse_ids(parser, TOKENIZER.encode_plain(text)).message == {"role": "assistant", "content": text}


def test_everything_behind_eos_is_ignored() -> None:
    parser = make()
    answer = Answer(False)
    answer.add(parser.push(ids_of("Hi", "<｜end▁of▁sentence｜>", "more")))
    assert parser.done
    answer.add(parser.push(ids_of("more")))
    answer.add(parser.finish(STOP))
    assert answer.message["content"] == "Hi"


def test_reasoning_tokens_count_what_comes_before_the_end_of_thinking() -> None:
    reasoning = TOKENIZER.encode_plain("Let me think about it.")
    parser = make(start=ParseStart.REASONING)
    parse_ids(parser, [*reasoning, *ids_of("</think>", "Done.")])
    assert parser.reasoning_tokens == len(reasoning)
    endless = make(start=ParseStart.REASONING)
    parse_ids(endless, [*reasoning, *ids_of("<｜end▁of▁sentence｜>")])
    assert endless.reasoning_tokens == len(reasoning) + 1
    assert make().reasoning_tokens == 0


def test_reasoning_tokens_stop_at_a_call_that_ends_the_reasoning() -> None:
    reasoning = TOKENIZER.encode_plain("I should look.")
    parser = make(start=ParseStart.REASONING, parse_calls=True)
    parse_ids(parser, [*reasoning, *TOKENIZER.encode(OPEN + INVOKE + END + CLOSE)], step=100)
    assert parser.reasoning_tokens == len(reasoning)
    assert parser.complete_calls == 1


def test_every_shown_token_is_named_once_with_its_text() -> None:
    emoji = TOKENIZER.encode_plain("Sea 🌊 é.")
    ids = [*ids_of("why", "</think>"), *emoji, *ids_of("<think>", " tail"), *TOKENIZER.encode(OPEN + INVOKE + END + CLOSE)]
    for step in (1, 3, 1000):
        answer = parse_ids(make(start=ParseStart.REASONING, parse_calls=True), ids, thinking=True, step=step)
        for kind, text in (("reasoning", "why"), ("content", "Sea 🌊 é. tail")):
            assert TOKENIZER.decode(ids[i] for i in answer.tokens[kind]) == text
            assert answer.tokens[kind] == sorted(set(answer.tokens[kind]))


def test_section_tells_where_the_next_token_goes() -> None:
    parser = make(start=ParseStart.REASONING, parse_calls=True)
    assert parser.section is DeltaKind.REASONING
    parser.push_text("a</think>")
    assert parser.section is DeltaKind.CONTENT
    parser.push_text(OPEN + INVOKE)
    assert parser.section is None


def test_block_opened_by_the_prompt_is_parsed_from_inside() -> None:
    parser = make(start=ParseStart.BLOCK, parse_calls=True)
    answer = parse_text(parser, [INVOKE + parameter("a", "1", "false") + END + CLOSE])
    assert answer.message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert parser.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("completion", "reason", "content", "arguments", "finish"),
    [
        (INVOKE + parameter("a", "x") + END, STOP, "", ['{"a": "x"}'], "tool_calls"),
        (OPEN + INVOKE + parameter("a", "x") + "</｜DSML｜ inv", STOP, "", ['{"a": "x"}'], "tool_calls"),
        (OPEN + INVOKE + parameter("a", "x"), LENGTH, "", ['{"a": "x"'], "length"),
        (OPEN + INVOKE, STOP, "", ["{}"], "tool_calls"),
        (OPEN + INVOKE, LENGTH, "", [""], "length"),
        (OPEN + INVOKE + '<｜DSML｜ parameter name="a" string="true">x', STOP, "", ['{"a": "x'], "stop"),
        (OPEN + INVOKE + '<｜DSML｜ parameter name="a" string="false">[1', STOP, "", [""], "stop"),
        (OPEN + INVOKE + parameter("a", "x") + CLOSE, STOP, "", ['{"a": "x"}'], "tool_calls"),
        (OPEN + INVOKE + INVOKE + END + CLOSE, STOP, "", ["{}", "{}"], "tool_calls"),
        (OPEN + INVOKE + END + CLOSE + "more", LENGTH, "", ["{}"], "tool_calls"),
        ("a < b\n\n", STOP, "a < b\n\n", [], "stop"),
        ("a <", LENGTH, "a <", [], "length"),
        ("Hi\n\n<", LENGTH, "Hi\n\n<", [], "length"),
        ("Hi\n\n<｜DSML｜", STOP, "Hi", [], "stop"),
        ("Hi\n\n\n<｜DSML｜ calls>", STOP, "Hi\n", [], "stop"),
        ("｜DSML｜ alone", STOP, "｜DSML｜ alone", [], "stop"),
    ],
)
def test_ends_and_recoveries(completion: str, reason: FinishReason, content: str, arguments: list[str], finish: str) -> None:
    for pieces in splits(completion):
        parser = make(parse_calls=True)
        message = parse_text(parser, pieces, reason=reason).message
        assert message["content"] == content
        assert [call["function"]["arguments"] for call in message.get("tool_calls", [])] == arguments
        assert parser.finish_reason == finish


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        (parameter("a b", "x"), '{"a b": "x"}'),
        (parameter("", "x"), '{"": "x"}'),
        (parameter('q"q', "x"), '{"q\\"q": "x"}'),
        (parameter("a", "1") + parameter("a", "2"), '{"a": "1", "a": "2"}'),
        (parameter("a", "not json", "false"), '{"a": "not json"}'),
        (parameter("a", "NaN", "false"), '{"a": "NaN"}'),
        (parameter("a", " 1 ", "false"), '{"a":  1 }'),
        (parameter("a", "9" * 5000, "false"), '{"a": ' + "9" * 5000 + "}"),
        (parameter("a", "</｜DSML｜parameter></｜DSML｜ invoke>"), '{"a": "</｜DSML｜parameter></｜DSML｜ invoke>"}'),
        ('<｜DSML｜ parameter name="a">[1]</｜DSML｜ parameter>', '{"a": [1]}'),
        ('<｜DSML｜ parameter name="a">x</｜DSML｜ parameter>', '{"a": "x"}'),
    ],
)
def test_parameters_keep_what_was_written(block: str, arguments: str) -> None:
    completion = OPEN + INVOKE + block + END + CLOSE
    for pieces in ([completion], list(completion)):
        message = parse_text(make(parse_calls=True), pieces).message
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_oddities_are_counted() -> None:
    block = parameter("a", "x") + parameter("a", "{", "false")
    parser = make(parse_calls=True, tool_names=["g"])
    parse_text(parser, [OPEN + INVOKE + block + INVOKE])
    counts = parser.counts
    assert (counts.duplicate_parameters, counts.invalid_json_values, counts.undeclared_calls, counts.malformed_calls) == (1, 1, 2, 1)


def test_one_call_ends_the_answer() -> None:
    parser = make(parse_calls=True, one_call=True)
    answer = parse_text(parser, [OPEN + INVOKE + END + INVOKE + END + CLOSE])
    assert len(answer.message["tool_calls"]) == 1
    assert parser.done


def test_call_ids_are_long_and_unique() -> None:
    answer = parse_text(make(parse_calls=True), [OPEN + (INVOKE + END) * 20 + CLOSE])
    ids = [delta.call_id for delta in answer.deltas if delta.kind is DeltaKind.TOOL_START]
    assert len(set(ids)) == 20
    assert all(call_id.startswith("call_") and len(call_id) >= 25 for call_id in ids)


@pytest.mark.parametrize(
    ("text", "stops", "content", "matched"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["four"], "one two three", None),
        ("abcd", ["abcd", "bc"], "a", "bc"),
        ("xab", ["ab", "xab"], "", "xab"),
        ("aab", ["ab"], "a", "ab"),
        ("Hi\n\nthere", ["\n\n"], "Hi", "\n\n"),
        (f"Hi{OPEN}{INVOKE}{END}{CLOSE}", ["\n\n", "invoke"], "Hi", None),
        ("half of it: tw", ["two"], "half of it: tw", None),
    ],
)
def test_stop_strings_cut_content_at_every_split(text: str, stops: list[str], content: str, matched: str | None) -> None:
    for pieces in splits(text):
        parser = make(parse_calls=True, stops=stops)
        assert parse_text(parser, pieces).message["content"] == content
        assert parser.stopped_by == matched
        assert matched is None or parser.finish_reason == "stop"


def test_stop_strings_do_not_count_in_reasoning_and_calls() -> None:
    parser = make(start=ParseStart.REASONING, parse_calls=True, stops=["stop", "calls"])
    answer = parse_text(parser, [f"stop</think>go{OPEN}{INVOKE}{parameter('a', 'stop')}{END}{CLOSE}"], thinking=True)
    assert answer.message["reasoning_content"] == "stop"
    assert answer.message["tool_calls"][0]["function"]["arguments"] == '{"a": "stop"}'
    assert parser.stopped_by is None


def test_tokens_cut_off_by_a_stop_string_are_not_named() -> None:
    ids = TOKENIZER.encode_plain("one two three")
    assert TOKENIZER.decode(ids[i] for i in parse_ids(make(stops=[" two"]), ids).tokens["content"]) == "one"
    # A token that begins in front of the match is shown in part, and named.
    assert TOKENIZER.decode(ids[i] for i in parse_ids(make(stops=["two"]), ids).tokens["content"]) == "one two"


def test_raw_parser_shows_every_spelling() -> None:
    parser = make(raw=True)
    assert parse_ids(parser, ids_of("a", "</think>", "b", "｜DSML｜")).message["content"] == "a</think>b｜DSML｜"


ALPHABET = [
    "a", "\n", "\n\n", "<", "</", '"', '">', "é", "🌊", "<think>", "</think>", "｜DSML｜", "｜", "<｜DSML｜ calls>",
    CLOSE, INVOKE, END, "</｜DSML｜ invoke>",
    '<｜DSML｜ invoke name="', '<｜DSML｜ parameter name="', '" string=',
    '"true">', '"false">', "</｜DSML｜ parameter>", "{", "1", " calls>", "stop", "st",
]  # fmt: skip
PIECES = st.lists(st.sampled_from(ALPHABET), max_size=30)


def check_streamed_equals_whole(parts: list[str], seed: int, start: ParseStart, tools: bool, stops: list[str]) -> None:
    text = "".join(parts)
    reason = random.Random(seed).choice([STOP, LENGTH])
    options: dict[str, Any] = {"start": start, "parse_calls": tools, "stops": stops}
    whole, streamed = make(**options), make(**options)
    thinking = start is ParseStart.REASONING
    rng = random.Random(seed)
    cuts = sorted({0, len(text), *(rng.randint(0, len(text)) for _ in range(rng.randint(0, 8)))})
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    expected = parse_text(whole, [text], thinking, reason)
    actual = parse_text(streamed, pieces, thinking, reason)
    assert actual.message == expected.message
    assert (streamed.finish_reason, streamed.stopped_by, streamed.counts) == (whole.finish_reason, whole.stopped_by, whole.counts)
    if not tools and start is ParseStart.CONTENT and not stops:
        assert expected.message["content"] == text.replace("</think>", "").replace("<think>", "")
    if reason is STOP and whole.finish_reason == "tool_calls" and not whole.counts.malformed_calls:
        for call in expected.message["tool_calls"]:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


CASES = {
    "parts": PIECES,
    "seed": st.integers(0, 2**32),
    "start": st.sampled_from(list(ParseStart)),
    "tools": st.booleans(),
    "stops": st.sampled_from([[], ["stop"], ["a\n", "st", "\n\n"]]),
}


@settings(max_examples=1000, deadline=None)
@given(**CASES)
def test_any_text_parses_the_same_in_pieces_and_as_a_whole(**case: Any) -> None:
    check_streamed_equals_whole(**case)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_any_text_parses_the_same_in_pieces_and_as_a_whole_at_length() -> None:
    rng = random.Random(7)
    for seed in range(100_000):
        parts = rng.choices(ALPHABET, k=rng.randint(0, 30))
        stops: list[str] = rng.choice([[], ["stop"], ["a\n", "st", "\n\n"]])
        check_streamed_equals_whole(parts, seed, rng.choice(list(ParseStart)), rng.random() < 0.7, stops)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 4200), max_size=60), st.sampled_from(list(ParseStart)), st.booleans(), st.integers(1, 7))
def test_any_token_ids_parse_the_same_step_by_step(ids: list[int], start: ParseStart, tools: bool, step: int) -> None:
    options: dict[str, Any] = {"start": start, "parse_calls": tools}
    thinking = start is ParseStart.REASONING
    whole = parse_ids(make(**options), ids, thinking=thinking, step=1000)
    streamed = parse_ids(make(**options), ids, thinking=thinking, step=step)
    assert (streamed.message, streamed.tokens) == (whole.message, whole.tokens)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(1, 5))
def test_plain_answers_are_lossless(text: str, step: int) -> None:
    ids = TOKENIZER.encode_plain(text)
    answer = parse_ids(make(parse_calls=True), [*ids, TOKENIZER.added["<｜end▁of▁sentence｜>"]], step=step)
    assert answer.message["content"] == text
    assert answer.tokens["content"] == list(range(len(ids)))


class CountingMarkers(scanner.Markers):
    """Counts the characters that a search walks over."""

    walked = 0

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        found = super().find(text, start)
        CountingMarkers.walked += (found[0] + len(found[1]) if found else len(text)) - start
        return found

    def overlap(self, text: str, start: int) -> int:
        CountingMarkers.walked += min(len(text) - start, 64)
        return super().overlap(text, start)


@pytest.mark.parametrize(
    "unit",
    [
        "<｜DSML｜ calls>",
        '<｜DSML｜ invoke name="',
        INVOKE + '<｜DSML｜ parameter name="',
        INVOKE + '<｜DSML｜ parameter name="a" string="false">',
        "｜DSML｜",
        "</think>",
        "\n\n<",
    ],
)
@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("piece", [10**6, 7])
def test_work_grows_linearly_with_floods_of_openers(monkeypatch: pytest.MonkeyPatch, unit: str, tools: bool, piece: int) -> None:
    monkeypatch.setattr("server.output_parser.Markers", CountingMarkers)
    text = unit * (20_000 // len(unit))
    walked = []
    for flood in (text, text * 2):
        CountingMarkers.walked = 0
        parser = make(parse_calls=tools)
        parse_text(parser, [flood[i : i + piece] for i in range(0, len(flood), piece)], reason=LENGTH)
        walked.append(CountingMarkers.walked)
    assert walked[1] <= 2.2 * walked[0] + 1000
    assert walked[1] <= 40 * 2 * len(text)


def test_a_megabyte_of_openers_parses_in_seconds_not_minutes() -> None:
    text = (INVOKE + '<｜DSML｜ parameter name="a" string="true">') * 16_000
    assert len(text) > 2**20
    parse_text(make(parse_calls=True), [text], reason=LENGTH)
