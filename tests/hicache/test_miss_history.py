"""What a miss is told to be when the index alone would say that nothing is there."""

from __future__ import annotations

import pytest

from hicache.miss_history import MOST_REMEMBERED, MissHistory
from hicache.policy import Miss

KEYS = [bytes([i]) * 32 for i in range(4)]
SCOPED, OTHER = b"s" * 32, b"o" * 32


def test_prefix_of_an_aborted_prefill_is_named_until_its_state_is_stored() -> None:
    history = MissHistory(lambda key: False)
    history.cut_off([KEYS[2]])
    assert history.refine(Miss.NO_STATE, KEYS, None) is Miss.ABORTED
    assert history.refine(Miss.NO_PAGE, KEYS, None) is Miss.ABORTED
    assert history.refine(Miss.NO_STATE, KEYS[:2], None) is Miss.NO_STATE
    history.state_stored(KEYS[2])
    assert history.refine(Miss.NO_STATE, KEYS, None) is Miss.NO_STATE


@pytest.mark.parametrize("miss", [Miss.SHORT, Miss.BYPASS, Miss.KEEP_CAP, Miss.AUDIT])
def test_other_reasons_stand(miss: Miss) -> None:
    history = MissHistory(lambda key: True)
    history.cut_off(KEYS)
    history.prompt_stored(SCOPED, OTHER)
    assert history.refine(miss, KEYS, SCOPED) is miss


def test_prefix_under_another_salt_of_the_scope_is_named_while_it_is_stored() -> None:
    present = {OTHER}
    history = MissHistory(present.__contains__)
    history.prompt_stored(SCOPED, OTHER)
    assert history.refine(Miss.NO_PAGE, KEYS, SCOPED) is Miss.TENANT
    assert history.refine(Miss.NO_PAGE, KEYS, None) is Miss.NO_PAGE
    assert history.refine(Miss.NO_PAGE, KEYS, b"t" * 32) is Miss.NO_PAGE
    assert history.refine(Miss.NO_STATE, KEYS, SCOPED) is Miss.NO_STATE
    present.clear()
    assert history.refine(Miss.NO_PAGE, KEYS, SCOPED) is Miss.NO_PAGE


def test_own_prefix_that_was_evicted_is_no_other_tenants() -> None:
    history = MissHistory(lambda key: True)
    history.prompt_stored(SCOPED, KEYS[0])
    assert history.refine(Miss.NO_PAGE, KEYS, SCOPED) is Miss.NO_PAGE


def test_memory_is_bounded_and_the_latest_stay() -> None:
    history = MissHistory(lambda key: True)
    keys = [number.to_bytes(32, "big") for number in range(MOST_REMEMBERED + 1)]
    history.cut_off(keys)
    assert history.refine(Miss.NO_PAGE, keys[:1], None) is Miss.NO_PAGE
    assert history.refine(Miss.NO_PAGE, keys[1:2], None) is Miss.ABORTED
