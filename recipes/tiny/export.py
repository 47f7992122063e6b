"""Write trained weights as a checkpoint in the released format.

`python -m recipes.tiny.export DIR OUT`: DIR holds weights in parts; OUT becomes a complete checkpoint directory.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor

from engine.loader import open_checkpoint, write_checkpoint
from engine.models.config import load_config
from engine.models.inventory import parameters
from engine.models.tiny import TOKENIZER_FILE, _write_json, tiny_config, tokenizer_config, write_encoding
from recipes.tiny.checkpoint import load_parts
from recipes.tiny.params import Params, stack_released, unstack_params
from recipes.tiny.shape import shape_from_config


def export(params: Params, out: Path) -> None:
    """Quantise and write weights, config, tokenizer and chat encoder."""
    config = tiny_config()
    write_checkpoint(out, config, unstack_params(shape_from_config(config), params))
    shutil.copyfile(TOKENIZER_FILE, out / "tokenizer.json")
    _write_json(out / "tokenizer_config.json", tokenizer_config())
    write_encoding(out / "encoding")


def served_params(checkpoint: Path) -> Params:
    """The parameters that a server computes with: decoded from the stored formats, f32."""
    config = load_config(checkpoint)
    source = open_checkpoint(checkpoint, config)
    tensors: dict[str, Tensor] = {}
    for parameter in parameters(config):
        if "engram.embed" in parameter.name:
            rows, scale = source.table(parameter.name)
            tensors[parameter.name] = _table_values(rows, scale)
        elif not parameter.vision:
            tensors[parameter.name] = source.tensor(parameter.name, torch.float32)
    return stack_released(shape_from_config(tiny_config()), tensors)


def _table_values(rows: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return rows.float()
    factor = torch.exp2(scale.view(torch.uint8).float() - 127.0)
    return (rows.float().unflatten(-1, (-1, 32)) * factor[..., None]).flatten(-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    export(load_parts(args.weights), args.out)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
