import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.token_range import first_outside, pack_ids


@given(st.lists(st.integers(-3, 12)), st.integers(1, 10))
def test_the_first_id_outside_is_the_one_that_a_plain_search_finds(ids, size):
    assert first_outside(ids, pack_ids(ids), size) == next((i for i in ids if not 0 <= i < size), None)


@pytest.mark.parametrize("bad", [-1, 10, 2**32, 2**63, -(2**70)])
def test_ids_of_any_size_are_told_apart(bad):
    ids = [3, 9, bad, 11]
    assert first_outside(ids, pack_ids(ids), 10) == bad
    assert (pack_ids(ids) is None) == (not 0 <= bad < 2**32)


def test_ids_that_are_no_integers_are_not_taken():
    with pytest.raises(TypeError):
        pack_ids([1, 2.5])
