"""Write a checkpoint in the released format from plain float tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.models.config import parse_config
from engine.models.inventory import Parameter, Storage, parameters
from engine.ops.weight_formats import encode_fp4_rows, encode_fp8_blocks, encode_table_rows


def write_checkpoint(out_dir: Path, config_json: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors` into `out_dir`, quantised if `config_json` has a `quantization_config`.

    tensors: logical name -> float tensor at its logical shape (`layers.0.attn.wq_a.weight`, `layers.0.ffn.experts.3.w1.weight`,
    `layers.1.engram.embed.weight`, ...; see `engine.models.inventory.parameters`). Values that the storage format cannot hold
    are rounded. Vision tensors may be left out as a group. The file appears under its name only when it is complete.

    Raises:
        CheckpointError: the config is invalid, or tensors are missing, unknown or of another shape.
    """
    config = parse_config(config_json)
    wanted = {p.name: p for p in parameters(config) if not p.vision or p.name in tensors}
    _check(wanted, tensors)
    stored: dict[str, Tensor] = {}
    for name, parameter in wanted.items():
        stored |= encode_parameter(parameter, tensors[name].detach().cpu(), config.quantized)
    out_dir.mkdir(parents=True, exist_ok=True)
    partial = out_dir / "model.safetensors.partial"
    save_file(stored, str(partial), metadata={"format": "pt"})
    os.replace(partial, out_dir / "model.safetensors")
    (out_dir / "config.json").write_text(json.dumps(config_json, indent=1) + "\n", encoding="utf-8")


def encode_parameter(parameter: Parameter, value: Tensor, quantized: bool) -> dict[str, Tensor]:
    """The stored tensors of one parameter by name. value: float tensor of the logical shape."""
    encoders = {Storage.FP8: encode_fp8_blocks, Storage.FP4: encode_fp4_rows, Storage.TABLE: encode_table_rows}
    encoder = encoders.get(parameter.storage) if quantized else None
    if encoder is not None:
        weight, scale = encoder(value)
        return {parameter.name: weight.contiguous(), parameter.scale_name: scale.view(torch.float8_e8m0fnu)}
    dtype = torch.float32 if parameter.storage is Storage.F32 else torch.bfloat16
    # Two names may share one tensor in a state dict; safetensors wants separate storage.
    return {parameter.name: value.to(dtype).contiguous().clone()}


def _check(wanted: Mapping[str, Parameter], tensors: Mapping[str, Tensor]) -> None:
    problems = [f"missing {name}" for name in wanted if name not in tensors]
    problems += [f"unknown {name}" for name in tensors if name not in wanted]
    problems += [
        f"{name} is {list(tensors[name].shape)}, expected {list(p.shape)}"
        for name, p in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != p.shape
    ]
    if problems:
        raise CheckpointError(f"cannot write a checkpoint: {len(problems)} tensors do not fit: {'; '.join(problems[:5])}")
