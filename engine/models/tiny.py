"""The embedded model `tiny`: every mechanism of the architecture at a width that runs on two CPU cores, without a download.

`ensure_tiny` gives a checkpoint directory in the released format. Trained weights shipped as `tiny_checkpoint/` next to this file
are used when they are there; otherwise the weights are random, and only the shapes and the format are real.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.errors import MachineError
from engine.models import tiny_encoding
from engine.models.engram_tables import bucket_primes, compress_vocabulary

_HERE = Path(__file__).parent
TOKENIZER_FILE = _HERE / "tiny_tokenizer.json"
# Trained weights: `config.json` and `model.safetensors`. Absent until a trained model is shipped.
TRAINED_DIR = _HERE / "tiny_checkpoint"
_CASES_FILE = _HERE / "tiny_encoding_cases.json"

Progress = Callable[[str, float], None]

VOCAB_SIZE = 4096
MAX_POSITION_EMBEDDINGS = 32768
IMAGE_TOKEN_ID = 10
NOISE_TOKEN_ID = 17

_NUM_LAYERS = 8
_NUM_STAGES = 2
_ENGRAM_LAYERS = (1, 4)
_ENGRAM_START = 2048
_ENGRAM_HEADS = 2
_MAX_NGRAM = 4


@lru_cache(maxsize=1)
def _num_compressed_ids() -> int:
    return max(compress_vocabulary(TOKENIZER_FILE)) + 1


def tiny_config() -> dict[str, Any]:
    """`config.json` of the embedded model.

    The key-value vector keeps 128 dims although everything else is narrow: one vector per token must hold the match key and the
    payload through 4-bit rounding.
    """
    primes = bucket_primes(_ENGRAM_LAYERS, _MAX_NGRAM, _ENGRAM_HEADS, _ENGRAM_START)
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": IMAGE_TOKEN_ID,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {
            "model_type": "deepseek_v41_text",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
            "rms_norm_eps": 1e-20,
            "tie_word_embeddings": False,
            **_attention_config(),
            **_expert_config(),
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "engram_layer_ids": list(_ENGRAM_LAYERS),
            "engram_num_embeddings": [sum(columns) for columns in primes],
            "engram_max_ngram_size": _MAX_NGRAM,
            "engram_vocab_size": _ENGRAM_START,
            "engram_n_heads": _ENGRAM_HEADS,
            "engram_head_dim": 32,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": _num_compressed_ids(),
            "num_nextn_predict_layers": _NUM_STAGES,
            "dspark_block_size": 5,
            "dspark_noise_token_id": NOISE_TOKEN_ID,
            "dspark_target_layer_ids": [5, 6, 7],
            "dspark_markov_rank": 64,
            "dspark_n_routed_experts": 4,
            "dspark_num_experts_per_tok": 2,
        },
    }


def _attention_config() -> dict[str, Any]:
    return {
        "hidden_size": 256,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 64,
        "attention_bias": False,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1] + [0] * _NUM_STAGES,
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 5],
        "index_source_layer_ids": [2, 5, 7],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 64,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "rope_theta": 10000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
    }


def _expert_config() -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }


def tokenizer_config() -> dict[str, Any]:
    """`tokenizer_config.json`: BOS is inserted unless the text brings its own special tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tiny_encoding.bos_token,
        "eos_token": tiny_encoding.eos_token,
        "pad_token": tiny_encoding.pad_token,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITION_EMBEDDINGS,
    }


def make_tiny(out: Path, seed: int = 0, on_progress: Progress | None = None) -> None:
    """Write a complete checkpoint into `out`: weights, config, tokenizer, chat encoder with its cases.

    The weights are the shipped trained ones for seed 0, when there are any, and random otherwise.
    on_progress: called with a phase and the finished share of it.
    """
    report = on_progress or (lambda phase, share: None)
    out.mkdir(parents=True, exist_ok=True)
    report("weights", 0.0)
    if seed == 0 and TRAINED_DIR.is_dir():
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(TRAINED_DIR / name, out / name)
    else:
        _write_random_weights(out, seed)
    report("weights", 1.0)
    write_text_format(out)


def _write_random_weights(out: Path, seed: int) -> None:
    # Loading torch takes longer than everything else here; a checkpoint that exists already must not pay for it.
    from engine.loader import random_tensors, write_checkpoint
    from engine.models.config import parse_config

    config = tiny_config()
    write_checkpoint(out, config, random_tensors(parse_config(config), seed))


def write_text_format(out: Path) -> list[str]:
    """Write what turns text to token ids and back, less what is there: tokenizer and chat encoder. Returns the names of what was written.

    Beside a configuration without weights they stand in for the real ones.
    """
    written = []
    if not (out / "tokenizer.json").exists():
        shutil.copyfile(TOKENIZER_FILE, out / "tokenizer.json")
        _write_json(out / "tokenizer_config.json", tokenizer_config())
        written += ["tokenizer.json", "tokenizer_config.json"]
    if not (out / "encoding").exists():
        write_encoding(out / "encoding")
        written.append("encoding/")
    return written


def write_encoding(folder: Path) -> None:
    """Write `encoding.py` and the cases by which a server tests it."""
    tests = folder / "tests"
    tests.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(tiny_encoding.__file__), folder / "encoding.py")
    for number, case in enumerate(json.loads(_CASES_FILE.read_text(encoding="utf-8")), start=1):
        _write_json(tests / f"test_input_{number}.json", case["input"])
        (tests / f"test_output_{number}.txt").write_text(case["output"], encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def ensure_tiny(cache_dir: Path, on_progress: Progress | None = None) -> Path:
    """Directory of the embedded model, made on first use. The name carries a hash of everything that goes into it.

    Safe against other processes: one makes it under a lock, and it appears with one rename.
    Raises:
        MachineError: the cache directory cannot be written.
    """
    target = Path(cache_dir) / f"tiny-{content_hash()}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".tiny.lock"):
            if not target.is_dir():
                _make_atomically(target, on_progress)
    except OSError as error:
        raise MachineError(
            f"the embedded model cannot be written to {cache_dir}: {error}", hint="free some disk space, or set DIX_HOME"
        ) from error
    return target


def _make_atomically(target: Path, on_progress: Progress | None) -> None:
    for leftover in target.parent.glob(".tiny-*"):  # of a process that was killed; the lock says that nobody works in it
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=".tiny-", dir=target.parent))
    try:
        make_tiny(partial, on_progress=on_progress)
        partial.chmod(0o755)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@lru_cache(maxsize=1)
def content_hash() -> str:
    """Twelve hex digits over every file that decides what `make_tiny` writes."""
    sources = [_HERE / name for name in ("tiny.py", "tiny_encoding.py", "random_weights.py", "checkpoint_writer.py", "inventory.py")]
    data = [TOKENIZER_FILE, _CASES_FILE, *(sorted(TRAINED_DIR.iterdir()) if TRAINED_DIR.is_dir() else [])]
    digest = sha256()
    for path in [*sources, *data]:
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
