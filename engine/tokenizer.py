"""Text to token ids and back, on top of the `tokenizers` library. Imports no torch.

Two encoders share one vocabulary: one in which control spellings become control ids (text of ours), and one in which the added
vocabulary is off, so that a control spelling inside client text stays ordinary text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import CheckpointError


class Tokenizer:
    """The tokenizer of one checkpoint directory.

    bos_id is inserted by `encode(text, add_special=True)` when `tokenizer_config.json` wants it. `added` maps every added
    spelling (control tokens and the like) to its id. Safe to use from several threads.
    """

    def __init__(self, data: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
        settings = settings or {}
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(data))
        self._plain = tokenizers.Tokenizer.from_str(json.dumps({**data, "added_tokens": [], "post_processor": None}))
        self.added: dict[str, int] = {token["content"]: token["id"] for token in data.get("added_tokens", [])}
        self._added_ids = {token_id: spelling for spelling, token_id in self.added.items()}
        self._bytes: dict[int, bytes] = {}
        self.bos_id = self._named(settings, "bos_token")
        self.eos_id = self._named(settings, "eos_token")
        self._adds_bos = bool(settings.get("add_bos_token", True)) and self.bos_id is not None

    @classmethod
    def from_dir(cls, path: Path | str) -> Tokenizer:
        """Load `tokenizer.json` and `tokenizer_config.json` of a model directory.

        Raises:
            CheckpointError: a file is missing or unreadable, or the tokenizer wants code of its own (`auto_map`).
        """
        directory = Path(path)
        data = _read_json(directory / "tokenizer.json")
        settings_path = directory / "tokenizer_config.json"
        settings = _read_json(settings_path) if settings_path.exists() else {}
        if settings.get("auto_map"):
            raise CheckpointError(f"{settings_path} names code to run (auto_map)", hint="only plain tokenizer.json files are loaded")
        try:
            with _panics_as_errors():
                return cls(data, settings)
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise CheckpointError(f"{directory / 'tokenizer.json'} is not a tokenizer: {error}", hint="download the file again") from error

    def _named(self, settings: dict[str, Any], key: str) -> int | None:
        value = settings.get(key)
        spelling = value.get("content") if isinstance(value, dict) else value
        return self.added.get(spelling) if isinstance(spelling, str) else None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. The model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def __len__(self) -> int:
        return self.vocab_size

    def token_id(self, spelling: str) -> int:
        """Id of a control spelling.

        Raises:
            CheckpointError: it is not a single added token here.
        """
        if spelling not in self.added:
            raise CheckpointError(
                f"the tokenizer has no single token {spelling!r}", hint="tokenizer.json and encoding.py belong to different releases"
            )
        return self.added[spelling]

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of text whose control spellings are meant. `add_special` puts BOS in front, unless the text brings it already."""
        ids = _ids(self._backend, text)
        if add_special and self._adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""
        return _ids(self._plain, text)

    def encode_ranges(
        self, text: str, control_ranges: Sequence[tuple[int, int]], known: Callable[[str], Sequence[int] | None] | None = None
    ) -> list[int]:
        """Ids of text where only the given half-open, ascending code point ranges are control tokens.

        Each piece between two ranges is encoded whole, so merges are those of the piece alone. known: other ids of a piece, or None.
        """

        def encode(piece: str) -> Sequence[int]:
            ids = known(piece) if known is not None else None
            return self.encode_plain(piece) if ids is None else ids

        ids: list[int] = []
        position = 0
        for start, end in control_ranges:
            if position < start:
                ids.extend(encode(text[position:start]))
            ids.append(self.token_id(text[start:end]))
            position = end
        if position < len(text):
            ids.extend(encode(text[position:]))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for; they may be a part of a character. Unknown ids give no bytes."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._added_ids:
            return self._added_ids[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        table = _byte_of_char()
        try:
            return bytes(table[char] for char in token)
        except KeyError:  # an entry outside the byte alphabet stands for its own spelling
            return str(token).encode()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, control spellings included. Bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


class IncrementalDetokenizer:
    """Turns a growing list of ids into text pieces. Every piece is valid Unicode; an unfinished character waits."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that became complete with these ids."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def flush(self) -> str:
        """What an unfinished character leaves behind: U+FFFD or nothing. The detokenizer can be used again afterwards."""
        return self._decoder.decode(b"", final=True)


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Encode without offsets. Unlike `encode`, the batch call lets other threads run, and it is about three times as fast."""
    with _panics_as_errors():
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A panic of the library, as for a pattern that backtracks without end, passes `except Exception` otherwise and ends what runs it."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library does not publish the class
            raise
        raise RuntimeError(f"the tokenizer failed: {str(error)[:200]}") from error


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Inverse of the byte-level alphabet: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(list(others))})
    return table


def _read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is not a file", hint="download the file again")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing", hint="a model directory holds config.json, tokenizer.json and safetensors files"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="download the file again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object", hint="download the file again")
    return data
