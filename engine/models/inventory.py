"""Which tensors a checkpoint holds: names, shapes and storage, all derived from the config. No torch here.

The loader checks files against it, the writer writes by it, and random weights are drawn for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from engine.models.config import ModelConfig, TextConfig, VisionConfig

BLOCK = 32
DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


class Storage(StrEnum):
    """How a parameter is stored in a quantised checkpoint. In an unquantised one FP8, FP4 and TABLE become BF16."""

    BF16 = "bf16"
    F32 = "f32"
    FP8 = "fp8"
    FP4 = "fp4"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One logical tensor: the name and shape it has in an unquantised checkpoint."""

    name: str
    shape: tuple[int, ...]
    storage: Storage
    vision: bool = False

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix(".weight") + ".scale"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file. dtype is safetensors' own spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def stored_tensors(parameter: Parameter, quantized: bool) -> tuple[StoredTensor, ...]:
    """The one or two tensors that hold `parameter`: its values, and the scales of quantised ones."""
    name, shape = parameter.name, parameter.shape
    match parameter.storage:
        case Storage.F32:
            return (StoredTensor(name, "F32", shape),)
        case Storage.FP8 if quantized:
            scale = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            return StoredTensor(name, "F8_E4M3", shape), StoredTensor(parameter.scale_name, "F8_E8M0", scale)
        case Storage.FP4 if quantized:
            packed, scale = (shape[0], shape[1] // 2), (shape[0], shape[1] // BLOCK)
            return StoredTensor(name, "I8", packed), StoredTensor(parameter.scale_name, "F8_E8M0", scale)
        case Storage.TABLE if quantized:
            scale = (shape[0], shape[1] // BLOCK)
            return StoredTensor(name, "F8_E4M3", shape), StoredTensor(parameter.scale_name, "F8_E8M0", scale)
    return (StoredTensor(name, "BF16", shape),)


def stored_inventory(config: ModelConfig) -> dict[str, StoredTensor]:
    """Every tensor of a complete checkpoint by name, vision included."""
    return {t.name: t for p in parameters(config) for t in stored_tensors(p, config.quantized)}


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every logical tensor of a complete checkpoint."""
    text = config.text
    yield from _globals(text)
    for layer in range(text.num_hidden_layers):
        yield from _block(text, f"layers.{layer}", text.n_routed_experts)
        yield from _sparse_attention(text, layer)
    yield from _engram(text)
    for stage in range(text.num_stages):
        yield from _block(text, f"mtp.{stage}", text.dspark_n_routed_experts)
    yield from _draft_extras(text)
    if config.vision is not None:
        yield from _vision(config.vision, text.hidden_size)


def _globals(text: TextConfig) -> Iterator[Parameter]:
    yield Parameter("embed.weight", (text.vocab_size, text.hidden_size), Storage.BF16)
    yield Parameter("head.weight", (text.vocab_size, text.hidden_size), Storage.BF16)
    yield Parameter("norm.weight", (text.hidden_size,), Storage.BF16)


def _block(text: TextConfig, prefix: str, num_experts: int) -> Iterator[Parameter]:
    """What every backbone layer and every draft stage has."""
    hidden, heads, dim = text.hidden_size, text.num_attention_heads, text.head_dim
    inner, mixed = text.o_groups * text.o_lora_rank, text.hc_mult * hidden
    for name, shape in (
        ("wq_a", (text.q_lora_rank, hidden)),
        ("wq_b", (heads * dim, text.q_lora_rank)),
        ("wkv", (dim, hidden)),
        ("wo_a", (inner, heads * dim // text.o_groups)),
        ("wo_b", (hidden, inner)),
    ):
        yield Parameter(f"{prefix}.attn.{name}.weight", shape, Storage.FP8)
    yield Parameter(f"{prefix}.attn.q_norm.weight", (text.q_lora_rank,), Storage.BF16)
    yield Parameter(f"{prefix}.attn.kv_norm.weight", (dim,), Storage.BF16)
    yield Parameter(f"{prefix}.attn.attn_sink", (heads,), Storage.F32)
    for part in ("attn", "ffn"):
        yield Parameter(f"{prefix}.{part}_norm.weight", (hidden,), Storage.BF16)
        yield Parameter(f"{prefix}.hc_{part}_fn", (text.mix_size, mixed), Storage.F32)
        yield Parameter(f"{prefix}.hc_{part}_base", (text.mix_size,), Storage.F32)
        yield Parameter(f"{prefix}.hc_{part}_scale", (3,), Storage.F32)
    yield Parameter(f"{prefix}.ffn.gate.weight", (num_experts, hidden), Storage.BF16)
    yield Parameter(f"{prefix}.ffn.gate.bias", (num_experts,), Storage.F32)
    yield Parameter(f"{prefix}.ffn.gate.bias_vl", (num_experts,), Storage.F32)
    yield from _expert(text, f"{prefix}.ffn.shared_experts", Storage.FP8)
    for expert in range(num_experts):
        yield from _expert(text, f"{prefix}.ffn.experts.{expert}", Storage.FP4)


def _expert(text: TextConfig, prefix: str, storage: Storage) -> Iterator[Parameter]:
    wide = (text.moe_intermediate_size, text.hidden_size)
    yield Parameter(f"{prefix}.w1.weight", wide, storage)
    yield Parameter(f"{prefix}.w2.weight", wide[::-1], storage)
    yield Parameter(f"{prefix}.w3.weight", wide, storage)


def _sparse_attention(text: TextConfig, layer: int) -> Iterator[Parameter]:
    hidden, dim, prefix = text.hidden_size, text.head_dim, f"layers.{layer}.attn"
    if layer in text.kv_source_layer_ids:
        yield Parameter(f"{prefix}.compressor.wkv.weight", (dim, hidden), Storage.BF16)
        if text.ratio(layer) == 2:
            yield Parameter(f"{prefix}.compressor.wgate.weight", (dim, hidden), Storage.BF16)
        yield Parameter(f"{prefix}.compressor.norm.weight", (dim,), Storage.BF16)
        yield Parameter(f"{prefix}.indexer.wk.weight", (text.index_head_dim, dim), Storage.BF16)
        yield Parameter(f"{prefix}.indexer.k_norm.weight", (text.index_head_dim,), Storage.BF16)
    if layer in text.index_source_layer_ids:
        yield Parameter(f"{prefix}.indexer.wq_b.weight", (text.index_n_heads * text.index_head_dim, text.q_lora_rank), Storage.FP8)
        yield Parameter(f"{prefix}.indexer.weights_proj.weight", (text.index_n_heads, hidden), Storage.BF16)


def _engram(text: TextConfig) -> Iterator[Parameter]:
    for layer, rows in zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True):
        prefix, hidden = f"layers.{layer}.engram", text.hidden_size
        yield Parameter(f"{prefix}.embed.weight", (rows, text.engram_head_dim), Storage.TABLE)
        width = text.engram_columns * text.engram_head_dim
        yield Parameter(f"{prefix}.wkv.weight", ((text.hc_mult + 1) * hidden, width), Storage.FP8)
        yield Parameter(f"{prefix}.q_weight", (text.hc_mult, hidden), Storage.BF16)
        yield Parameter(f"{prefix}.k_weight", (text.hc_mult, hidden), Storage.BF16)


def _draft_extras(text: TextConfig) -> Iterator[Parameter]:
    if text.num_stages == 0:
        return
    hidden, last, rank = text.hidden_size, f"mtp.{text.num_stages - 1}", text.dspark_markov_rank
    yield Parameter("mtp.0.main_proj.weight", (hidden, len(text.dspark_target_layer_ids) * hidden), Storage.FP8)
    yield Parameter("mtp.0.main_norm.weight", (hidden,), Storage.BF16)
    yield Parameter(f"{last}.norm.weight", (hidden,), Storage.BF16)
    yield Parameter(f"{last}.markov_head.embed.weight", (text.vocab_size, rank), Storage.BF16)
    yield Parameter(f"{last}.markov_head.head.weight", (text.vocab_size, rank), Storage.BF16)
    yield Parameter(f"{last}.confidence_head.proj.weight", (1, hidden + rank), Storage.BF16)


def _vision(vision: VisionConfig, hidden: int) -> Iterator[Parameter]:
    width, mlp = vision.hidden_size, vision.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "image_start": (hidden,),
        "image_end": (hidden,),
        "image_newline": (hidden,),
        "vision.patch_embed.proj.weight": (width, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (hidden, vision.downsample_ratio**2 * width),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
    }
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        shapes |= {
            f"{prefix}.norm1.weight": (width,),
            f"{prefix}.norm2.weight": (width,),
            f"{prefix}.attn.wqkv.weight": (3 * width, width),
            f"{prefix}.attn.wqkv.bias": (3 * width,),
            f"{prefix}.attn.wo.weight": (width, width),
            f"{prefix}.attn.wo.bias": (width,),
            f"{prefix}.mlp.w1.weight": (2 * mlp, width),
            f"{prefix}.mlp.w2.weight": (width, mlp),
        }
    for name, shape in shapes.items():
        yield Parameter(name, shape, Storage.BF16, vision=True)
