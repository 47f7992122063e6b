"""Page keys are a pure function of root and tokens."""

from __future__ import annotations

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from hicache.keys import KeySpace, derive_salt, lp

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def space(**changes: object) -> KeySpace:
    return KeySpace(**{"fingerprint": "m", "kv_format": "f", "page_tokens": 4, **changes})  # type: ignore[arg-type]


def test_first_key_follows_the_written_construction() -> None:
    base = hashlib.sha256(
        b"hicache\0" + struct.pack("<I", 1) + lp(b"m") + lp(b"f") + struct.pack("<I", 4) + lp(b"1") + lp(b"") + lp(b"")
    ).digest()
    root = hashlib.sha256(base + struct.pack("<Q", 0)).digest()
    tenant = hashlib.sha256(root + lp(b"salt")).digest()
    expected = hashlib.sha256(tenant + struct.pack("<4I", 1, 2, 3, 2**32 - 1)).digest()
    assert space().page_keys([1, 2, 3, 2**32 - 1, 9], "salt") == [expected]


@given(tokens_lists, tokens_lists)
def test_keys_agree_exactly_on_the_common_full_pages(first: list[int], second: list[int]) -> None:
    keys = space()
    a, b = keys.page_keys(first), keys.page_keys(second)
    assert len(a) == len(first) // 4
    for page, (left, right) in enumerate(zip(a, b, strict=False)):
        assert (left == right) == (first[: 4 * page + 4] == second[: 4 * page + 4])


def test_every_field_of_the_root_separates_the_keys() -> None:
    variants = [
        space(),
        space(fingerprint="m2"),
        space(kv_format="f2"),
        space(numerics="2"),
        space(adapter="a"),
        space(secret=b"s"),
        space(fingerprint="mf", kv_format=""),
    ]
    keys = [v.page_keys(range(4))[0] for v in variants] + [space().page_keys(range(4), "salt")[0]]
    assert len(set(keys)) == len(keys)


def test_reset_makes_all_earlier_keys_unreachable_and_keeps_the_chain_deterministic() -> None:
    first, second = space(), space()
    before = first.page_keys(range(8))
    first.reset()
    assert not set(before) & set(first.page_keys(range(8)))
    second.reset()
    assert first.page_keys(range(8)) == second.page_keys(range(8))


def test_extra_bytes_change_their_page_and_all_later_ones() -> None:
    keys = space()
    plain, image = keys.page_keys(range(12)), keys.page_keys(range(12), extras={1: b"digest"})
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False]


def test_a_clients_salt_is_added_to_the_derived_one_and_never_replaces_it() -> None:
    salts = [derive_salt(b"secret", *names) for names in (("k1",), ("k2",), ("k1", "x"), ("k2", "x"), ("k1x",))]
    assert len({*salts, "x", derive_salt(b"other", "k1")}) == 7
