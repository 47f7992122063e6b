"""Write the held-out prompts that `engine/evaluate.py` asks: `python -m recipes.tiny.make_eval FILE`."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from recipes.tiny.corpus import plain_texts
from recipes.tiny.heldout import LENGTHS, SETS, example

COUNTS = {128: 16, 500: 64, 2000: 32, 6000: 16}
OTHER = 48
NUM_TEXTS, TEXT_CHARS = 6, 1600


def prompts() -> list[dict[str, Any]]:
    found = []
    for name in SETS:
        for number in range(COUNTS[LENGTHS[name]] if name in LENGTHS else OTHER):
            c = example(name, number).conversation
            *messages, expected = c.messages
            calls = [call["function"] for call in expected.get("tool_calls", [])]
            found.append(
                {"set": name, "messages": messages, "effort": c.effort, "expected": {"content": expected["content"], "tool_calls": calls}}
            )
    return found


def main() -> None:
    texts = [text[:TEXT_CHARS] for text in plain_texts(True) if len(text) >= TEXT_CHARS][:NUM_TEXTS]
    data = json.dumps({"prompts": prompts(), "texts": texts}, ensure_ascii=False).encode("utf-8")
    Path(sys.argv[1]).write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    main()
