"""The integer side of the n-gram tables: bucket primes, hash multipliers and the token map. No torch here.

A table holds, for every n-gram size and head, a prime number of rows; a row is found by hashing the last n token ids.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from engine.errors import CheckpointError

# Source: the release's hashing scheme; the seed stride is a prime, so that layers draw unrelated multipliers.
_SEED_PER_LAYER = 10007
_SENTINEL = "\ue000"


@lru_cache(maxsize=16)
def bucket_primes(layers: tuple[int, ...], max_ngram: int, num_heads: int, start: int) -> tuple[tuple[int, ...], ...]:
    """Rows per column of each engram layer: `(max_ngram - 1) * num_heads` primes, size-major.

    Every n-gram size searches upwards from `start - 1`; a prime serves once over all sizes and layers.
    Source: config keys `engram_vocab_size`, `engram_max_ngram_size`, `engram_n_heads`.
    """
    used: set[int] = set()
    tables = []
    for _ in layers:
        columns: list[int] = []
        for _ in range(max_ngram - 1):
            candidate = start - 1
            for _ in range(num_heads):
                candidate = _next_prime(candidate, used)
                used.add(candidate)
                columns.append(candidate)
        tables.append(tuple(columns))
    return tuple(tables)


def column_offsets(primes: tuple[int, ...]) -> tuple[int, ...]:
    """First table row of each column."""
    return tuple(int(x) for x in np.concatenate([[0], np.cumsum(primes)[:-1]]))


def hash_multipliers(layer_id: int, max_ngram: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Odd multipliers m_0..m_{max_ngram-1} of a layer; `id * m` stays inside int64.

    Source: config key `engram_compressed_vocab_size`.
    """
    half = max(1, ((2**63 - 1) // compressed_vocab_size) // 2)
    draws = np.random.default_rng(_SEED_PER_LAYER * layer_id).integers(0, half, size=max_ngram, dtype=np.int64)
    return tuple(2 * int(d) + 1 for d in draws)


def token_map(model_dir: Path, vocab_size: int, compressed_vocab_size: int) -> list[int]:
    """Raw token id -> compressed id, -1 for ids the tokenizer does not know. Length `vocab_size`.

    Without a `tokenizer.json` the identity serves when the config says that nothing is merged.

    Raises:
        CheckpointError: the number of distinct keys differs from the config's checksum.
    """
    path = model_dir / "tokenizer.json"
    if not path.exists():
        if vocab_size == compressed_vocab_size:
            return list(range(vocab_size))
        raise CheckpointError(
            f"{path} is missing: the n-gram tables need it (engram_compressed_vocab_size is {compressed_vocab_size})",
            hint="copy the tokenizer of the release next to config.json",
        )
    found = compress_vocabulary(path)
    num_keys = max(found, default=-1) + 1
    if num_keys != compressed_vocab_size:
        raise CheckpointError(
            f"{path} merges into {num_keys} n-gram ids, config key engram_compressed_vocab_size says {compressed_vocab_size}",
            hint="tokenizer.json and config.json come from different checkpoints",
        )
    if len(found) > vocab_size:
        raise CheckpointError(f"{path} has {len(found)} tokens, config key vocab_size is {vocab_size}")
    return found + [-1] * (vocab_size - len(found))


def compress_vocabulary(tokenizer_json: Path) -> list[int]:
    """Raw id -> compressed id for every id of a tokenizer, numbered by first appearance.

    Tokens that read the same without case, accents and outer spaces share an id; undecodable byte tokens keep their own.
    """
    from tokenizers import Regex, Tokenizer, normalizers

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"{tokenizer_json} cannot be read: {error}") from error
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(_SENTINEL, " "),
        ]
    )
    ids: dict[str, int] = {}
    result = []
    for raw in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([raw], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(raw) or text
        else:
            key = normalizer.normalize_str(text) or text
        result.append(ids.setdefault(key, len(ids)))
    return result


def tokenizer_size(model_dir: Path) -> int | None:
    """Highest id of `tokenizer.json` plus one, None without the file."""
    path = model_dir / "tokenizer.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    ids = [*data["model"]["vocab"].values(), *(t["id"] for t in data.get("added_tokens", []))]
    return max(ids) + 1


def _next_prime(after: int, used: set[int]) -> int:
    candidate = after + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % d for d in range(3, int(n**0.5) + 1, 2))
