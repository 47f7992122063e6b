"""Recipes: errors name key and value; the fingerprint follows the requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.bench.prompts import make_conversations
from deepinfer_cli.bench.recipe import load_recipe, parse_recipe, recipe_names
from deepinfer_cli.text import sized
from hicache.errors import ConfigError


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_parses(name: str) -> None:
    assert load_recipe(name).name == name


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "has no name"),
        ({"name": "x", "lod": {}}, "lod is not a recipe key"),
        ({"name": "x", "load": 3}, "load is 3"),
        ({"name": "x", "load": {"turn": 3}}, "load.turn is not a recipe key"),
        ({"name": "x", "load": {"turns": "three"}}, "load.turns is 'three'"),
        ({"name": "x", "load": {"turns": True}}, "load.turns is True"),
        ({"name": "x", "load": {"turns": 0}}, "load.turns is 0"),
        ({"name": "x", "load": {"arrival": "sometimes"}}, "load.arrival is 'sometimes'"),
        ({"name": "x", "load": {"think_time_s": "soon"}}, "load.think_time_s is 'soon'"),
        ({"name": "x", "limits": {"max_failed": "150%"}}, "limits.max_failed is 1.5"),
        ({"name": 3}, "name is 3"),
    ],
)
def test_errors_name_the_key_and_the_value(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(document, "r.toml")
    assert message in str(caught.value)
    assert "r.toml" in str(caught.value)
    assert caught.value.hint


def test_units_are_understood() -> None:
    recipe = parse_recipe(
        {"name": "x", "load": {"think_time_s": "250ms", "rate": 2}, "limits": {"max_failed": "5%", "max_duration_s": "2m"}}, "r"
    )
    assert (recipe.load.think_time_s, recipe.load.rate) == (0.25, 2.0)
    assert (recipe.limits.max_failed, recipe.limits.max_duration_s) == (0.05, 120.0)


def test_the_fingerprint_follows_the_requests_only() -> None:
    recipe = load_recipe("smoke")
    assert dataclasses.replace(recipe, description="other").fingerprint() == recipe.fingerprint()
    other = dataclasses.replace(recipe, prompt=dataclasses.replace(recipe.prompt, seed=43))
    assert other.fingerprint() != recipe.fingerprint()


def test_prompts_are_deterministic_and_sized() -> None:
    recipe = load_recipe("smoke")
    first, again = make_conversations(recipe, words), make_conversations(recipe, words)
    assert first == again
    assert len({c.system for c in first}) == 1
    assert len({turn for c in first for turn in c.turns}) == recipe.requests
    for conversation in first:
        assert words(conversation.system) == recipe.prompt.system_tokens
        assert [words(t) for t in conversation.turns] == [340, 160, 160, 160]


@pytest.mark.parametrize("tokens", [1, 2, 99, 1000])
def test_text_holds_the_asked_tokens(tokens: int) -> None:
    assert words(sized("seed", tokens, words)) == tokens


def test_a_missing_recipe_names_the_near_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("smok")
    assert "smoke" in caught.value.hint
