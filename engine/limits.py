"""What a loaded engine can do: "auto" settings resolved for a model and a device, and whether settings fit the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig, Precision, TruncationMode
from engine.errors import ConfigError, MachineError, NotEnoughMemory
from engine.kv_cache import CacheShape, block_bytes
from engine.loader import model_fingerprint
from engine.models.config import ModelConfig
from engine.models.engram_tables import tokenizer_size
from engine.models.numerics import Numerics


@dataclass(frozen=True, slots=True)
class Limits:
    """What a loaded engine can do, with every "auto" resolved.

    num_blocks and num_state_slots include the reserved number 0; where ranks prefill together they count this rank's part of the cache,
    `part` of as many equal ones. vocab_size: logits per row; tokenizer_size: ids that exist, the rest is masked before sampling.
    keep_tokens: suffix kept by decoder truncation, 0 when mode is off. ngram_history: ids needed before a slice. fingerprint: content
    digest of the model.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    num_state_slots: int
    precision: Precision
    device: str
    vocab_size: int
    tokenizer_size: int
    eos_token_id: int
    keep_tokens: int
    mode: TruncationMode
    ngram_history: int
    fingerprint: str
    draft_block_size: int
    part: int = 0


def check_settings(config: EngineConfig, model: ModelConfig) -> None:
    """Whether block size and decoder truncation fit the model; needs no weights.

    Raises:
        ConfigError: they do not.
    """
    text = model.text
    if config.block_size % 2:
        raise ConfigError(f"engine.block_size is {config.block_size}", hint="allowed: even numbers, 128 outside tests")
    if config.yoco_mode == TruncationMode.OFF:
        return
    least = text.sliding_window + config.backtracking_tokens
    if config.yoco_keep_tokens < least:
        raise ConfigError(
            f"engine.yoco_keep_tokens is {config.yoco_keep_tokens}",
            hint=f"this model needs at least {least} (window {text.sliding_window} + {config.backtracking_tokens}), or 0 for no truncation",
        )
    behind = [layer for layer in text.engram_layer_ids if layer >= text.boundary]
    if text.boundary == text.num_hidden_layers or behind:
        why = f"n-gram layers {behind} lie behind layer {text.boundary}" if behind else "the model has no decoder layers"
        raise ConfigError(f"engine.yoco_mode is {config.yoco_mode} but {why}", hint="--yoco-keep-tokens 0")


def resolve_device(device: str) -> str:
    """Raises: MachineError when a GPU is asked for and there is none."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise MachineError(
            "engine.device is cuda but torch sees no GPU", hint="--device cpu, or install a CUDA build of torch and a driver"
        )
    return device


def resolve_precision(precision: str, device: str) -> Precision:
    if precision == "auto":
        return Precision.B if device == "cuda" else Precision.F
    return Precision(precision)


def resolve_cache_shape(config: EngineConfig, model: ModelConfig, numerics: Numerics, device: str, drafting: bool) -> CacheShape:
    """The cache of this rank, or of the ranks that prefill together. Call it when the weights are loaded: on a GPU it counts what is free.

    Raises:
        NotEnoughMemory: there is no room for two blocks.
    """
    text = model.text
    max_num_seqs = _max_num_seqs(config, device)
    keep = config.yoco_keep_tokens if config.yoco_mode != TruncationMode.OFF else 0
    num_blocks = config.num_blocks
    if isinstance(num_blocks, str):
        one = block_bytes(text, numerics, config.block_size)
        budget = int(config.kv_cache_gb * 2**30)
        if device == "cuda":
            free, total = torch.cuda.mem_get_info()
            budget = int(free - (1 - config.memory_fraction) * total)
        num_blocks = budget // one
        if num_blocks < 2:
            raise NotEnoughMemory(
                f"{budget} bytes for the cache hold {num_blocks} blocks of {one} bytes",
                hint=f"raise {_size_setting(config, device)}",
            )
        # A cache beyond what all sequences together can fill would only be dead weight.
        longest = -(-(text.max_position_embeddings + config.backtracking_tokens) // config.block_size)
        num_blocks = min(num_blocks, config.cp * max_num_seqs * longest + 1)
    return CacheShape(
        block_size=config.block_size,
        num_blocks=num_blocks - (num_blocks - 1) % config.cp,
        num_state_slots=config.cp * int(max_num_seqs * config.state_slots_ratio) + 1,
        backtracking_tokens=config.backtracking_tokens,
        keep_tokens=keep,
        num_draft_stages=text.num_stages if drafting else 0,
    )


def resolve_limits(
    config: EngineConfig, model: ModelConfig, shape: CacheShape, precision: Precision, device: str, path: Path, part: int
) -> Limits:
    """part: which of `engine.cp` equal parts of the cache is this rank's.

    Raises:
        NotEnoughMemory: the cache cannot hold one sequence of `engine.max_model_len` tokens.
    """
    text = model.text
    num_blocks, num_slots = ((count - 1) // config.cp + 1 for count in (shape.num_blocks, shape.num_state_slots))
    room = (num_blocks - 1) * shape.block_size - config.backtracking_tokens
    max_model_len = _number(config.max_model_len, min(text.max_position_embeddings, room))
    if max_model_len > room or max_model_len < 1:
        raise NotEnoughMemory(
            f"engine.max_model_len is {max_model_len} but {num_blocks} cache blocks of {shape.block_size} hold {max(0, room)} tokens",
            hint=f"lower engine.max_model_len or raise {_size_setting(config, device)}",
        )
    max_num_seqs = _max_num_seqs(config, device)
    tokens = _number(config.max_num_batched_tokens, 8192 if device == "cuda" else 512)
    if isinstance(config.max_num_batched_tokens, str):
        tokens = max(tokens, max_num_seqs * config.backtracking_tokens, 0 if config.chunked_prefill else max_model_len)
    return Limits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        num_blocks=num_blocks,
        num_state_slots=num_slots,
        precision=precision,
        device=device,
        vocab_size=text.vocab_size,
        tokenizer_size=min(text.vocab_size, tokenizer_size(path) or text.vocab_size),
        eos_token_id=model.eos_token_id,
        keep_tokens=shape.keep_tokens,
        mode=TruncationMode(config.yoco_mode),
        ngram_history=text.ngram_history,
        fingerprint=model_fingerprint(path, config.load_format, config.seed),
        draft_block_size=text.dspark_block_size if shape.num_draft_stages else 0,
        part=part,
    )


def _number(value: int | str, automatic: int) -> int:
    return automatic if isinstance(value, str) else value


def _max_num_seqs(config: EngineConfig, device: str) -> int:
    return _number(config.max_num_seqs, 256 if device == "cuda" else 32)


def _size_setting(config: EngineConfig, device: str) -> str:
    """Which setting decides how large the cache is."""
    if not isinstance(config.num_blocks, str):
        return "engine.num_blocks"
    return "engine.memory_fraction" if device == "cuda" else "engine.kv_cache_gb"
