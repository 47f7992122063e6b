"""Deterministic English-like text from a seed, sized in tokens by a server's own count. No prompt is copied from anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable

NOUNS = (
    "river", "market", "engine", "garden", "letter", "winter", "bridge", "signal", "harbor", "window", "lesson", "forest",
    "number", "village", "machine", "summer", "island", "report",
)  # fmt: skip
VERBS = (
    "carries", "follows", "repairs", "answers", "measures", "remembers", "crosses", "watches", "opens", "counts", "describes",
    "paints", "builds", "leaves", "joins",
)  # fmt: skip
ADJECTIVES = (
    "quiet", "early", "narrow", "bright", "ordinary", "distant", "careful", "heavy", "simple", "patient", "northern", "wooden",
    "recent", "slow", "useful",
)  # fmt: skip
LINKS = (
    "because", "while", "although", "when", "before", "until", "after", "where",
)  # fmt: skip


def sentences(rng: random.Random, count: int) -> str:
    """`count` sentences of about ten words."""
    return " ".join(_sentence(rng) for _ in range(count))


def _sentence(rng: random.Random) -> str:
    def clause() -> str:
        return f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}"

    text = f"{clause()} {rng.choice(LINKS)} {clause()}"
    return text[0].upper() + text[1:] + "."


def sized(seed: str, tokens: int, count: Callable[[str], int]) -> str:
    """Text of at least `tokens` tokens and at most one word more, the same for the same seed and the same tokenizer.

    count: tokens of a text; called about a dozen times.
    """
    rng = random.Random(seed)
    words: list[str] = []
    while not words or count(" ".join(words)) < tokens:
        words += sentences(rng, max(1, (tokens + 9) // 10 if not words else len(words) // 20)).split()
    low, high = 1, len(words)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if count(" ".join(words[:middle])) < tokens else (low, middle)
    return " ".join(words[:low])
