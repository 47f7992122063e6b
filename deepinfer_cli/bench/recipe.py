"""Workloads as data: the schema of `recipes/*.toml`. Errors name the key and the value."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.settings import suggest
from deepinfer_cli.units import parse_duration, parse_fraction
from hicache.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent
# An installed wheel carries the recipes inside the package; a checkout keeps them at its root.
FOLDER = PACKAGE / "recipes" if (PACKAGE / "recipes").is_dir() else PACKAGE.parent / "recipes"
ARRIVALS = ("closed", "constant", "poisson", "trace")
CACHE_STATES = ("cold", "asis")


@dataclass(frozen=True, slots=True)
class Load:
    """When conversations start. closed: `concurrency` at a time, however long they take.

    constant, poisson: `rate` starts a second, however many run. trace: at `times_s`, of which there are as many as conversations;
    a recipe names them, or a file of one time per line in `times_file` (beside the recipe).
    """

    arrival: str = "closed"
    concurrency: int = 4
    conversations: int = 8
    turns: int = 1
    rate: float = 1.0
    think_time_s: float = 0.0
    times_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, in tokens by the server's own count. The system text is the same in every conversation."""

    seed: int = 42
    system_tokens: int = 0
    first_tokens: int = 256
    turn_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Sampling:
    """What comes back. `ignore_eos` gives every answer the same length, where the server knows the field."""

    tokens: int = 64
    ignore_eos: bool = True
    temperature: float = 0.0
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class CacheState:
    """What the prefix cache holds at the start. cold: reset before; bypass: every request goes around it."""

    state: str = "asis"
    bypass: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run counts. `max_failed`: share of requests, None takes `bench.max_failed`."""

    max_failed: float | None = None
    max_duration_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """One workload."""

    name: str
    description: str = ""
    load: Load = field(default_factory=Load)
    prompt: Prompt = field(default_factory=Prompt)
    output: Sampling = field(default_factory=Sampling)
    cache: CacheState = field(default_factory=CacheState)
    limits: Limits = field(default_factory=Limits)
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for ok, key, value, allowed in (
            (bool(self.name), "name", self.name, "a word"),
            (self.load.arrival in ARRIVALS, "load.arrival", self.load.arrival, ", ".join(ARRIVALS)),
            (self.load.concurrency >= 1, "load.concurrency", self.load.concurrency, ">= 1"),
            (self.load.conversations >= 1, "load.conversations", self.load.conversations, ">= 1"),
            (self.load.turns >= 1, "load.turns", self.load.turns, ">= 1"),
            (self.load.rate > 0, "load.rate", self.load.rate, "> 0 conversations per second"),
            (self.load.think_time_s >= 0, "load.think_time_s", self.load.think_time_s, ">= 0 s"),
            (self.prompt.system_tokens >= 0, "prompt.system_tokens", self.prompt.system_tokens, ">= 0"),
            (self.prompt.first_tokens >= 1, "prompt.first_tokens", self.prompt.first_tokens, ">= 1"),
            (self.prompt.turn_tokens >= 1, "prompt.turn_tokens", self.prompt.turn_tokens, ">= 1"),
            (self.output.tokens >= 1, "output.tokens", self.output.tokens, ">= 1"),
            (self.output.temperature >= 0, "output.temperature", self.output.temperature, ">= 0"),
            (self.cache.state in CACHE_STATES, "cache.state", self.cache.state, ", ".join(CACHE_STATES)),
            (self.limits.max_failed is None or 0 <= self.limits.max_failed <= 1, "limits.max_failed", self.limits.max_failed, "0% to 100%"),
            (self.load.arrival != "trace" or _rising(self.load.times_s), "load.times_s", self.load.times_s, "rising times from 0 s"),
            (
                self.load.arrival != "trace" or len(self.load.times_s) == self.load.conversations,
                "load.conversations",
                self.load.conversations,
                f"{len(self.load.times_s)}, one per time",
            ),
            (self.limits.max_duration_s > 0, "limits.max_duration_s", self.limits.max_duration_s, "> 0 s"),
        ):
            if not ok:
                raise ConfigError(f"recipe key {key} is {value!r}", hint=f"allowed: {allowed}")

    @property
    def requests(self) -> int:
        return self.load.conversations * self.load.turns

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def fingerprint(self) -> str:
        """Changes with anything that changes the requests; the description does not."""
        facts = {key: value for key, value in self.plain().items() if key not in ("description", "limits", "vary")}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _rising(times_s: tuple[float, ...]) -> bool:
    return bool(times_s) and times_s[0] >= 0 and list(times_s) == sorted(times_s)


TABLES: dict[str, type[Any]] = {"load": Load, "prompt": Prompt, "output": Sampling, "cache": CacheState, "limits": Limits}


def parse_recipe(document: dict[str, Any], where: str) -> Recipe:
    """A TOML document -> Recipe. Raises: ConfigError naming key and value."""
    parts: dict[str, Any] = {}
    for key, value in document.items():
        if key in TABLES:
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {key} is {value!r}", hint=f"write a table: [{key}]")
            parts[key] = _table(TABLES[key], key, _counted(value) if key == "load" else value, where)
        elif key == "vary":
            parts[key] = parse_vary(value, where)
        elif key in ("name", "description"):
            parts[key] = _value(str, key, value, where)
        else:
            raise ConfigError(
                f"{where}: {key} is not a recipe key", hint=suggest(key, [*TABLES, "vary", "name", "description"], "recipes/smoke.toml")
            )
    if "name" not in parts:
        raise ConfigError(f"{where} has no name", hint='name = "…" in the first line')
    try:
        return Recipe(**parts)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", hint=error.hint) from None


def parse_vary(value: Any, where: str) -> dict[str, tuple[Any, ...]]:
    """`"load.concurrency" = [1, 2, 4]` -> key and values. Raises: ConfigError for keys that no table has."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: vary is {value!r}", hint='write a table: [vary], then "load.concurrency" = [1, 2, 4]')
    known = [f"{table}.{name}" for table, cls in TABLES.items() for name in typing.get_type_hints(cls)]
    for key, values in value.items():
        if key not in known:
            raise ConfigError(f"{where}: {key} cannot be varied", hint=suggest(key, known, "the tables of recipes/smoke.toml"))
        if not isinstance(values, (list, tuple)) or not values:
            raise ConfigError(f"{where}: vary {key} is {values!r}", hint="give a list of values")
    return {key: tuple(values) for key, values in value.items()}


