"""Sweeps: one recipe with some of its values varied -> cells, and the order in which they run."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_cli.bench.recipe import Recipe, parse_recipe
from hicache.errors import ConfigError

ORDERS = ("abba", "random")


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination: the recipe to run, the server to run it on, and the words that tell it from the others.

    values: every varied key. engine: settings of a server that is started for this cell. url: "" means the one given to the command.
    """

    recipe: Recipe
    values: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, str] = field(default_factory=dict)
    url: str = ""

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or self.recipe.name


def cells(recipe: Recipe, vary: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """The product of all values. Keys are those of recipe tables, `url`, or settings of the server (`engine.…`, `hicache.…`)."""
    out = []
    for combination in itertools.product(*vary.values()):
        values = dict(zip(vary, combination, strict=True))
        changes = {key: value for key, value in values.items() if not _is_server_key(key)}
        engine = {key: str(value) for key, value in values.items() if key.startswith(("engine.", "hicache."))}
        out.append(Cell(with_values(recipe, changes), values, engine, str(values.get("url", ""))))
    return out


def _is_server_key(key: str) -> bool:
    return key == "url" or key.startswith(("engine.", "hicache."))


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with some keys changed, checked as if it had been written so. Raises: ConfigError."""
    document: dict[str, Any] = {key: value for key, value in recipe.plain().items() if key != "vary"}
    for key, value in values.items():
        table, _, name = key.partition(".")
        if not name or not isinstance(document.get(table), dict):
            raise ConfigError(f"{key} cannot be varied", hint="a recipe's table.key, url, or a setting such as engine.max_num_seqs")
        document[table] = {**document[table], name: value}
    tables = {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value for key, value in document.items()
    }
    return parse_recipe(tables, recipe.name)


def parse_varied(pairs: Sequence[str]) -> dict[str, list[Any]]:
    """`load.concurrency=1,2,4` -> key and values: numbers and true or false where they look like it, else text."""
    out: dict[str, list[Any]] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key or not text:
            raise ConfigError(f"--vary {pair!r} is not KEY=V1,V2", hint="for example --vary load.concurrency=1,2,4")
        out[key.strip()] = [_literal(item) for item in text.split(",")]
    return out


def _literal(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()
    return value if isinstance(value, (bool, int, float)) else text.strip()


def in_order(count: int, repeats: int, order: str, seed: int = 42) -> list[int]:
    """Which cell runs when: each once per block. abba: every second block backwards, so that a drift of the machine hits all alike."""
    out: list[int] = []
    rng = random.Random(f"order {seed}")
    for block in range(repeats):
        indices = list(range(count))
        if order == "random":
            rng.shuffle(indices)
        elif block % 2:
            indices.reverse()
        out += indices
    return out
