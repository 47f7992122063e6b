"""Weights between runs: bf16, in parts small enough for any file limit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from recipes.tiny.params import Params

PART_BYTES = 12_000_000


def save_parts(directory: Path, params: Params) -> None:
    """Write `weights-K.safetensors`; f32 tensors that are small stay f32."""
    parts: list[Params] = [{}]
    size = 0
    for name, p in params.items():
        tensor = p.detach().to(torch.float32 if p.numel() < 5000 else torch.bfloat16).cpu().contiguous()
        rows = max(1, PART_BYTES // max(1, tensor.nbytes // tensor.shape[0]))
        for piece, at in enumerate(range(0, tensor.shape[0], rows)):
            chunk = tensor[at : at + rows].clone()
            if size + chunk.nbytes > PART_BYTES:
                parts.append({})
                size = 0
            parts[-1][f"{name}@{piece}"] = chunk
            size += chunk.nbytes
    for number, part in enumerate(parts):
        save_file(part, directory / f"weights-{number}.safetensors")


def load_parts(directory: Path) -> Params:
    """The inverse, f32. Raises FileNotFoundError when the directory has no parts."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    files = sorted(directory.glob("weights-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no weights-*.safetensors; train a phase with --out {directory} first")
    for file in files:
        for key, tensor in load_file(file).items():
            name, piece = key.rsplit("@", 1)
            pieces.setdefault(name, {})[int(piece)] = tensor.float()
    return {name: torch.cat([found[i] for i in range(len(found))]) for name, found in pieces.items()}