def _counted(load: dict[str, Any]) -> dict[str, Any]:
    """As many conversations as there are times, where the recipe leaves it open."""
    times = load.get("times_s")
    return {"conversations": len(times), **load} if times and isinstance(times, (list, tuple)) else load


def _table(cls: type[Any], table: str, entries: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    for name in entries:
        if name not in hints:
            raise ConfigError(f"{where}: {table}.{name} is not a recipe key", hint=suggest(name, list(hints), "recipes/smoke.toml"))
    return cls(**{name: _value(hints[name], f"{table}.{name}", value, where) for name, value in entries.items()})


def _value(hint: Any, key: str, value: Any, where: str) -> Any:
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: {key} is {value!r}", hint=f"{key} takes a list")
        return tuple(_value(typing.get_args(hint)[0], key, item, where) for item in value)
    types = tuple(t for t in (typing.get_args(hint) or (hint,)) if t is not type(None))
    if float in types and isinstance(value, str):
        return parse_duration(value, f"{where}: {key}") if key.endswith("_s") else parse_fraction(value, f"{where}: {key}")
    if float in types and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, types) and not (isinstance(value, bool) and bool not in types):
        return value
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    raise ConfigError(f"{where}: {key} is {value!r}", hint=f"{key} takes {words[types[0]]}")


def load_recipe(name: str) -> Recipe:
    """A recipe by its name in `recipes/`, or a path. Raises: ConfigError when there is none or it is wrong."""
    path = Path(name) if name.endswith(".toml") or "/" in name else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(f"no recipe {name!r}", hint=suggest(name, recipe_names(), "dix bench list"))
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint="recipes/smoke.toml is an example") from None
    return parse_recipe(_with_times(document, path), str(path))


def _with_times(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """`load.times_file` -> `load.times_s`, and as many conversations, so that a recipe stands for itself afterwards."""
    load = document.get("load")
    if not isinstance(load, dict) or not isinstance(name := load.pop("times_file", None), str):
        return document
    try:
        times_s = [float(line) for line in (path.parent / name).read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: load.times_file {name}: {error}", hint="one time in seconds per line, rising") from None
    return {**document, "load": {**load, "times_s": times_s}}


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))
