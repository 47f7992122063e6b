"""Page keys are a pure function of root and tokens."""

from __future__ import annotations

import hashlib
import struct
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.keys import KeySpace, derive_salt, hash_chain, lp, pack_tokens
from hicache.native_keys import Chain, open_chain

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


@given(tokens_lists, st.integers(1, 9), st.integers(0, 8))
def test_extended_keys_are_those_of_all_tokens(tokens: list[int], page_tokens: int, known: int) -> None:
    keys = space(page_tokens=page_tokens)
    whole = keys.page_keys(tokens, "salt")
    assert keys.extend(whole[:known], tokens, "salt") == whole


def test_extra_bytes_change_their_page_and_all_later_ones() -> None:
    keys = space()
    plain, image = keys.page_keys(range(12)), keys.page_keys(range(12), extras={1: b"digest"})
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False]


def test_a_clients_salt_is_added_to_the_derived_one_and_never_replaces_it() -> None:
    salts = [derive_salt(b"secret", *names) for names in (("k1",), ("k2",), ("k1", "x"), ("k2", "x"), ("k1x",))]
    assert len({*salts, "x", derive_salt(b"other", "k1")}) == 7


@pytest.fixture(scope="module", params=["as this processor allows", "portable"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = open_chain(tmp_path_factory.mktemp("native"), portable=request.param == "portable")
    if chain is None:
        pytest.skip("no compiler, or no SHA instructions")
    return chain


@given(st.binary(min_size=32, max_size=32), tokens_lists, st.integers(1, 40))
def test_compiled_chain_gives_the_same_keys(compiled: Chain, root: bytes, tokens: list[int], page_tokens: int) -> None:
    packed = pack_tokens(tokens)
    assert compiled(root, packed, page_tokens) == hash_chain(root, packed, page_tokens)


def test_key_space_uses_the_compiled_chain_except_for_pages_with_extras(compiled: Chain) -> None:
    plain, fast = space(page_tokens=128), space(page_tokens=128)
    calls: list[int] = []
    fast.chain = lambda root, tokens, size: calls.append(size) or compiled(root, tokens, size)  # type: ignore[func-returns-value]
    tokens = list(range(1000))
    assert fast.page_keys(tokens, "salt") == plain.page_keys(tokens, "salt")
    assert fast.page_keys(tokens, extras={2: b"x"}) == plain.page_keys(tokens, extras={2: b"x"})
    assert calls == [128]


def test_without_a_compiler_keys_are_hashed_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert open_chain(tmp_path) is None


def test_tokens_that_are_machine_integers_already_have_the_same_keys() -> None:
    tokens = [5, 2**32 - 1, 0, 7, 9]
    assert space().page_keys(array("I", tokens)) == space().page_keys(tokens)
    assert space().page_keys(array("Q", tokens)) == space().page_keys(tokens)
