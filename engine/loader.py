"""From safetensors files to weights: check names, shapes and dtypes first, then read tensor by tensor.

Also publishes what writes the format: `write_checkpoint`, the encoders and `random_tensors`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError
from engine.models.checkpoint_writer import write_checkpoint
from engine.models.config import ModelConfig
from engine.models.inventory import BLOCK, Parameter, Storage, StoredTensor, parameters, stored_inventory, stored_tensors
from engine.models.random_weights import random_rows, random_tensor, random_tensors
from engine.ops.weight_formats import (
    decode_fp4_rows,
    decode_fp8_blocks,
    decode_table_rows,
    encode_fp4_rows,
    encode_fp8_blocks,
    encode_table_rows,
)
from engine.safetensors_header import MALFORMED, raw_header, read_header

__all__ = [
    "Checkpoint",
    "RandomWeights",
    "WeightSource",
    "encode_fp4_rows",
    "encode_fp8_blocks",
    "encode_table_rows",
    "model_fingerprint",
    "open_checkpoint",
    "random_tensors",
    "write_checkpoint",
]

Progress = Callable[[str, float], None]
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMED = 5


class WeightSource(Protocol):
    """Where a model takes its weights from, one parameter at a time, each exactly once."""

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The parameter `name` at its logical shape, decoded to `dtype`."""

    def stored(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The parameter as stored: packed values and their scale bytes (uint8), or float values and None."""

    def table(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A table as stored, which stays on the host: e4m3 rows and their scales, or float rows and None. May be memory-mapped."""

    def skip(self, names: Iterable[str]) -> None:
        """Leave parameters unread that another rank holds."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a stored tensor is, and under which name the file knows it."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


class _TakenOnce:
    """The text parameters of a model, each of which is taken once. `unread` names those that nobody took yet."""

    def __init__(self, config: ModelConfig, on_progress: Progress | None) -> None:
        self._quantized = config.quantized
        self._parameters = {p.name: p for p in parameters(config) if not p.vision}
        self.unread = set(self._parameters)
        self._on_progress = on_progress

    def stored(self, name: str) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        values, scale = self.stored(name)
        return values.to(dtype) if scale is None else _DECODE[self._parameters[name].storage](values, scale, dtype)

    def skip(self, names: Iterable[str]) -> None:
        for name in names:
            self._take(name)

    def _take(self, name: str) -> Parameter:
        assert name in self.unread, f"{name} is unknown or was read before"
        self.unread.remove(name)
        if self._on_progress is not None:
            self._on_progress("weights", 1 - len(self.unread) / len(self._parameters))
        return self._parameters[name]


class Checkpoint(_TakenOnce):
    """A `WeightSource` of a checked checkpoint directory."""

    def __init__(self, config: ModelConfig, entries: dict[str, _Entry], on_progress: Progress | None = None) -> None:
        super().__init__(config, on_progress)
        self._entries = entries
        self._files: dict[Path, Any] = {}

    def stored(self, name: str) -> tuple[Tensor, Tensor | None]:
        values, *scale = (self._read(t.name) for t in stored_tensors(self._take(name), self._quantized))
        return values, scale[0].view(torch.uint8) if scale else None

    def table(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.stored(name)

    def _read(self, name: str) -> Tensor:
        entry = self._entries[name]
        if entry.file not in self._files:
            self._files[entry.file] = _open_tensors(entry.file)
        try:
            return self._files[entry.file].get_tensor(entry.key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: {entry.key} cannot be read: {error}", hint="download it again") from error


class RandomWeights(_TakenOnce):
    """A `WeightSource` without files, drawn on the device. The values depend on the seed, the parameter's name and the kind of device."""

    def __init__(self, config: ModelConfig, seed: int, on_progress: Progress | None = None, device: str = "cpu") -> None:
        super().__init__(config, on_progress)
        self._seed, self._device = seed, device

    def stored(self, name: str) -> tuple[Tensor, Tensor | None]:
        parameter = self._take(name)
        values = random_tensor(parameter, self._seed, self._device)
        encode = _ENCODE.get(parameter.storage) if self._quantized else None
        if encode is None:
            return values.to(torch.float32 if parameter.storage is Storage.F32 else torch.bfloat16), None
        return encode(values)

    def table(self, name: str) -> tuple[Tensor, Tensor | None]:
        parameter = self._take(name)
        (rows, width), pinned = parameter.shape, self._device == "cuda"
        kind = torch.float8_e4m3fn if self._quantized else torch.bfloat16
        values = torch.empty(rows, width, dtype=kind, pin_memory=pinned)
        scale = torch.empty(rows, width // BLOCK, dtype=torch.uint8, pin_memory=pinned) if self._quantized else None
        begin = 0
        # Drawn in pieces: the whole table in fp32 would be four times its stored size.
        for piece in random_rows(parameter, self._seed, self._device):
            part = slice(begin, begin := begin + len(piece))
            if scale is None:
                values[part] = piece.to(kind)
            else:
                values[part], scale[part] = encode_table_rows(piece)
        return values, scale


_DECODE: dict[Storage, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    Storage.FP8: decode_fp8_blocks,
    Storage.FP4: decode_fp4_rows,
    Storage.TABLE: decode_table_rows,
}
_ENCODE: dict[Storage, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    Storage.FP8: encode_fp8_blocks,
    Storage.FP4: encode_fp4_rows,
    Storage.TABLE: encode_table_rows,
}


def open_checkpoint(model_dir: Path, config: ModelConfig, on_progress: Progress | None = None) -> Checkpoint:
    """Find the files of `model_dir` and check every name, shape and dtype against the config. Reads headers only.

    Raises:
        CheckpointError: no weights, a truncated file, or tensors that are missing, unknown, misshapen or of another dtype.
    """
    entries: dict[str, _Entry] = {}
    for file in checkpoint_files(model_dir):
        for name, entry in _read_entries(file).items():
            if name in entries:
                raise CheckpointError(f"{name} is in {entries[name].file.name} and in {file.name}")
            entries[name] = entry
    _check_entries(model_dir, config, entries)
    return Checkpoint(config, entries, on_progress)


def checkpoint_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a directory: those of the index, or the single file.

    Raises:
        CheckpointError: neither exists, or a shard of the index is missing.
    """
    index, single = model_dir / _INDEX, model_dir / _SINGLE
    if not index.exists():
        if not single.exists():
            raise CheckpointError(
                f"{model_dir} has neither {_INDEX} nor {_SINGLE}", hint="download the weights, or use --load-format dummy"
            )
        return [single]
    try:
        names = sorted({_file_name(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {_shown(error)}", hint="download it again") from error
    missing = [name for name in names if not (model_dir / name).exists()]
    if missing:
        raise CheckpointError(f"{len(missing)} of {len(names)} shards are missing: {_some(missing)}", hint="resume the download")
    return [model_dir / name for name in names]


def _file_name(name: Any) -> str:
    """A shard's name in an index. Raises ValueError for what leads out of the directory: an index comes with the weights, from anywhere."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name or "\0" in name or len(name.encode()) > 255:
        raise ValueError(f"{str(name)[:64]!r} is not the name of a .safetensors file beside it")
    return name


def _open_tensors(file: Path) -> Any:
    """Raises CheckpointError where the library refuses a header that passed our checks, such as overlapping tensors."""
    try:
        return safe_open(str(file), framework="pt").__enter__()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be opened: {error}", hint="download it again") from error


def _shown(error: BaseException) -> str:
    return repr(error)[:200]


def model_fingerprint(model_dir: Path, load_format: str = "auto", seed: int = 0) -> str:
    """Content digest of a model: config, and name, size and header of every weight file. Not its path. Hex SHA-256."""
    digest = sha256((model_dir / "config.json").read_bytes())
    if load_format == "dummy":
        digest.update(f"dummy {seed}".encode())
        return digest.hexdigest()
    for file in checkpoint_files(model_dir):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(raw_header(file))
    return digest.hexdigest()


def _read_entries(file: Path) -> dict[str, _Entry]:
    """Tensors of one file by name without the optional `model.` prefix."""
    tensors = read_header(file)
    entries = {key.removeprefix("model."): _Entry(file, key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
    if len(entries) != len(tensors):
        raise CheckpointError(f"{file} names a tensor with and without the prefix model.", hint="download it again")
    return entries


def _check_entries(model_dir: Path, config: ModelConfig, entries: dict[str, _Entry]) -> None:
    wanted = stored_inventory(config)
    vision = {t.name for p in parameters(config) if p.vision for t in stored_tensors(p, config.quantized)}
    if not vision & entries.keys():
        # A text-only copy of a full checkpoint leaves the whole group out.
        wanted = {name: t for name, t in wanted.items() if name not in vision}
    missing = sorted(wanted.keys() - entries.keys())
    unknown = sorted(entries.keys() - wanted.keys())
    misfits = list(_misfits(wanted, entries))
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {_some(missing)}")
    if unknown:
        problems.append(f"{len(unknown)} unknown: {_some(unknown)}")
    if misfits:
        problems.append(f"{len(misfits)} misfits: {_some(misfits)}")
    if problems:
        variant = "quantised" if config.quantized else "unquantised"
        raise CheckpointError(
            f"{model_dir}: tensors do not match the {variant} config: {'; '.join(problems)}",
            hint="config.json and the weights come from different checkpoints",
        )


def _misfits(wanted: dict[str, StoredTensor], entries: dict[str, _Entry]) -> Iterable[str]:
    for name, tensor in wanted.items():
        entry = entries.get(name)
        if entry is not None and (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            yield f"{name} is {entry.dtype} {list(entry.shape)}, expected {tensor.dtype} {list(tensor.shape)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
