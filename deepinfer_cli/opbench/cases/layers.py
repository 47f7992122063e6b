"""Whole layers of the released shapes with random weights: decode at several batches and contexts, prefill, one rank's share of experts."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from deepinfer_cli.opbench.case import Case, NotMeasured, Prepared, Setting, Target
from deepinfer_cli.opbench.cases.moe import grouped, plain_experts
from deepinfer_cli.opbench.layer_floor import layer_floor
from deepinfer_cli.opbench.plain_layer import compiled, plain_calls
from engine.config import EngineConfig
from engine.layer_runs import LayerRun, LayerRuns
from engine.model_runner import ModelRunner
from engine.models.config import ModelConfig
from engine.models.packed_layers import PackedMoE
from engine.models.released import excerpt, write_excerpt

# Released numbers of the layers that are loaded: an n-gram layer, source and follower of ratio 2, the source of ratio 1, its follower,
# and an index source that is restricted to candidates. All six fit one H200 as stored.
LAYERS = (1, 2, 3, 20, 21, 24)
# Batch-invariant mode is measured on two followers and what they read.
_INVARIANT_LAYERS = (2, 3, 20, 21)
_NAMES = {1: "ngram", 2: "source2", 3: "follower2", 20: "source1", 21: "follower1", 24: "candidates"}
_SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 64,
    "o_groups": 2, "o_lora_rank": 32, "moe_intermediate_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 2,
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 32, "candidate_topk_blocks": 8, "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8, "dspark_noise_token_id": 501, "sliding_window": 32,
}  # fmt: skip
_DECODE_TARGETS = {1: (5.0, 3.0), 8: (3.0, 2.0), 64: (2.0, 1.5), 256: (2.0, 1.5)}
_SHARE_TARGETS = {64: (3.0, 1.8), 256: (2.5, 1.6)}
_SHORT, _LONG = 8_192, 65_536
_SMALL_BATCH, _SMALL_LEN = 4, 512
_COMPILE_S = 25.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    config: ModelConfig
    runs: LayerRuns


def _load(setting: Setting, layers: tuple[int, ...], experts: int | None, invariant: bool = False) -> _Loaded:
    """The excerpt with a cache for the largest case, kept for the cases that follow; another one takes its place on the device."""
    key = f"layers {layers} {experts} {invariant}"
    max_batch, max_len = (_SMALL_BATCH, _SMALL_LEN) if setting.small else (max(_DECODE_TARGETS), _LONG)
    setting.drop_others("layers ", key)
    if setting.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()

    def make() -> _Loaded:
        data = excerpt(layers, stages=0, experts=experts, engram_rows=997 if setting.small else 1_000_000)
        if setting.small:
            data["text_config"] |= _SMALL | ({} if experts is None else {"n_routed_experts": 4})
            data["text_config"]["engram_compressed_vocab_size"] = 512
        path = write_excerpt(Path(mkdtemp(prefix="dix-layers-")), data)
        config = EngineConfig(
            model=str(path),
            load_format="dummy",
            device=setting.device,
            precision="B",
            seed=setting.seed,
            num_blocks=max_batch * -(-max_len // 128) + 1,
            max_num_seqs=max_batch,
            max_num_batched_tokens=max_len,
            max_model_len=max_len - 8,
            enforce_eager=True,
            batch_invariant=invariant,
        )
        runner = ModelRunner(config)
        return _Loaded(runner.model_config, LayerRuns(runner, max_batch, max_len, setting.seed))

    return setting.shared(key, make)


def _decode(layer: int, batch: int, context: int, target: Target, experts: int | None = None, invariant: bool = False) -> Case:
    def prepare(setting: Setting) -> Prepared:
        rows, length = (min(batch, _SMALL_BATCH), _SMALL_LEN) if setting.small else (batch, context)
        layers = _INVARIANT_LAYERS if invariant else LAYERS if experts is None else (20, layer)
        loaded = _load(setting, layers, experts, invariant)
        run = loaded.runs.decode(layers.index(layer), rows, length)
        floor = layer_floor(loaded.config, layers.index(layer), length)
        return _prepared(run, floor.num_bytes(rows, run.touched), floor.flops(rows))

    params: dict[str, int | str] = {"layer": _NAMES[layer], "batch": batch, "context": context}
    return Case(
        "l.decode.invariant" if invariant else "l.decode" if experts is None else "l.decode.ep8", params, prepare, target, group="layers"
    )


def _plain(layer: int, batch: int, compile: bool = False) -> Case:
    """The same layer in plain PyTorch, a line of its own: its bf16 experts alone take 27 GB. compile: by torch.compile, if that ends."""

    def prepare(setting: Setting) -> Prepared:
        rows, length = (min(batch, _SMALL_BATCH), _SMALL_LEN) if setting.small else (batch, _SHORT)
        loaded, number = _load(setting, LAYERS, None), LAYERS.index(layer)
        run = loaded.runs.decode(number, rows, length)
        moe = loaded.runs.layers[number].block.ffn
        if not isinstance(moe, PackedMoE):
            if compile:
                raise NotMeasured("the layer is plain PyTorch here already")
            return _prepared(run, layer_floor(loaded.config, number, length).num_bytes(rows, run.touched), 0.0)
        calls = plain_calls(loaded.runs, run, number, plain_experts(setting, moe.experts), grouped)
        floor = layer_floor(loaded.config, number, length)
        if compile:
            # One set of streams: every set would be compiled anew, and the weights alone are beyond the L2 cache.
            calls = [compiled(calls[0], _COMPILE_S)]
        return Prepared(calls, floor.num_bytes(rows, run.touched), floor.flops(rows), count_kernels=True)

    params: dict[str, int | str] = {"layer": _NAMES[layer], "batch": batch, "context": _SHORT}
    return Case("l.compiled" if compile else "l.plain", params, prepare, Target("over_floor"), group="layers")


def _prefill(layer: int, tokens: int, target: Target, invariant: bool = False) -> Case:
    def prepare(setting: Setting) -> Prepared:
        count = _SMALL_LEN // 2 if setting.small else tokens
        layers = _INVARIANT_LAYERS if invariant else LAYERS
        loaded = _load(setting, layers, None, invariant)
        number = layers.index(layer)
        run = loaded.runs.prefill(number, count)
        # Rows see half the context on average.
        floor = layer_floor(loaded.config, number, count // 2)
        return _prepared(run, floor.num_bytes(0, loaded.config.text.n_routed_experts), floor.flops(count))

    return Case(
        "l.prefill.invariant" if invariant else "l.prefill", {"layer": _NAMES[layer], "tokens": tokens}, prepare, target, group="layers"
    )


def _prepared(run: LayerRun, num_bytes: float, flops: float) -> Prepared:
    def check() -> tuple[float, float]:
        out = run.calls[0]()
        return (0.0 if bool(out.isfinite().all()) else float("inf")), 0.0

    return Prepared(run.calls, num_bytes, flops, check=check, params={"touched": round(run.touched, 1)}, count_kernels=True)


def _cases() -> list[Case]:
    cases = [
        _decode(21, batch, context, Target("over_floor", *_DECODE_TARGETS[batch]))
        for context in (_SHORT, _LONG)
        for batch in _DECODE_TARGETS
    ]
    others = [_decode(layer, batch, _SHORT, Target("over_floor")) for layer in LAYERS if layer != 21 for batch in (1, 64)]
    cases[len(_DECODE_TARGETS) : len(_DECODE_TARGETS)] = others
    cases += [_plain(21, batch) for batch in (1, 8, 64)]
    cases += [_plain(21, batch, compile=True) for batch in (1, 8, 64)]
    cases += [_decode(21, batch, _SHORT, Target("over_floor", *bounds), experts=48) for batch, bounds in _SHARE_TARGETS.items()]
    cases += [_prefill(3, tokens, Target("bf16", 0.40, 0.55)) for tokens in (4_096, 32_768)]
    # Last: the mode holds for a process, from the load of these layers on.
    cases += [_decode(21, batch, _SHORT, Target("over_floor"), invariant=True) for batch in (1, 8, 64)]
    return [*cases, _prefill(3, 4_096, Target("bf16"), invariant=True)]


CASES = _cases()
