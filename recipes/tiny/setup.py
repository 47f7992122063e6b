"""The model and batch sizes of a run: the shipped configuration on a GPU, or a miniature of it on the CPU."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from engine.models.engram_tables import bucket_primes, compress_vocabulary
from engine.models.tiny import TOKENIZER_FILE, tiny_config
from recipes.tiny.model import Backbone
from recipes.tiny.shape import Shape, shape_from_config


@dataclass(frozen=True, slots=True)
class Setup:
    """rows: packed rows of one step."""

    shape: Shape
    backbone: Backbone
    rows: int
    dtype: torch.dtype


def full_setup(device: str = "cuda", fast: bool = True, rows: int = 65536) -> Setup:
    shape = shape_from_config(tiny_config())
    dtype = torch.bfloat16 if fast else torch.float32
    return Setup(shape, Backbone(shape, compress_vocabulary(TOKENIZER_FILE), device, fast), rows, dtype)


def miniature_config() -> dict:
    """`tiny_config` with every width cut down; the topology stays."""
    config = copy.deepcopy(tiny_config())
    config["text_config"] |= {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "sliding_window": 32,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 32,
        "candidate_topk_blocks": 8,
        "engram_vocab_size": 128,
        "dspark_markov_rank": 32,
    }
    text = config["text_config"]
    primes = bucket_primes(
        tuple(text["engram_layer_ids"]), text["engram_max_ngram_size"], text["engram_n_heads"], text["engram_vocab_size"]
    )
    text["engram_num_embeddings"] = [sum(columns) for columns in primes]
    return config


def miniature_setup(rows: int = 512) -> Setup:
    torch.set_num_threads(1)
    shape = shape_from_config(miniature_config())
    return Setup(shape, Backbone(shape, compress_vocabulary(TOKENIZER_FILE), "cpu", fast=False, max_positions=2048), rows, torch.float32)
