"""The xgrammar library, loaded at the first grammar and without the tokenizer library that it names.

Its import asks for `transformers`, seconds of work for three class names that only its own tokenizer readers use. We hand it bytes of
tokens, so a stand-in answers for those names while it loads. The stand-in is gone afterwards: a later import finds the real library.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

_TOKENIZER_LIBRARY = "transformers"
_lock = threading.Lock()


def load_xgrammar() -> Any:
    """The module. Several threads may call this; the first one loads."""
    with _lock:
        if "xgrammar" in sys.modules or _TOKENIZER_LIBRARY in sys.modules:
            return importlib.import_module("xgrammar")
        sys.modules[_TOKENIZER_LIBRARY] = stand_in = _StandIn(_TOKENIZER_LIBRARY)
        try:
            return importlib.import_module("xgrammar")
        finally:
            if sys.modules.get(_TOKENIZER_LIBRARY) is stand_in:
                del sys.modules[_TOKENIZER_LIBRARY]


class _StandIn(ModuleType):
    """Every name is a class without instances, good for `isinstance` and for being derived from."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
