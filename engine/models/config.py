"""The checkpoint's `config.json` as frozen dataclasses, checked. Imports no torch."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.models.engram_tables import bucket_primes

ARCHITECTURE = "DeepseekV41ForCausalLM"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters; they apply to every layer with a compression ratio above 0. Source: config key `rope_scaling`."""

    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of the vision tower. A text-only engine needs them to know which tensor names to skip."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int = 14
    downsample_ratio: int = 3


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Source: config key `text_config`; names are the checkpoint's own."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    rope_scaling: RopeScaling
    n_shared_experts: int = 1
    swiglu_limit: float = 10.0
    routed_scaling_factor: float = 1.5
    gate_temp: float = 1.0
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    max_position_embeddings: int = 1048576
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry that `layer` reads: 0 (window only), 1 or 2."""
        return self.compress_ratios[layer]

    def kv_owner(self, layer: int) -> int:
        """The layer that builds the compressed KV and the index keys which `layer` reads."""
        return _last_up_to(self.kv_source_layer_ids, layer)

    def topk_owner(self, layer: int) -> int:
        """The layer whose indexer selects the entries which `layer` reads."""
        return _last_up_to(self.index_source_layer_ids, layer)

    def uses_candidates(self, layer: int) -> bool:
        """Whether an index source is restricted to the candidate blocks of an earlier one."""
        return layer in self.index_source_layer_ids and layer > self.candidate_source_layer_id

    @property
    def boundary(self) -> int:
        """B: the first decoder layer, `num_hidden_layers` when there is none."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else self.num_hidden_layers

    @property
    def ngram_history(self) -> int:
        """Token ids before a position that its n-gram rows depend on."""
        return self.engram_max_ngram_size - 1 if self.engram_layer_ids else 0

    @property
    def engram_columns(self) -> int:
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def mix_size(self) -> int:
        """Rows of `hc_*_fn`: pre and post weights of n streams, and an n x n matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    def engram_primes(self) -> tuple[tuple[int, ...], ...]:
        """Rows of every column of every engram layer, in the order of `engram_layer_ids`."""
        return bucket_primes(self.engram_layer_ids, self.engram_max_ngram_size, self.engram_n_heads, self.engram_vocab_size)

    @property
    def num_stages(self) -> int:
        """Draft stages, stored as `mtp.0`, `mtp.1`, ..."""
        return self.num_nextn_predict_layers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checked `config.json`. `quantized` tells the two checkpoint variants apart; `vision` is None for text-only ones."""

    text: TextConfig
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    quantized: bool
    vision: VisionConfig | None


def load_config(model_dir: Path) -> ModelConfig:
    """Read and check `model_dir/config.json`.

    Raises:
        CheckpointError: no such file, not JSON, another architecture, or a rule is broken (field and value are named).
    """
    return parse_config(read_config_json(model_dir), source=str(model_dir / "config.json"))


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """The raw `config.json` of a model directory."""
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a directory", hint="MODEL is `tiny`, a checkpoint directory or a hub id")
    if not path.exists():
        raise CheckpointError(f"{path} is missing", hint=f"point to a directory with a {ARCHITECTURE} checkpoint")
    if not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is not a file", hint=f"point to a directory with a {ARCHITECTURE} checkpoint")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__}, not an object")
    return data


def parse_config(data: dict[str, Any], *, source: str = "config.json") -> ModelConfig:
    """A `ModelConfig` from the parsed JSON.

    Raises:
        CheckpointError: as `load_config`.
    """
    architectures = data.get("architectures") or []
    if ARCHITECTURE not in architectures:
        raise CheckpointError(f"{source}: architectures is {architectures}", hint=f"this engine runs {ARCHITECTURE} only")
    raw_text = data.get("text_config")
    if not isinstance(raw_text, dict):
        raise CheckpointError(f"{source}: text_config is missing")
    text = _parse_text(raw_text, source)
    check_text_config(text, source)
    return ModelConfig(
        text=text,
        bos_token_id=_integer(data, "bos_token_id", source, 0),
        eos_token_id=_integer(data, "eos_token_id", source, 1),
        pad_token_id=_integer(data, "pad_token_id", source, 2),
        image_token_id=data.get("image_token_id"),
        quantized=_parse_quantization(data.get("quantization_config"), source),
        vision=_parse_vision(data.get("vision_config"), source),
    )


