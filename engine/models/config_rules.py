"""The rules that a model config obeys, as generators of messages. Kept apart from parsing so that each reads alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.models.config import TextConfig

# Source: config key `weight_block_size`; quantised dimensions come in whole blocks.
_BLOCK = 32
MAX_EXPERTS = 2**16


def broken_rules(text: TextConfig) -> Iterator[str]:
    """Messages of the rules that `text` breaks, the most basic first; none for a valid config."""
    for group in (_sizes, _ratios, _sources, _decoder_side, _candidates, _engram, _draft):
        messages = list(group(text))
        yield from messages
        # Later groups index by what earlier ones check.
        if messages:
            return


def _sizes(text: TextConfig) -> Iterator[str]:
    for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
        "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim",
        "index_topk", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
    ):  # fmt: skip
        if getattr(text, name) < 1:
            yield f"text_config.{name} is {getattr(text, name)}, must be positive"
            return
    if text.num_key_value_heads != 1:
        yield f"text_config.num_key_value_heads is {text.num_key_value_heads}, must be 1 (one shared key-value vector)"
    if text.n_shared_experts != 1:
        yield f"text_config.n_shared_experts is {text.n_shared_experts}, must be 1"
    if text.num_attention_heads % text.o_groups:
        yield f"text_config.num_attention_heads is {text.num_attention_heads}, not divisible by o_groups {text.o_groups}"
        return
    rope = text.qk_rope_head_dim
    if rope < 2 or rope % 2 or rope > min(text.index_head_dim, text.head_dim):
        yield f"text_config.qk_rope_head_dim is {rope}, must be even, at most index_head_dim and head_dim"
    for name in ("n_routed_experts", "dspark_n_routed_experts"):
        if getattr(text, name) > MAX_EXPERTS:  # each one's weights are listed by name before any file is read
            yield f"text_config.{name} is {getattr(text, name)}, above {MAX_EXPERTS}"
    if text.num_experts_per_tok > text.n_routed_experts:
        yield f"text_config.num_experts_per_tok is {text.num_experts_per_tok}, above n_routed_experts {text.n_routed_experts}"
    quantised = {
        "hidden_size": text.hidden_size,
        "q_lora_rank": text.q_lora_rank,
        "head_dim": text.head_dim,
        "o_groups * o_lora_rank": text.o_groups * text.o_lora_rank,
        "num_attention_heads * head_dim / o_groups": text.num_attention_heads * text.head_dim // text.o_groups,
        "moe_intermediate_size": text.moe_intermediate_size,
        "index_head_dim": text.index_head_dim,
    }
    if text.engram_layer_ids:
        quantised["engram_head_dim"] = text.engram_head_dim
    for name, value in quantised.items():
        if value % _BLOCK:
            yield f"text_config.{name} is {value}, must be a multiple of {_BLOCK}"


def _ratios(text: TextConfig) -> Iterator[str]:
    ratios, want = text.compress_ratios, text.num_hidden_layers + text.num_stages
    if len(ratios) != want:
        yield f"text_config.compress_ratios has {len(ratios)} entries, num_hidden_layers + num_nextn_predict_layers is {want}"
        return
    if set(ratios) - {0, 1, 2}:
        yield f"text_config.compress_ratios is {list(ratios)}, entries must be 0, 1 or 2"
        return
    if any(ratios[text.num_hidden_layers :]):
        yield f"text_config.compress_ratios is {list(ratios)}, entries of draft stages must be 0"
    backbone = ratios[: text.num_hidden_layers]
    if list(backbone) != sorted(backbone, key=(0, 2, 1).index):
        yield f"text_config.compress_ratios is {list(ratios)}, backbone layers must go from 0 over 2 to 1"


def _sources(text: TextConfig) -> Iterator[str]:
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(text, name)
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < text.num_hidden_layers for i in ids):
            yield f"text_config.{name} is {list(ids)}, must be ascending layer ids below {text.num_hidden_layers}"
            return
    if not set(text.kv_source_layer_ids) <= set(text.index_source_layer_ids):
        yield f"text_config.kv_source_layer_ids {list(text.kv_source_layer_ids)} is not part of index_source_layer_ids"
        return
    for layer in range(text.num_hidden_layers):
        ratio = text.ratio(layer)
        if ratio == 0 and layer in text.index_source_layer_ids:
            yield f"text_config.index_source_layer_ids names layer {layer}, whose compress_ratios entry is 0"
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            owners = [i for i in getattr(text, name) if i <= layer]
            if ratio and (not owners or text.ratio(owners[-1]) != ratio):
                yield f"text_config.{name} is {list(getattr(text, name))}: layer {layer} of ratio {ratio} has no source of its ratio"
                return


def _decoder_side(text: TextConfig) -> Iterator[str]:
    boundary = text.boundary
    if boundary == text.num_hidden_layers:
        return
    sources = text.kv_source_layer_ids
    if boundary not in sources or sources[-1] != boundary:
        yield f"text_config.kv_source_layer_ids is {list(sources)}, must end with the first decoder layer {boundary}"
    if text.candidate_source_layer_id != boundary:
        yield f"text_config.candidate_source_layer_id is {text.candidate_source_layer_id}, must be the first decoder layer {boundary}"
    if boundary in text.engram_layer_ids:
        yield f"text_config.engram_layer_ids names layer {boundary}, the first decoder layer"


def _candidates(text: TextConfig) -> Iterator[str]:
    source = text.candidate_source_layer_id
    if not text.index_source_layer_ids:
        return
    if source not in text.index_source_layer_ids:
        yield f"text_config.candidate_source_layer_id is {source}, not one of index_source_layer_ids {list(text.index_source_layer_ids)}"
        return
    if any(text.ratio(i) != text.ratio(source) for i in text.index_source_layer_ids if i > source):
        yield f"text_config.index_source_layer_ids after candidate source {source} have another compress_ratios entry"
    blocks, size = text.candidate_topk_blocks, text.candidate_block_size
    if blocks < 1 or size < 1:
        yield f"text_config.candidate_topk_blocks is {blocks} and candidate_block_size {size}, both must be positive"
    elif (blocks - 1) * size + 1 < text.index_topk:
        yield f"text_config.candidate_topk_blocks is {blocks} of {size} entries: fewer than index_topk {text.index_topk} may remain"


def _engram(text: TextConfig) -> Iterator[str]:
    if not text.engram_layer_ids:
        return
    if text.engram_max_ngram_size < 2 or text.engram_n_heads < 1 or text.engram_vocab_size < 1 or text.engram_compressed_vocab_size < 1:
        yield "text_config.engram_* sizes must be positive and engram_max_ngram_size at least 2"
        return
    expected = [sum(primes) for primes in text.engram_primes()]
    if list(text.engram_num_embeddings) != expected:
        yield f"text_config.engram_num_embeddings is {list(text.engram_num_embeddings)}, the bucket primes add up to {expected}"


def _draft(text: TextConfig) -> Iterator[str]:
    if text.num_stages == 0:
        return
    targets = text.dspark_target_layer_ids
    if not targets or any(not 0 <= t < text.num_hidden_layers for t in targets):
        yield f"text_config.dspark_target_layer_ids is {list(targets)}, must name backbone layers"
    elif len({t >= text.boundary for t in targets}) > 1:
        yield f"text_config.dspark_target_layer_ids is {list(targets)}, must lie on one side of layer {text.boundary}"
    if text.dspark_block_size < 1 or text.dspark_markov_rank < 1:
        yield f"text_config.dspark_block_size {text.dspark_block_size} and dspark_markov_rank {text.dspark_markov_rank} must be positive"
    if not 1 <= text.dspark_num_experts_per_tok <= text.dspark_n_routed_experts:
        yield f"text_config.dspark_num_experts_per_tok is {text.dspark_num_experts_per_tok} of {text.dspark_n_routed_experts} experts"
    if not 0 <= text.dspark_noise_token_id < text.vocab_size:
        yield f"text_config.dspark_noise_token_id is {text.dspark_noise_token_id}, outside vocab_size {text.vocab_size}"
