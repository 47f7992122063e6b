"""When a prompt resumes by replay, and how much is replayed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.policy import restore_cap
from hicache.replay import ReplayMode, WindowReplay, check_replay, replayed_tokens

PAGE, WINDOW, LAYERS, KEEP = 128, 128, 20, 140


def rule(mode: str, min_restore_tokens: int = 128) -> WindowReplay:
    return WindowReplay(mode, WINDOW, LAYERS, PAGE, KEEP, min_restore_tokens)


def keys_of(num_pages: int) -> list[bytes]:
    return [bytes([page % 256, page // 256]) for page in range(num_pages)]


def test_released_model_replays_one_window_or_one_for_each_encoder_layer() -> None:
    assert replayed_tokens(ReplayMode.BOUNDED, WINDOW, LAYERS, PAGE) == 128
    assert replayed_tokens(ReplayMode.EXACT, WINDOW, LAYERS, PAGE) == 2560
    assert replayed_tokens(ReplayMode.OFF, WINDOW, LAYERS, PAGE) == 0


@pytest.mark.parametrize("mode", list(ReplayMode))
@given(
    num_pages=st.integers(0, 400),
    num_tokens=st.integers(1, 60_000),
    state_page=st.integers(0, 400),
    min_restore_tokens=st.integers(1, 5000),
)
def test_replay_lies_on_stored_pages_and_beyond_the_state(
    mode: ReplayMode, num_pages: int, num_tokens: int, state_page: int, min_restore_tokens: int
) -> None:
    replay, cap = rule(mode, min_restore_tokens), restore_cap(num_tokens, KEEP, PAGE)
    reach = min(num_pages * PAGE, cap)
    restored = min(state_page * PAGE, reach)
    end = replay.end(keys_of(num_pages), num_pages, num_tokens, restored)
    if end:
        assert end == reach
        assert end - replay.tokens > restored
        assert end - replay.tokens >= min_restore_tokens
        assert mode is not ReplayMode.BOUNDED or end - restored > 2048
    else:
        least = {ReplayMode.OFF: reach, ReplayMode.BOUNDED: 2048, ReplayMode.EXACT: 2560}[mode]
        assert reach - restored <= least or reach - replay.tokens < min_restore_tokens


@pytest.mark.parametrize(("mode", "again"), [("bounded", 0), ("exact", 5120)])
def test_only_an_approximate_replay_happens_once_at_a_page_end(mode: str, again: int) -> None:
    replay, keys = rule(mode), keys_of(40)
    assert replay.end(keys, 40, 9000, 0) == 5120
    replay.resumed(keys[39])
    assert replay.end(keys, 40, 9000, 0) == again
    assert replay.end(keys, 39, 9000, 0) == 4992
    for number in range(5000):  # the memory of such places is bounded
        replay.resumed(number.to_bytes(8, "little"))
    assert replay.end(keys, 40, 9000, 0) == 5120


def test_approximation_is_refused_where_answers_must_not_depend_on_the_cache() -> None:
    with pytest.raises(ConfigError, match=r"hicache.replay is bounded") as found:
        check_replay("bounded", batch_invariant=True)
    assert "hicache.replay=exact" in (found.value.hint or "")
    for mode, invariant in (("exact", True), ("off", True), ("bounded", False)):
        check_replay(mode, batch_invariant=invariant)
