"""The released configuration, and excerpts of it: models of a few layers whose shapes are the real ones.

An excerpt is a valid model of its own, so everything that runs a model runs it; with `load_format` dummy it needs no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.models.engram_tables import bucket_primes

# One layer of every kind: n-gram table without compression, source and follower of ratio 2, source of ratio 1 (also the source of
# candidates), two followers of it, and an index source that is restricted to candidates.
EVERY_KIND = (1, 2, 3, 20, 21, 22, 24)
# Rows of one n-gram column instead of 16 million: 24 columns of a table layer then take 6.3 GB.
_ENGRAM_ROWS = 1_000_000


def released_config() -> dict[str, Any]:
    """The released `config.json` as parsed JSON."""
    data: dict[str, Any] = json.loads(files("engine.models").joinpath("released.json").read_text(encoding="utf-8"))
    return data


def excerpt(
    layers: Sequence[int] = EVERY_KIND, *, stages: int = 1, experts: int | None = None, engram_rows: int = _ENGRAM_ROWS
) -> dict[str, Any]:
    """The configuration of a model that has only some of the released layers.

    layers: released layer numbers, ascending; every follower needs its source. stages: draft stages, at most three. experts: routed
    experts per layer, all 384 when None; 48 is one rank's share of eight. engram_rows: where the search for table sizes begins.

    Raises:
        ConfigError: not layers of the release, or a follower without its source.
    """
    data = released_config()
    text = data["text_config"]
    if list(layers) != sorted(set(layers)) or not layers or not set(layers) <= set(range(text["num_hidden_layers"])):
        raise ConfigError(f"layers {list(layers)} are not ascending layer numbers of the release", hint="for example 1,2,3,20,21,24")
    _check_sources(text, layers)
    place = {layer: number for number, layer in enumerate(layers)}
    ratios = [text["compress_ratios"][layer] for layer in layers]
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        text[name] = [place[layer] for layer in text[name] if layer in place]
    candidate = text["candidate_source_layer_id"]
    text["candidate_source_layer_id"] = place.get(candidate, max(text["index_source_layer_ids"], default=0))
    boundary = ratios.index(1) if 1 in ratios else len(layers)
    behind = list(range(boundary, len(layers))) or list(range(len(layers)))
    text |= {
        "num_hidden_layers": len(layers),
        "compress_ratios": [*ratios, *[0] * stages],
        "num_nextn_predict_layers": stages,
        "dspark_target_layer_ids": behind[-len(text["dspark_target_layer_ids"]) :],
        "engram_vocab_size": engram_rows,
    }
    if experts is not None:
        text |= {"n_routed_experts": experts, "dspark_n_routed_experts": min(experts, text["dspark_n_routed_experts"])}
    sizes = (text["engram_max_ngram_size"], text["engram_n_heads"], engram_rows)
    text["engram_num_embeddings"] = [sum(primes) for primes in bucket_primes(tuple(text["engram_layer_ids"]), *sizes)]
    data["vision_config"] = {**data["vision_config"], "num_hidden_layers": 0}
    return data


def write_excerpt(directory: Path, config: dict[str, Any]) -> Path:
    """Make a model directory without weights, for `load_format` dummy. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return directory


def _check_sources(text: dict[str, Any], layers: Sequence[int]) -> None:
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in layers:
            if not text["compress_ratios"][layer]:
                continue
            owner = max(source for source in text[name] if source <= layer)
            kept = [source for source in text[name] if source in layers and source <= layer]
            if not kept or text["compress_ratios"][max(kept)] != text["compress_ratios"][layer]:
                raise ConfigError(f"layer {layer} reads from layer {owner}, which is not among {list(layers)}", hint=f"add {owner}")
