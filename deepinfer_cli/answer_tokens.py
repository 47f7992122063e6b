"""The tokens of two answers, and the first at which they differ."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_cli.api import Answer, Api, RequestRefused


def tokens_of(api: Api, answer: Answer) -> list[str]:
    """The tokens that the server named; else those of its tokenizer; else characters, the finest that it lets us see."""
    if answer.tokens:
        return list(answer.tokens)
    try:
        return [str(token) for token in api.post("/tokenize", {"prompt": answer.content})["tokens"]]
    except RequestRefused:
        return list(answer.content)


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Index of the first item that differs or that only one side has; None when both are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
