import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.random_keys import GOLDEN, Purpose, draw53, draws53, mix64

seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**24)


def test_the_generator_is_splitmix64():
    # First outputs for the seeds 0 and 1234567, as published with the algorithm.
    assert mix64(GOLDEN) == 0xE220A8397B1DCDAF
    assert mix64(1234567 + GOLDEN) == 6457827717110365317


@given(rows=st.lists(st.tuples(seeds, positions), min_size=1, max_size=8), purpose=st.sampled_from(Purpose))
def test_rows_equal_the_scalar_form(rows, purpose):
    got = draws53([seed for seed, _ in rows], [position for _, position in rows], purpose)
    assert got.tolist() == [draw53(seed, position, purpose) for seed, position in rows]


def test_streams_of_positions_purposes_and_seeds_differ():
    numbers = {draw53(seed, position, purpose) for seed in range(20) for position in range(200) for purpose in Purpose}
    assert len(numbers) == 20 * 200 * 3


def test_numbers_are_uniform():
    numbers = draws53([7] * 100_000, list(range(100_000)))
    counts = np.bincount(numbers >> 46, minlength=128)  # top 7 bits
    expected = 100_000 / 128
    assert ((counts - expected) ** 2 / expected).sum() < 181.99  # chi-square, 127 degrees of freedom, 99.9 %
