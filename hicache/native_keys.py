"""The compiled twin of `keys.hash_chain`, for processors with SHA instructions. Built on first use."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable
from pathlib import Path

from csrc.loader import BuildError, Library, bind, load

KEY_BYTES = 32
LIBRARY = Library("page_keys", ("host/page_keys.cpp",))
Chain = Callable[[bytes, "array[int]", int], list[bytes]]
log = logging.getLogger(__name__)


def open_chain(build_dir: Path, *, portable: bool = False) -> Chain | None:
    """The compiled chain, or None where it would not be faster or there is no compiler. portable: without special instructions."""
    try:
        library = load(LIBRARY, build_dir)
    except (BuildError, OSError) as error:
        log.info("page keys are hashed in Python: %s", error)
        return None
    if not portable and not bind(library, "dix_page_keys_fast", [])():
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    compiled = bind(library, "dix_page_keys", [ctypes.c_char_p, pointer, size, size, pointer, ctypes.c_int])

    def chain(root: bytes, tokens: array[int], page_tokens: int) -> list[bytes]:
        num_pages = len(tokens) // page_tokens
        keys = ctypes.create_string_buffer(KEY_BYTES * num_pages)
        compiled(root, tokens.buffer_info()[0], num_pages, page_tokens, ctypes.addressof(keys), int(portable))
        raw = keys.raw
        return [raw[at : at + KEY_BYTES] for at in range(0, KEY_BYTES * num_pages, KEY_BYTES)]

    return chain
