"""What runs of the whole model should show: byte floors, operations, and times predicted from what has been measured (`docs/hopper.md`).

All figures are of `ranks` GPUs that share the experts; context, prompts and kept rows are in tokens.
"""

from __future__ import annotations

from math import log2

from deepinfer_cli.opbench.layer_floor import layer_floor
from engine.models.config import ModelConfig

# Measured on H200s: copy, bf16 products, gathers of many rows between GPUs, page copies from the host.
COPY_TBS, BF16_TFLOPS, NVLINK_GBS, HOST_GBS = 4.25, 735.0, 300.0, 51.0
# 40 layers on four H200s took 10.14, 10.69, 16.30 and 30.74 ms a step at batch 1, 8, 64 and 256, where the floor is 2.27, 4.02, 12.84 and
# 18.87: no step is below so much a layer, and so many times the floor are needed at 64 rows, more with every doubling behind them.
LAYER_MS, OVER_FLOOR, OVER_DOUBLING = 0.26, 1.27, 0.18
EAGER_MS = 3.0  # what the host takes for an eager layer with its exchange: 110 to 125 ms for those 40
PREFILL_SHARE = 0.55  # of bf16; one layer at 4,096 tokens reaches 0.48, at 32,768 tokens 0.58


def touched(experts: int, chosen: int, rows: int) -> float:
    """Distinct experts that so many rows choose, on average."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def floor_ms(config: ModelConfig, batch: int, ranks: int, context: int, rows_each: int = 1) -> float:
    """Bytes of all layers and the head for one step of `rows_each` rows a sequence, read by all ranks together at the copy speed of each.

    Dense weights are on every rank that has rows; experts and cache rows are divided.
    """
    text = config.text
    chosen = touched(text.n_routed_experts, text.num_experts_per_tok, batch * rows_each)
    total = 0.0
    for layer in range(text.num_hidden_layers):
        floor = layer_floor(config, layer, context)
        total += floor.dense_bytes + (chosen * floor.expert_bytes + batch * floor.row_bytes) / ranks
    return total / COPY_TBS / 1e9 + head_ms(config)


def head_ms(config: ModelConfig) -> float:
    return 2 * config.text.vocab_size * config.text.hidden_size / COPY_TBS / 1e9


def layers_ms(layers: int, floor: float, rows: int) -> float:
    """Recorded layers: their latency, or what `rows` rows need over the floor of the bytes."""
    over = OVER_FLOOR + OVER_DOUBLING * max(0.0, log2(rows / 64))
    return max(layers * LAYER_MS, over * floor)


def step_ms(config: ModelConfig, batch: int, ranks: int, context: int, rows_each: int = 1, eager: bool = False) -> float:
    """A decode or verify step. Eager ones take their launches at least."""
    layers = config.text.num_hidden_layers
    recorded = layers_ms(layers, floor_ms(config, batch, ranks, context, rows_each), batch * rows_each)
    return max(recorded, layers * EAGER_MS) if eager else recorded


def draft_ms(config: ModelConfig, batch: int, ranks: int) -> float:
    """The draft stages of a rank's sequences, whose experts every rank has, and the head, which is read once for all places."""
    text = config.text
    stage, rows = layer_floor(config, text.num_hidden_layers - 1, 0), -(-batch // ranks) * text.dspark_block_size
    chosen = touched(text.dspark_n_routed_experts, text.dspark_num_experts_per_tok, rows)
    floor = text.num_stages * (stage.dense_bytes + chosen * stage.expert_bytes) / COPY_TBS / 1e9
    return layers_ms(text.num_stages, floor, rows) + head_ms(config)


def prefill_flops(config: ModelConfig, tokens: int, keep: int) -> float:
    """Useful operations of a prompt: encoder layers see all tokens, on average at half the context, decoder layers the last `keep`."""
    text = config.text
    encoder = sum(layer_floor(config, layer, tokens // 2).flops(tokens) for layer in range(text.boundary))
    decoder = range(text.boundary, text.num_hidden_layers)
    return encoder + sum(layer_floor(config, layer, tokens).flops(min(keep, tokens)) for layer in decoder)


def prefill_ms(config: ModelConfig, tokens: int, keep: int, ranks: int, together: bool) -> float:
    """A prompt of every rank, all at once, or one prompt that all ranks compute together. Decoder layers cost their launches."""
    text = config.text
    mine = tokens / ranks if together else tokens
    compute = prefill_flops(config, tokens, keep) * mine / tokens / (PREFILL_SHARE * BF16_TFLOPS * 1e9)
    exchange = text.boundary * 2 * (ranks - 1) * mine * text.hidden_size * 2 / (NVLINK_GBS * 1e6)
    return compute + exchange + (text.num_hidden_layers - text.boundary) * EAGER_MS


def hit_ms(config: ModelConfig, prefix: int, suffix: int, ranks: int) -> float:
    """Until the first token behind a prefix in the host cache: 890 bytes a token come back, the suffix costs launches or its weights."""
    return prefix * 890 / (HOST_GBS * 1e6) + step_ms(config, suffix * ranks, ranks, prefix, eager=True)
