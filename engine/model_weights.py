"""From a checkpoint directory to the model on its device, and the tables that come with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.loader import RandomWeights, open_checkpoint
from engine.models.config import ModelConfig
from engine.models.deepseek_v41 import DeepseekV41
from engine.models.draft import DraftModel
from engine.models.engram_tables import token_map, tokenizer_size
from engine.models.numerics import Numerics
from engine.ops.rope import plain_frequencies, yarn_frequencies
from engine.parallel.expert_exchange import ExpertExchange
from engine.placed_weights import PlacedWeights


def load_model(
    path: Path,
    config: EngineConfig,
    model: ModelConfig,
    numerics: Numerics,
    device: str,
    on_progress: Callable[[str, float], None] | None,
    exchange: ExpertExchange | None,
) -> tuple[DeepseekV41, DraftModel | None, list[int]]:
    """Backbone, draft stages if the checkpoint has any, and the n-gram id of every token. exchange: where ranks share experts; then only
    this rank's share of them is read."""
    text = model.text
    dummy = config.load_format == "dummy"
    source = RandomWeights(model, config.seed, on_progress, device) if dummy else open_checkpoint(path, model, on_progress)
    mapping = _token_map(path, model, dummy)
    pad = mapping[text.engram_pad_token_id] if text.engram_layer_ids else 0
    placed = PlacedWeights(source, device)
    backbone = DeepseekV41.load(placed, text, numerics, pad, exchange)
    draft = DraftModel.load(placed, text, numerics)
    assert not source.unread, f"weights that nothing uses: {sorted(source.unread)[:5]}"
    return backbone, draft, mapping


def _token_map(path: Path, model: ModelConfig, dummy: bool) -> list[int]:
    text = model.text
    if dummy:
        _check_tokenizer(path, text.vocab_size)
        # Random weights need no meaningful n-gram ids, only ids in range: any tokenizer serves them, and none.
        return [i % text.engram_compressed_vocab_size for i in range(text.vocab_size)]
    if not text.engram_layer_ids:
        return list(range(text.vocab_size))
    return token_map(path, text.vocab_size, text.engram_compressed_vocab_size)


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    """Raises CheckpointError for a tokenizer whose prompts would hold ids that the model lacks."""
    size = tokenizer_size(path) or 0
    if size > vocab_size:
        raise CheckpointError(
            f"{path / 'tokenizer.json'} has {size:,} ids, config key vocab_size is {vocab_size:,}", hint="take a smaller tokenizer"
        )


def rotary_frequencies(model: ModelConfig, device: str) -> tuple[Tensor, Tensor]:
    """[R/2] of the plain and of the scaled rotary table."""
    text, yarn = model.text, model.text.rope_scaling
    plain = plain_frequencies(text.qk_rope_head_dim, text.rope_theta)
    scaled = yarn_frequencies(
        text.qk_rope_head_dim, text.compress_rope_theta, yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.original_max_position_embeddings
    )
    return plain.to(device), scaled.to(device)
