"""A decode step of the embedded model beside `DeepseekV4ForCausalLM` of transformers at equal dimensions. Not a test.

    OMP_NUM_THREADS=1 python -m tests.engine.bench_transformers [--streams 1,8] [--context 300] [--rounds 10]

transformers has no V4.1, so its V4 stands in: the same hidden size, layers, heads, ranks, experts, streams and vocabulary, fp32, random
weights, its own dynamic cache, one thread. Layers with compressed entries use its sparse attention at a rate of 2. It has no n-gram tables
and no draft stages, and its indexer runs in every such layer.
transformers comes with the benchmark extras; nothing that serves imports it.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from engine.batch import Batch, StepKind
from tests.engine.bench_decode import CHUNK, make, piece
from tests.engine.paired import model_dir, start

BURST = 8


def peer(text):
    """The other side, with random weights. text: `text_config` of the embedded model."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    ratios = text["compress_ratios"][: text["num_hidden_layers"]]
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "q_lora_rank",
        "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "hc_mult", "hc_sinkhorn_iters", "o_groups",
        "o_lora_rank", "index_n_heads", "index_head_dim", "index_topk", "sliding_window", "max_position_embeddings", "scoring_func",
    )  # fmt: skip
    config = DeepseekV4Config(
        **{name: text[name] for name in same},
        layer_types=["compressed_sparse_attention" if ratio else "sliding_attention" for ratio in ratios],
        mlp_layer_types=["moe"] * len(ratios),
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 128},
        partial_rotary_factor=text["qk_rope_head_dim"] / text["head_dim"],
    )
    torch.manual_seed(0)
    return DeepseekV4ForCausalLM(config).eval()


class Ours:
    """The engine's compiled step."""

    def __init__(self, model, prompts, room):
        self._runner = make(model, False, len(prompts))
        self._ids = [ids + ids[:room] for ids in prompts]
        self._at = len(prompts[0])
        for slot, ids in enumerate(self._ids, start=1):
            for first in range(0, self._at, CHUNK):
                self._runner.run(Batch(StepKind.PREFILL, [piece(self._runner, ids, slot, first, min(self._at, first + CHUNK))]))

    def step(self):
        slices = [piece(self._runner, ids, slot, self._at, self._at + 1) for slot, ids in enumerate(self._ids, start=1)]
        self._runner.run(Batch(StepKind.DECODE, slices))
        self._at += 1


class Theirs:
    """One forward call per token, with its cache."""

    def __init__(self, model, prompts):
        self._model = model
        with torch.inference_mode():
            self._cache = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1).past_key_values
        self._token = torch.full((len(prompts), 1), 9)

    @torch.inference_mode()
    def step(self):
        self._cache = self._model(self._token, past_key_values=self._cache, use_cache=True).past_key_values


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    start()
    model = model_dir(None)
    text = json.loads((Path(model) / "config.json").read_text())["text_config"]
    other = peer(text)
    random = torch.Generator().manual_seed(0)
    for streams in (int(part) for part in args.streams.split(",")):
        prompts = [torch.randint(20, 400, (args.context,), generator=random).tolist() for _ in range(streams)]
        sides = {"dix": Ours(model, prompts, args.rounds * (BURST + 1)), "transformers": Theirs(other, prompts)}
        times = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, side in sides.items():
                side.step()  # finds the caches cold
                for _ in range(BURST):
                    began = time.thread_time()
                    side.step()
                    times[name].append(1e3 * (time.thread_time() - began))
        ours, theirs = (statistics.median(times[name]) for name in ("dix", "transformers"))
        print(f"decode, {streams} streams: dix {ours:.3f}, transformers {theirs:.2f} ms CPU a step: {theirs / ours:.1f} x", flush=True)


if __name__ == "__main__":
    main()
