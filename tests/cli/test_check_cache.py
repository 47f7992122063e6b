"""check-cache against a server whose cache follows the rule, and against ones that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_cli.answer_tokens import first_difference
from deepinfer_cli.cache_rule import Predictor, cap
from deepinfer_cli.cache_shortfall import ArenaCounts, why_not_as_predicted
from tests.cli.fake_server import serving

Dix = Callable[..., Any]


def test_same_tokens_and_predicted_hits_exit_0(dix: Dix) -> None:
    with serving() as server:
        ran = dix("check-cache", "--port", server.port, "--turns", 3, "--prompt-tokens", 400, "--json")
    assert ran.code == 0
    turns = ran.json["turns"]
    assert [turn["cached_tokens"] for turn in turns] == [turn["predicted_tokens"] for turn in turns]
    assert turns[0]["cached_tokens"] == 0
    # 400 prompt tokens: the last aligned position below is 384, and the second prompt is long enough to use it.
    assert turns[1]["cached_tokens"] == 384
    assert all(turn["different_at"] is None for turn in turns)


def test_prompt_sizes_follow_the_options(dix: Dix) -> None:
    with serving() as server:
        ran = dix("check-cache", "--port", server.port, "--turns", 2, "--prompt-tokens", 300, "--growth", 200, "--json")
    assert [turn["prompt_tokens"] for turn in ran.json["turns"]] == [300, 500]


def test_each_turn_is_sent_without_then_with_the_cache_and_identical_messages(dix: Dix) -> None:
    with serving() as server:
        dix("check-cache", "--port", server.port, "--turns", 2, "--prompt-tokens", 300)
        sent = server.requests
    assert [body["prefix_cache"] for body in sent] == [False, True, False, True]
    assert sent[0]["messages"] == sent[1]["messages"]
    assert {body["session_id"] for body in sent} == {"check-cache-0"}
    assert all(body["temperature"] == 0 and body["thinking"] == {"type": "disabled"} for body in sent)


def test_a_second_run_on_a_warm_cache_is_still_as_predicted(dix: Dix) -> None:
    with serving() as server:
        dix("check-cache", "--port", server.port, "--prompt-tokens", 400)
        ran = dix("check-cache", "--port", server.port, "--prompt-tokens", 400, "--json")
    assert ran.code == 0
    assert ran.json["turns"][0]["cached_tokens"] == cap(400) == 256
    assert [turn["cached_tokens"] for turn in ran.json["turns"]] == [turn["predicted_tokens"] for turn in ran.json["turns"]]


def test_fewer_tokens_on_a_full_arena_are_explained(dix: Dix) -> None:
    with serving(cache="full") as server:
        ran = dix("check-cache", "--port", server.port, "--turns", 3, "--prompt-tokens", 400)
        again = dix("check-cache", "--port", server.port, "--turns", 2, "--prompt-tokens", 400, "--seed", 1, "--json")
    assert ran.code == 0
    assert "256 cached tokens, 384 predicted: the arena is full" in ran.err
    assert "--hicache-size-gb, now 0.125 GiB a rank" in " ".join(ran.err.split())
    assert [turn["reason"][:17] for turn in again.json["turns"]] == ["", "the arena is full"]


def test_states_at_the_end_of_answers_are_part_of_the_prediction(dix: Dix) -> None:
    with serving(cache="answers") as server:
        options = ("--turns", 2, "--prompt-tokens", 400, "--max-tokens", 150)
        turns = dix("check-cache", "--port", server.port, *options, "--json").json["turns"]
    # 400 prompt and 150 output tokens: a state at 512 beside those at 256 and 384.
    assert [(turn["cached_tokens"], turn["predicted_tokens"]) for turn in turns] == [(0, 0), (512, 512)]


FULL, ROOMY = ArenaCounts(40, 2, 0, 2**27), ArenaCounts(0, 0, 90, 2**27)


@pytest.mark.parametrize(
    ("cached", "after", "words"),
    [
        (1024, ROOMY, "another run"),
        (768, FULL, "only kept while frames are free"),
        (768, ROOMY, "store_tail_state"),
        (0, FULL, "was evicted"),
        (0, ROOMY, "dix cache explain"),
    ],
)
def test_reason_follows_from_what_the_server_counted(cached: int, after: ArenaCounts, words: str) -> None:
    assert words in why_not_as_predicted(cached, 896, 768, ROOMY, after)


def test_server_without_metrics_gives_no_counts() -> None:
    assert ArenaCounts.of({}) == ArenaCounts()


def test_a_different_token_exits_1_and_is_named(dix: Dix) -> None:
    with serving(cache="wrong") as server:
        ran = dix("check-cache", "--port", server.port, "--prompt-tokens", 400)
    assert ran.code == 1
    assert "different at 0" in ran.out
    assert "bounded replay" not in ran.out + ran.err


def test_a_difference_behind_approximate_windows_is_explained(dix: Dix) -> None:
    with serving(cache="approximate") as server:
        ran = dix("check-cache", "--port", server.port, "--prompt-tokens", 400)
    assert ran.code == 1
    assert "prompts resumed by bounded replay" in ran.out + ran.err


def test_a_damaged_page_exits_1_although_the_tokens_are_the_same(dix: Dix) -> None:
    with serving(cache="damaged") as server:
        ran = dix("check-cache", "--port", server.port, "--prompt-tokens", 400)
    assert ran.code == 1
    assert "damaged stored pages found: 2" in ran.out


def test_no_hit_exits_5(dix: Dix) -> None:
    with serving(cache="off") as server:
        ran = dix("check-cache", "--port", server.port, "--prompt-tokens", 400)
    assert ran.code == 5
    assert "nothing proved" in ran.out


def test_an_absent_server_exits_4(dix: Dix) -> None:
    with serving() as server:
        port = server.port
    ran = dix("check-cache", "--port", port)
    assert ran.code == 4
    assert ran.err.startswith(f"error: http://127.0.0.1:{port} does not answer")


def test_a_prompt_that_cannot_hit_is_refused(dix: Dix) -> None:
    ran = dix("check-cache", "--port", 1, "--prompt-tokens", 267)
    assert ran.code == 2
    assert "268" in ran.err


@pytest.mark.parametrize(("tokens", "most"), [(267, 0), (268, 128), (395, 128), (396, 256), (1000, 768)])
def test_cap_leaves_the_kept_tokens_to_be_computed(tokens: int, most: int) -> None:
    assert cap(tokens) == most


def test_prediction_takes_the_largest_state_on_the_path() -> None:
    predictor = Predictor()
    assert predictor.predict(1024, 0, 0) == 0
    predictor.store(1024)
    # states at 768 and 896; a prompt of 1,030 tokens may use up to 768, one of 1,324 up to 1,152
    assert predictor.predict(1030, 1024, 768) == 768
    assert predictor.predict(1324, 1024, 896) == 896


@pytest.mark.parametrize(
    ("left", "right", "at"), [(["a"], ["a"], None), (["a", "b"], ["a", "c"], 1), (["a"], ["a", "b"], 1), ([], [], None)]
)
def test_first_difference(left: list[str], right: list[str], at: int | None) -> None:
    assert first_difference(left, right) == at
