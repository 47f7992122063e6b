"""What a safetensors file says of itself: names, dtypes, shapes and places of its tensors. No weight is read, and nothing is believed."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

# Source: the safetensors library's own limit. A larger number means that the file is something else.
MAX_HEADER_BYTES = 100_000_000
MAX_AXES = 16
# What a damaged or hostile JSON text raises on its way to names and shapes.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True, slots=True)
class StoredHeader:
    """One tensor of a file; end: bytes of the data up to its last one."""

    dtype: str
    shape: tuple[int, ...]
    end: int


def raw_header(file: Path) -> bytes:
    """The header's text. Raises CheckpointError for what is no file, or too short for its header."""
    if not file.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{file} is not a file", hint="download it again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES
        if length >= MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(f"{file} is truncated or not a safetensors file ({size} bytes)", hint="download it again")
        return stream.read(length)


def read_header(file: Path) -> dict[str, StoredHeader]:
    """Tensors of one file, by the names that it gives them.

    Raises:
        CheckpointError: no safetensors file, a damaged header, or another length than the header says.
    """
    header = raw_header(file)
    try:
        tensors = json.loads(header, object_pairs_hook=_distinct)
        tensors.pop("__metadata__", None)
        found = {name: _stored(spec) for name, spec in tensors.items()}
    except MALFORMED as error:
        raise CheckpointError(f"{file} has a damaged safetensors header: {repr(error)[:200]}", hint="download it again") from error
    expected, size = 8 + len(header) + max((tensor.end for tensor in found.values()), default=0), file.stat().st_size
    if size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise CheckpointError(f"{file} is {what}: {size} bytes, expected {expected}", hint="download it again")
    return found


def _stored(spec: Any) -> StoredHeader:
    """Raises one of MALFORMED for anything but a name, sizes and two offsets."""
    dtype, shape, (_, end) = spec["dtype"], spec["shape"], spec["data_offsets"]
    sizes = [*shape, end]
    if not isinstance(dtype, str) or len(shape) > MAX_AXES or not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError("a tensor needs a dtype, sizes and offsets")
    return StoredHeader(dtype, tuple(shape), end)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a header. Raises ValueError for a name that comes twice: readers disagree on which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found
