"""The mixture: which family a conversation is of, its length, its text and the tokens that are supervised."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from engine.models import tiny_encoding
from engine.models.tiny_text import library_texts
from recipes.tiny.chat import addition, chat, copying
from recipes.tiny.conversation import Conversation
from recipes.tiny.documents import document
from recipes.tiny.recall import recall
from recipes.tiny.records import records
from recipes.tiny.tools import tool_use
from recipes.tiny.words import Source

TOKENIZER_FILE = Path(__file__).resolve().parents[2] / "engine" / "models" / "tiny_tokenizer.json"
EOS, ASSISTANT, PAD = 1, 5, 2
THINK_TOKENS = (7, 8)
FAMILIES = {
    "recall": recall,
    "document": document,
    "tool": tool_use,
    "json": records,
    "copy": copying,
    "chat": chat,
    "addition": addition,
    "text": None,
}
# Shares of conversations. Long phases draw fewer of the families that grow with the length, so that the short ones keep their tokens.
MIXTURES = {
    "short": {"recall": 0.24, "document": 0.26, "tool": 0.15, "json": 0.11, "copy": 0.08, "chat": 0.04, "addition": 0.09, "text": 0.06},
    "long": {"recall": 0.16, "document": 0.18, "tool": 0.22, "json": 0.16, "copy": 0.06, "chat": 0.05, "addition": 0.14, "text": 0.08},
}
CHARS_PER_TOKEN = {"recall": 3.6, "document": 2.2, "tool": 3.0, "json": 3.0, "copy": 2.0, "chat": 3.6, "addition": 2.0, "text": 3.2}
CONTEXT_WEIGHT, TEXT_WEIGHT = 0.1, 0.35


@dataclass(frozen=True, slots=True)
class Sample:
    """ids [n] uint16; weights [n] f32 of the loss of predicting ids[i]; family."""

    ids: np.ndarray
    weights: np.ndarray
    family: str


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER_FILE))


@lru_cache(maxsize=2)
def plain_texts(held_out: bool) -> list[str]:
    """Documentation and sources of the standard library, a twentieth held out."""
    texts = [t for t in library_texts() if len(t) > 200]
    return [t for t in texts if (zlib.crc32(t.encode()) % 20 == 0) == held_out]


def render(c: Conversation) -> str:
    if c.effort is None:
        return tiny_encoding.encode_messages(c.messages, "chat")
    return tiny_encoding.encode_messages(c.messages, "thinking", reasoning_effort=c.effort)


def supervised(ids: np.ndarray) -> np.ndarray:
    """Bool mask of the tokens that an assistant writes: behind its header up to and including EOS."""
    opened = np.cumsum(ids == ASSISTANT) - np.cumsum(np.concatenate(([0], (ids == EOS)[:-1])))
    previous = np.concatenate(([0], ids[:-1]))
    header = (ids == ASSISTANT) | ((previous == ASSISTANT) & np.isin(ids, THINK_TOKENS))
    return (opened > 0) & ~header


def sample_from(c: Conversation) -> Sample:
    ids = np.array(tokenizer().encode(render(c), add_special_tokens=False).ids, dtype=np.uint16)
    return Sample(ids, np.where(supervised(ids), 1.0, CONTEXT_WEIGHT).astype(np.float32), c.family)


def text_sample(source: Source, target_chars: int) -> Sample:
    text = source.rng.choice(plain_texts(source.held_out))
    at = source.rng.randint(0, max(0, len(text) - target_chars))
    piece = tiny_encoding.bos_token + text[at : at + target_chars]
    ids = np.array(
        tokenizer().encode(piece, add_special_tokens=False).ids + ([EOS] if at + target_chars >= len(text) else []), dtype=np.uint16
    )
    return Sample(ids, np.full(len(ids), TEXT_WEIGHT, dtype=np.float32), "text")


def draw_sample(seed: str, mixture: str, min_tokens: int, max_tokens: int) -> Sample:
    """One training sample; lengths are log-uniform between the bounds and never above `max_tokens`."""
    source = Source(seed)
    shares = MIXTURES[mixture]
    family = source.rng.choices(list(shares), list(shares.values()))[0]
    target = math.exp(source.rng.uniform(math.log(min_tokens), math.log(max_tokens)))
    chars = int(target * CHARS_PER_TOKEN[family])
    for _ in range(8):
        sample = text_sample(source, chars) if family == "text" else sample_from(FAMILIES[family](source, chars))
        if len(sample.ids) <= max_tokens:
            return sample
        chars = int(chars * 0.8)
    return text_sample(source, max_tokens)


def samples(seed: int, worker: int, mixture: str, min_tokens: int, max_tokens: int) -> Iterator[Sample]:
    number = 0
    while True:
        yield draw_sample(f"{seed}/{worker}/{number}", mixture, min_tokens, max_tokens)
        number += 1


def data_hash(seed: int, count: int = 500) -> str:
    """SHA-256 over the first samples of worker 0, to compare two machines."""
    digest = hashlib.sha256()
    for sample, _ in zip(samples(seed, 0, "short", 60, 1024), range(count), strict=False):
        digest.update(sample.ids.tobytes())
    return digest.hexdigest()
