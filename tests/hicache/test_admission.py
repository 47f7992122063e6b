"""The sketch of seen keys and what it admits, and which large prompts come again."""

from __future__ import annotations

import random

import pytest

from hicache.admission import AdmissionPolicy, KeySketch, LargePrompts


def test_threshold_of_one_admits_everything_unseen() -> None:
    assert AdmissionPolicy(1).admits([b"k" * 32] * 3) == 3


@pytest.mark.parametrize("threshold", [2, 3])
def test_pages_are_admitted_from_that_sight_on_and_only_in_front_of_the_first_unknown_one(threshold: int) -> None:
    rng = random.Random(0)
    policy, keys = AdmissionPolicy(threshold), [rng.randbytes(32) for _ in range(5)]
    for sight in range(1, threshold + 1):
        policy.see(keys[:3])
        assert policy.admits(keys) == (3 if sight == threshold else 0)
    policy.see(keys[4:])
    assert policy.admits(keys) == 3


def test_sketch_forgets_a_key_for_the_one_that_takes_its_slot_and_counts_no_strangers_sights() -> None:
    sketch, key = KeySketch(), bytes(32)
    other = key[:2] + b"x" * 30
    sketch.see(key)
    assert (sketch.sights(key), sketch.sights(other)) == (1, 0)
    sketch.see(other)
    assert (sketch.sights(key), sketch.sights(other)) == (0, 1)
    for _ in range(300):
        sketch.see(other)
    assert sketch.sights(other) == 255


def test_sketch_remembers_most_of_its_last_keys() -> None:
    rng, sketch = random.Random(1), KeySketch()
    keys = [rng.randbytes(32) for _ in range(20_000)]
    for key in keys:
        sketch.see(key)
    assert sum(sketch.sights(key) == 1 for key in keys) > 16_000


def test_large_prompt_is_known_when_it_comes_again_longer_and_a_small_one_by_its_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.admission._MOST_LARGE", 2)
    prompts, large = [[bytes([number, at]) for at in range(9)] for number in range(4)], LargePrompts(5.0)
    assert [large.num_known(prompts[0][:5], 0) for _ in range(2)] == [0, 0]
    assert [large.num_known(prompts[0][:length], 0) for length in (6, 6, 9)] == [0, 6, 9]
    assert large.num_known(prompts[0], 4) == 4  # few enough are new
    assert [large.num_known(prompt, 1) for prompt in prompts[1:3]] == [1, 1]
    assert [large.num_known(prompts[number], 0) for number in (2, 0)] == [9, 0]  # the earliest is forgotten
