"""Hashes of a prompt: every one covers all tokens before it, and they are those of the slow construction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache.keys import KeySpace
from server.prompt_keys import BLOCK, digest, prompt_keys

prompts = st.integers(0, 400).flatmap(lambda length: st.lists(st.integers(0, 2**32 - 1), min_size=length, max_size=length))


@given(prompts, st.sampled_from(["", "salt"]))
def test_the_chain_is_that_of_its_blocks_one_by_one(tokens: list[int], salt: str) -> None:
    chain = [salt.encode()]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain.append(digest(chain[-1], tokens[start : start + BLOCK]))
    assert prompt_keys(tokens, salt).chain == chain


@given(prompts)
def test_with_a_space_the_chain_is_the_page_keys(tokens: list[int]) -> None:
    space = KeySpace("model", "format", BLOCK)
    keys = prompt_keys(tokens, "salt", space)
    assert (keys.chain, keys.paged) == ([b"salt", *space.page_keys(tokens, "salt")], True)


@given(prompts.filter(bool), st.data())
def test_the_hash_of_the_whole_knows_every_token_and_the_salt(tokens: list[int], data: st.DataObject) -> None:
    space = data.draw(st.sampled_from([None, KeySpace("model", "format", BLOCK)]))
    whole = prompt_keys(tokens, "", space).whole
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    others = [prompt_keys(ids, "", space).whole for ids in (changed, tokens[:-1], [*tokens, 0])]
    assert whole == prompt_keys(list(tokens), "", space).whole
    assert whole not in [*others, prompt_keys(tokens, "salt", space).whole]