def _parse_text(raw: dict[str, Any], source: str) -> TextConfig:
    values: dict[str, Any] = {}
    for spec in fields(TextConfig):
        if spec.name == "rope_scaling":
            values[spec.name] = _parse_rope_scaling(raw.get("rope_scaling"), source)
        elif spec.name in raw:
            values[spec.name] = _typed(raw[spec.name], str(spec.type), f"text_config.{spec.name}", source)
        elif spec.default is MISSING:
            raise CheckpointError(f"{source}: text_config.{spec.name} is missing")
    _check_fixed(raw, source)
    return TextConfig(**values)


def _check_fixed(raw: dict[str, Any], source: str) -> None:
    """Switches of which this architecture has one setting only."""
    fixed: dict[str, Any] = {
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "attention_bias": False,
        "hc_shifted": True,
        "q_head_norm": False,
        "dspark_target_attn_input": True,
    }
    for name, allowed in fixed.items():
        if name in raw and raw[name] != allowed:
            raise CheckpointError(f"{source}: text_config.{name} is {raw[name]!r}", hint=f"only {allowed!r} is supported")
    kv_sources = raw.get("kv_source_layer_ids")
    if raw.get("index_k_source_layer_ids", kv_sources) != kv_sources:
        raise CheckpointError(f"{source}: text_config.index_k_source_layer_ids differs from kv_source_layer_ids {kv_sources}")


def _parse_rope_scaling(raw: Any, source: str) -> RopeScaling:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{source}: text_config.rope_scaling is {raw!r}, expected an object of rope_type yarn")
    kind = raw.get("rope_type", raw.get("type"))
    if kind != "yarn":
        raise CheckpointError(f"{source}: text_config.rope_scaling.rope_type is {kind!r}", hint="only yarn is supported")
    values = {
        spec.name: _typed(raw[spec.name], str(spec.type), f"text_config.rope_scaling.{spec.name}", source)
        for spec in fields(RopeScaling)
        if spec.name in raw
    }
    return RopeScaling(**values)


def _parse_quantization(raw: Any, source: str) -> bool:
    """Whether weights are stored quantised. Absent means plain BF16."""
    if raw is None:
        return False
    expected = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    for name, allowed in expected.items():
        if raw.get(name) != allowed:
            raise CheckpointError(f"{source}: quantization_config.{name} is {raw.get(name)!r}", hint=f"only {allowed!r} is supported")
    return True


def _parse_vision(raw: Any, source: str) -> VisionConfig | None:
    if not isinstance(raw, dict) or raw.get("num_hidden_layers", 0) == 0:
        return None
    values: dict[str, Any] = {}
    for spec in fields(VisionConfig):
        if spec.name in raw:
            values[spec.name] = _typed(raw[spec.name], str(spec.type), f"vision_config.{spec.name}", source)
        elif spec.default is MISSING:
            raise CheckpointError(f"{source}: vision_config.{spec.name} is missing")
    return VisionConfig(**values)


# No field of a real model comes near; sizes beyond would be counted up, and NaN and infinities would reach the arithmetic.
_MAX_NUMBER = 2**40


def _typed(value: Any, kind: str, name: str, source: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER  # false for NaN as well
    if kind == "int" and number and value == int(value):
        return int(value)
    if kind == "float" and number:
        return float(value)
    if kind.startswith("tuple") and isinstance(value, list) and all(isinstance(v, int) for v in value):
        return tuple(value)
    raise CheckpointError(f"{source}: {name} is {value!r}, expected {'a list of integers' if kind.startswith('tuple') else kind}")


def _integer(data: dict[str, Any], name: str, source: str, default: int) -> int:
    return int(_typed(data.get(name, default), "int", name, source))


def _last_up_to(owners: tuple[int, ...], layer: int) -> int:
    position = bisect_right(owners, layer)
    if position == 0:
        raise CheckpointError(f"layer {layer} has no source among {list(owners)}")
    return owners[position - 1]


def check_text_config(text: TextConfig, source: str = "config.json") -> None:
    """Every rule that the fields of a valid model obey together.

    Raises:
        CheckpointError: the first broken rule, with field and value.
    """
    from engine.models.config_rules import broken_rules

    for message in broken_rules(text):
        raise CheckpointError(f"{source}: {message}")
