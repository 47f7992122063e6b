"""The conversations of a workload: texts from a seed, sized by the server's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer_cli.bench.recipe import Recipe
from deepinfer_cli.text import sized

# For servers without /tokenize: English text in common vocabularies.
TOKENS_PER_WORD = 1.35


@dataclass(frozen=True, slots=True)
class Conversation:
    """The user's side: a system text and one message per turn."""

    index: int
    system: str
    turns: list[str]


def make_conversations(recipe: Recipe, count: Callable[[str], int]) -> list[Conversation]:
    """All conversations of a recipe. The same recipe and tokenizer give the same texts."""
    prompt = recipe.prompt
    system = sized(f"system {prompt.seed}", prompt.system_tokens, count) if prompt.system_tokens else ""
    out = []
    for index in range(recipe.load.conversations):
        sizes = [prompt.first_tokens] + [prompt.turn_tokens] * (recipe.load.turns - 1)
        turns = [sized(f"{prompt.seed} {index} {turn}", tokens, count) for turn, tokens in enumerate(sizes)]
        out.append(Conversation(index, system, turns))
    return out


def word_counter(tokens_per_word: float) -> Callable[[str], int]:
    """Tokens of a text where nobody counts them for us."""
    return lambda text: round(len(text.split()) * tokens_per_word)
