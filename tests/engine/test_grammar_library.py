"""Loading the grammar library without the tokenizer library that it names."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys, time
import torch
from engine.grammar_library import load_xgrammar
first = load_xgrammar()
names = [name for name in sys.modules if name.partition(".")[0] == "transformers"]
info = first.TokenizerInfo([b"a", b"b", b""], first.VocabType.RAW, vocab_size=3, stop_token_ids=[2])
compiled = first.GrammarCompiler(info, max_threads=1).compile_regex("ab+")
matcher = first.GrammarMatcher(compiled, override_stop_tokens=[2])
accepted = [matcher.accept_token(token) for token in (0, 1)]
print(json.dumps({"same": load_xgrammar() is first, "names": names, "accepted": accepted, "refused": matcher.accept_token(0)}))
"""


def test_the_library_works_without_the_tokenizer_library_and_leaves_no_stand_in():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {"same": True, "names": [], "accepted": [True, True], "refused": False}
