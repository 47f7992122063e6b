from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.models import tiny
from engine.models.tiny_text import control_tokens
from engine.tokenizer import IncrementalDetokenizer, Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "model" / "tiny-a-fp8"
BOS = "<｜begin▁of▁sentence｜>"

TOKENIZER = Tokenizer(json.loads(tiny.TOKENIZER_FILE.read_text(encoding="utf-8")), tiny.tokenizer_config())
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
MIXED = st.lists(st.one_of(TEXT, st.sampled_from(control_tokens())), max_size=8).map("".join)


def test_control_tokens_have_the_first_ids_in_order() -> None:
    assert [TOKENIZER.token_id(token) for token in control_tokens()] == list(range(18))
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, len(TOKENIZER)) == (0, 1, 4096)


def test_every_byte_has_a_token() -> None:
    covered = {TOKENIZER.token_bytes(i) for i in range(len(TOKENIZER))}
    assert all(bytes([byte]) in covered for byte in range(256))


def test_every_digit_is_a_token_of_its_own() -> None:
    ids = TOKENIZER.encode("Pay 20260 in 7 days")
    assert [TOKENIZER.decode([i]) for i in ids if any(c.isdigit() for c in TOKENIZER.decode([i]))] == list("202607")


@settings(max_examples=300, deadline=None)
@given(MIXED)
def test_both_encoders_round_trip_any_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    plain = TOKENIZER.encode_plain(text)
    assert TOKENIZER.decode(plain) == text
    assert not set(plain) & set(TOKENIZER.added.values())


@settings(max_examples=300, deadline=None)
@given(MIXED)
def test_ranges_of_all_control_tokens_encode_as_the_whole_text(text: str) -> None:
    ranges, position, ids = [], 0, TOKENIZER.encode(text)
    for token in ids:
        end = position + len(TOKENIZER.token_bytes(token))
        if token in TOKENIZER.added.values():
            ranges.append((len(text.encode()[:position].decode()), len(text.encode()[:end].decode())))
        position = end
    assert TOKENIZER.encode_ranges(text, ranges) == ids
    assert TOKENIZER.encode_ranges(text, []) == TOKENIZER.encode_plain(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 4095), max_size=60), st.integers(1, 5))
def test_incremental_text_equals_the_whole_and_no_piece_is_half_a_character(ids: list[int], step: int) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)] + [detokenizer.flush()]
    assert "".join(pieces) == TOKENIZER.decode(ids)


def test_unfinished_character_waits_for_its_last_token() -> None:
    ids = TOKENIZER.encode("😀")
    assert len(ids) == 4
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀"]
    detokenizer.push(ids[:2])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(TOKENIZER.encode("ok")) == "ok"


@pytest.mark.parametrize("text", ["Hi", "", BOS, f"{BOS}Hi", f"{BOS}<｜User｜>Hi"])
def test_bos_is_inserted_once_and_never_doubled(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special=True)
    assert ids[0] == TOKENIZER.bos_id
    assert ids.count(TOKENIZER.bos_id or 0) == 1
    assert BOS in text or TOKENIZER.bos_id not in TOKENIZER.encode(text)


def test_bos_is_not_inserted_where_the_checkpoint_says_no() -> None:
    golden = Tokenizer.from_dir(GOLDEN)
    assert golden.encode("Hi", add_special=True) == golden.encode("Hi")
    assert len(golden) == 512


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert TOKENIZER.decode([4096, 10**6]) == ""


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({}, "tokenizer.json is missing"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": "[]"}, "not a JSON object"),
        ({"tokenizer.json": '{"model": 3}'}, "not a tokenizer"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": "x.py"}}'}, "auto_map"),
    ],
)
def test_unusable_directory_is_named(tmp_path: Path, files: dict[str, str], names: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=names) as caught:
        Tokenizer.from_dir(tmp_path)
    assert caught.value.hint


def test_missing_control_token_is_named() -> None:
    with pytest.raises(CheckpointError, match="User"):
        TOKENIZER.token_id("<｜User")
