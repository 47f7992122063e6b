"""Pack samples into batches of a fixed number of rows, and the byte layout in which feeders send them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from recipes.tiny.corpus import FAMILIES, PAD, Sample

ALIGN = 16  # rows; a tile of the attention kernel belongs to one document
KEEP = 140  # prompt rows that decoder windows see under truncation, as served
KL_GROUPS, KL_ROWS = 8, 64
FAMILY_CODES = {name: code for code, name in enumerate(FAMILIES)}


@dataclass(frozen=True, slots=True)
class Packed:
    """One batch. ids, weights, family [N]; start, end, rect [N]: see `model.Batch`; kl_rows [groups, rows]: rows of one document each.

    weights[i] is the loss weight of row i, which predicts ids[i + 1].
    """

    ids: np.ndarray
    weights: np.ndarray
    family: np.ndarray
    start: np.ndarray
    end: np.ndarray
    rect: np.ndarray
    kl_rows: np.ndarray

    def to_bytes(self) -> bytes:
        return b"".join(getattr(self, name).astype(dtype).tobytes() for name, dtype in LAYOUT)


LAYOUT = (
    ("ids", np.uint16),
    ("weights", np.float32),
    ("family", np.uint8),
    ("start", np.int32),
    ("end", np.int32),
    ("rect", np.int32),
    ("kl_rows", np.int32),
)


def batch_bytes(rows: int) -> int:
    return sum(np.dtype(dtype).itemsize * (KL_GROUPS * KL_ROWS if name == "kl_rows" else rows) for name, dtype in LAYOUT)


def from_bytes(data: bytes, rows: int) -> Packed:
    arrays, at = {}, 0
    for name, dtype in LAYOUT:
        count = KL_GROUPS * KL_ROWS if name == "kl_rows" else rows
        arrays[name] = np.frombuffer(data, dtype, count, at)
        at += arrays[name].nbytes
    arrays["kl_rows"] = arrays["kl_rows"].reshape(KL_GROUPS, KL_ROWS)
    return Packed(**arrays)


def truncate(sample: Sample, weights: np.ndarray, rng: random.Random) -> int:
    """Choose an answer and forget the decoder windows before its last KEEP prompt rows; mutes the loss before it. Returns the boundary."""
    answers = np.flatnonzero((sample.weights == 1.0) & np.concatenate(([True], sample.weights[:-1] != 1.0)))
    if len(answers) == 0:
        return 0
    first = int(answers[rng.randrange((len(answers) + 1) // 2)])
    if first <= KEEP:
        return 0
    weights[: first - 1] = 0.0
    return first - KEEP


def pack(documents: list[Sample], rows: int, truncated: float, rng: random.Random) -> Packed:
    """Lay documents one after another; the sum of their aligned lengths must not exceed `rows`."""
    ids, weights = np.full(rows, PAD, np.uint16), np.zeros(rows, np.float32)
    family, start = np.full(rows, FAMILY_CODES["text"], np.uint8), np.zeros(rows, np.int32)
    end, rect = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    at, groups = 0, []
    for sample in documents:
        n = len(sample.ids)
        size = -(-n // ALIGN) * ALIGN
        w = np.concatenate((sample.weights[1:], [0.0]))
        boundary = truncate(sample, w, rng) if n > KEEP + 20 and rng.random() < truncated else 0
        ids[at : at + n], weights[at : at + n] = sample.ids, w
        family[at : at + size] = FAMILY_CODES[sample.family]
        start[at : at + size], end[at : at + size], rect[at : at + size] = at, at + size, at + boundary
        groups.append((at, at + n))
        at += size
    # The rest is documents of one tile, so that no document is longer than the longest sample.
    rest = np.arange(at, rows) // ALIGN * ALIGN
    start[at:], end[at:], rect[at:] = rest, rest + ALIGN, rest
    return Packed(ids, weights, family, start, end, rect, _kl_rows(groups, weights, rng))


def _kl_rows(groups: list[tuple[int, int]], weights: np.ndarray, rng: random.Random) -> np.ndarray:
    """Sampled rows that predict answers, from documents drawn in proportion to their length."""
    out = np.zeros((KL_GROUPS, KL_ROWS), np.int32)
    chosen = rng.choices(groups, [end - start for start, end in groups], k=KL_GROUPS)
    for group, (start, end) in enumerate(chosen):
        rows = np.flatnonzero(weights[start:end] == 1.0)
        rows = rows if len(rows) else np.arange(end - start)
        out[group] = start + np.array(rng.choices(rows.tolist(), k=KL_ROWS))
    return out


def batches(stream: Iterator[Sample], rows: int, truncated: float, rng: random.Random) -> Iterator[Packed]:
    """Fill batches first fit from a small waiting room; long samples that do not fit wait for the next batch."""
    waiting: list[Sample] = []
    while True:
        room, documents = rows, []
        misses = 0
        while misses < 24 and room >= 64:
            fitting = next((i for i, s in enumerate(waiting) if -(-len(s.ids) // ALIGN) * ALIGN <= room), None)
            if fitting is None:
                waiting.append(next(stream))
                misses += -(-len(waiting[-1].ids) // ALIGN) * ALIGN > room
                continue
            sample = waiting.pop(fitting)
            documents.append(sample)
            room -= -(-len(sample.ids) // ALIGN) * ALIGN
        yield pack(documents, rows, truncated, rng)
