"""Train the embedded model's tokenizer: `python -m engine.models.tiny_tokenizer [FILE]`.

Byte-level BPE of 4096 entries: control tokens, all 256 bytes, then merges. Every digit is a pre-token of its own, so that
numbers are copied digit by digit; the rest is split as GPT-2 does. The shipped `tiny_tokenizer.json` is this program's output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from engine.models import tiny_encoding
from engine.models.tiny_text import control_tokens, training_texts

VOCAB_SIZE = 4096
SHIPPED_FILE = Path(__file__).with_name("tiny_tokenizer.json")

# Part of a message's text in the released vocabulary: present in decoded text even when special tokens are skipped.
_TEXT_TOKENS = (tiny_encoding.thinking_start_token, tiny_encoding.thinking_end_token, tiny_encoding.dsml_token)


def train_tokenizer(seed: int = 1) -> str:
    """Returns the text of tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in control_tokens()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(seed), trainer=trainer)
    bos = tiny_encoding.bos_token
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, 0)])
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in _TEXT_TOKENS
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED_FILE).write_text(train_tokenizer(), encoding="utf-8")
