"""What a server can do, learned before any load: our fields, the fields its schema names, who counts tokens, how its cache is avoided."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepinfer_cli.api import Api, RequestRefused
from deepinfer_cli.bench.prompts import TOKENS_PER_WORD
from deepinfer_cli.bench.recipe import Recipe
from deepinfer_cli.models import is_tiny
from deepinfer_cli.text import sized

PROBE_WORDS = (40, 240)


@dataclass(slots=True)
class Server:
    """What preflight learned. ours: it answers `/deepinfer/metrics` and takes our request fields.

    fields: names beyond the common API that its published schema lists. tokens_per_word: where nobody counts tokens for us.
    salt: keeps this run's prompts apart from those of earlier runs, where the cache could not be emptied; else empty.
    """

    url: str
    model: str
    ours: bool
    counts_tokens: bool
    ranks: int = 0
    notes: list[str] = field(default_factory=list)
    fields: frozenset[str] = frozenset()
    tokens_per_word: float = TOKENS_PER_WORD
    salt: str = ""

    @property
    def tiny(self) -> bool:
        return is_tiny(self.model)

    @property
    def bypass(self) -> str:
        """How a request goes around the prefix cache: our own `field`, a `cache_salt`, or a `prefix` that no other request has."""
        return "field" if self.ours else "cache_salt" if "cache_salt" in self.fields else "prefix"


def preflight(api: Api, recipe: Recipe) -> Server:
    """Learn what the server can do, bring its cache into the recipe's state, and see one request through.

    Raises: ServerUnreachable, RequestRefused.
    """
    model = api.model()
    metrics = _try(api.get, "/deepinfer/metrics")
    counted = _try(api.count_tokens, {"model": model, "prompt": "one two three"})
    server = Server(api.url, model, metrics is not None, counted is not None, len((metrics or {}).get("ranks") or []))
    if not server.ours:
        server.fields = schema_fields(_try(api.get, "/openapi.json"))
    answer = api.chat({"model": model, "messages": [{"role": "user", "content": "Count to three."}], "max_tokens": 8, "temperature": 0})
    if not answer.usage:
        server.notes.append("the server reports no usage: token counts are missing")
    if counted is None:
        _learn_word_size(api, server)
    if not server.ours and recipe.output.ignore_eos and "ignore_eos" not in server.fields:
        server.notes.append("the server names no field ignore_eos: answers may end early and differ in length")
    _bring_cache_to(recipe, api, server)
    return server


def schema_fields(openapi: Any) -> frozenset[str]:
    """Fields of chat requests in an OpenAPI document; empty when there is none."""
    schemas = ((openapi or {}).get("components") or {}).get("schemas") or {} if isinstance(openapi, dict) else {}
    named = [schema for name, schema in schemas.items() if "chat" in name.lower() and "request" in name.lower()]
    return frozenset(field for schema in named for field in (schema.get("properties") or {}))


def _learn_word_size(api: Api, server: Server) -> None:
    """Tokens per word from two requests of different length: the difference leaves out what the chat format adds."""
    sizes = []
    for words in PROBE_WORDS:
        text = sized("word size", words, lambda text: len(text.split()))
        body = {"model": server.model, "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
        sizes.append((len(text.split()), api.chat(body).prompt_tokens))
    (few_words, few), (many_words, many) = sizes
    if many > few:
        server.tokens_per_word = (many - few) / (many_words - few_words)
        server.notes.append(
            f"the server counts no tokens for us: prompts are sized by its usage, {server.tokens_per_word:.2f} tokens a word"
        )
    else:
        server.notes.append(f"the server counts no tokens for us: prompts are sized by guess, {TOKENS_PER_WORD} tokens a word")


def _bring_cache_to(recipe: Recipe, api: Api, server: Server) -> None:
    if recipe.cache.bypass:
        if server.bypass == "cache_salt":
            server.notes.append("cache bypass: every request has its own cache_salt")
        elif server.bypass == "prefix":
            server.notes.append("cache bypass: every request begins with words of its own, a few tokens more than asked")
        server.salt = "" if server.bypass == "field" else secrets.token_hex(4)
        return
    if recipe.cache.state != "cold" or _try(api.post, "/reset_prefix_cache", {}) is not None:
        return
    server.salt = secrets.token_hex(4)
    how = "cache_salt" if server.bypass == "cache_salt" else "first words"
    server.notes.append(f"the prefix cache could not be reset: this run keeps apart from earlier ones by its {how}")


def _try(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (RequestRefused, ValueError, KeyError):
        return None
