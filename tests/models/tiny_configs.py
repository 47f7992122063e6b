"""Configs that tests share: the released sizes and a small one with every mechanism."""

import copy
import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden" / "model"

_QUANT = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}


def small_config(**text: Any) -> dict[str, Any]:
    """8 layers, window 16, boundary 5, vision of 2 blocks; `text` overrides fields of `text_config`."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 500,
        "quantization_config": copy.deepcopy(_QUANT),
        "text_config": {
            "model_type": "deepseek_v41_text", "vocab_size": 512, "hidden_size": 128, "moe_intermediate_size": 64,
            "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
            "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2,
            "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20,
            "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
            "tie_word_embeddings": False, "max_position_embeddings": 4096, "rope_theta": 10000, "rope_scaling": dict(_YARN),
            "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
            "sliding_window": 16, "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0], "compress_rope_theta": 160000,
            "kv_source_layer_ids": [2, 5], "index_source_layer_ids": [2, 5, 7],
            "index_n_heads": 8, "index_head_dim": 32, "index_topk": 8,
            "candidate_source_layer_id": 5, "candidate_topk_blocks": 8, "candidate_block_size": 8,
            "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
            "engram_layer_ids": [1, 4], "engram_num_embeddings": [630, 834], "engram_max_ngram_size": 4,
            "engram_vocab_size": 97, "engram_n_heads": 2, "engram_head_dim": 32, "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": 512,
            "num_nextn_predict_layers": 2, "dspark_block_size": 3, "dspark_noise_token_id": 501,
            "dspark_target_layer_ids": [5, 6, 7], "dspark_markov_rank": 32,
            "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2, **text,
        },
        "vision_config": {
            "model_type": "deepseek_v41_vision", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
            "intermediate_size": 96, "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 64,
            "min_pixels": 3136, "max_wh_ratio": None,
        },
    }  # fmt: skip


def golden_config(name: str = "tiny-a-bf16") -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())
