"""Quantised weights in the order in which a warp multiplies them, for the products with few rows.

One block of 2,048 bytes covers 16 rows and 256 (FP4) or 128 (FP8) columns. Lane 4g + t of a warp reads 16 bytes of each of its four
chunks: codes of rows g and g + 8 (see `csrc/include/packed_weights.cuh`). Scales are kept as the exponent field of the bf16 factor that
turns the moved bits into the value. Values do not change: `unpack` gives what the loader's decoders give.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.errors import ConfigError
from engine.ops.number_formats import unpack_e2m1
from engine.ops.weight_formats import BLOCK, decode_fp4_rows, decode_fp8_blocks

TILE_ROWS = 16
BLOCK_BYTES = 2048


class Format(IntEnum):
    """Numbers shared with the kernel."""

    FP4 = 0
    FP8 = 1

    @property
    def block_columns(self) -> int:
        return 256 if self is Format.FP4 else 128

    @property
    def scale_bytes(self) -> int:
        """Of one block. FP4: a byte per row and 32 columns. FP8: 32 columns of each half of the tile share one."""
        return 128 if self is Format.FP4 else 8

    @property
    def bias(self) -> int:
        """E8M0 byte + bias = exponent field of the factor 2^(126 or 120) * scale."""
        return 126 if self is Format.FP4 else 120


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`groups` matrices [rows, columns] of one format. codes: [groups, tiles, blocks, 2048], scales: [groups, tiles, blocks, 128 or 8].

    Rows and columns are padded with zeros up to whole tiles and blocks.
    """

    format: Format
    codes: Tensor
    scales: Tensor
    rows: int
    columns: int

    @property
    def groups(self) -> int:
        return self.codes.shape[0]

    @property
    def tiles(self) -> int:
        return self.codes.shape[1]

    @property
    def blocks(self) -> int:
        return self.codes.shape[2]

    @property
    def padded_columns(self) -> int:
        return self.blocks * self.format.block_columns

    @property
    def num_bytes(self) -> int:
        """As stored here."""
        return self.codes.numel() + self.scales.numel()

    @staticmethod
    def empty(format: Format, groups: int, rows: int, columns: int, device: torch.device | str) -> PackedWeights:
        """Room for `groups` matrices, to be filled by `fill`: the load of a layer needs one expert beside it, not a second layer."""
        tiles, blocks = -(-rows // TILE_ROWS), -(-columns // format.block_columns)
        codes = torch.empty(groups, tiles, blocks, BLOCK_BYTES, dtype=torch.uint8, device=device)
        scales = torch.empty(groups, tiles, blocks, format.scale_bytes, dtype=torch.uint8, device=device)
        return PackedWeights(format, codes, scales, rows, columns)

    def fill(self, group: int, values: Tensor, scale: Tensor) -> None:
        """Pack one matrix as stored: int8 [rows, columns/2] and scales per row, or e4m3 and block scales (`weight_formats.py`)."""
        one = pack_fp4(values, scale) if self.format is Format.FP4 else pack_fp8(values, scale)
        assert one.codes.shape[1:] == self.codes.shape[1:], f"{list(one.codes.shape)} does not fit {list(self.codes.shape)}"
        self.codes[group], self.scales[group] = one.codes[0], one.scales[0]


def pack_fp4(values: Tensor, scale: Tensor) -> PackedWeights:
    """values: [A, B/2] int8, scale: [A, B/32] uint8, as stored. Returns one group.

    Raises:
        ConfigError: a scale above 2, which the bf16 factor cannot express.
    """
    rows, columns = values.shape[0], values.shape[1] * 2
    fields = _fields(scale, Format.FP4)
    # [tiles, half, g, blocks, chunk q, lane t, step j, element i]
    codes = _padded(unpack_e2m1(values.view(torch.uint8)), Format.FP4).unflatten(0, (-1, 2, 8)).unflatten(-1, (-1, 4, 4, 4, 4))
    words = torch.zeros(codes.shape[0], *codes.shape[2:7], dtype=torch.int64, device=codes.device)
    table = _spread_nibbles(values.device)
    for half in range(2):
        for i in range(4):
            words += table[half, i][codes[:, half, ..., i].int()]
    packed = _as_bytes(words.permute(0, 2, 3, 1, 4, 5))  # [tiles, blocks, q, g, t, j]
    # [tiles, half, g, blocks, chunk q, half of the chunk] -> [tiles, blocks, g, half of the chunk, half, q]
    spread = pad(fields, (0, -fields.shape[1] % 8, 0, -rows % TILE_ROWS), value=1).unflatten(0, (-1, 2, 8)).unflatten(-1, (-1, 4, 2))
    scales = spread.permute(0, 3, 2, 5, 1, 4)
    return PackedWeights(Format.FP4, packed[None].contiguous(), scales.flatten(2)[None].contiguous(), rows, columns)


def pack_fp8(values: Tensor, scale: Tensor) -> PackedWeights:
    """values: [A, B] e4m3, scale: [ceil(A/32), ceil(B/32)] uint8, as stored. Returns one group.

    Raises:
        ConfigError: a scale above 2^7, which the bf16 factor cannot express.
    """
    rows, columns = values.shape
    fields = _fields(scale, Format.FP8).repeat_interleave(BLOCK // 8, 0)[: -(-rows // 8)]  # per half of a tile
    return _pack_fp8(values.view(torch.uint8), fields, rows, columns)


def _pack_fp8(values: Tensor, fields: Tensor, rows: int, columns: int) -> PackedWeights:
    # [tiles, half, g, blocks, chunk q, lane t, step s, element i] -> [tiles, blocks, q, g, t, s, half, byte]
    spread = _padded(values, Format.FP8).unflatten(0, (-1, 2, 8)).unflatten(-1, (-1, 4, 4, 2, 4))
    # Elements 0 and 1 go to the upper bytes of the word's halves, 2 and 3 to the lower ones.
    codes = spread.permute(0, 3, 4, 2, 5, 6, 1, 7)[..., [2, 0, 3, 1]]
    padded = pad(fields, (0, -fields.shape[1] % 4, 0, -fields.shape[0] % 2), value=1)
    scales = padded.unflatten(0, (-1, 2)).unflatten(-1, (-1, 4)).transpose(1, 2)  # [tiles, blocks, half, q]
    return PackedWeights(Format.FP8, codes.flatten(2)[None].contiguous(), scales.flatten(2)[None].contiguous(), rows, columns)


def pack_gate_up(gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], format: Format) -> PackedWeights:
    """Both projections of a SwiGLU as one matrix whose tiles hold 8 gate rows and the 8 up rows of the same channels.

    gate, up: values and scale as stored, [I, C] each; I a multiple of 8. Returns one group of 2 * I rows.
    """
    if format is Format.FP4:
        return pack_fp4(*(_interleave(a, b) for a, b in zip(gate, up, strict=True)))
    rows, columns = gate[0].shape
    values = _interleave(gate[0].view(torch.uint8), up[0].view(torch.uint8))
    halves = [_fields(scale, format).repeat_interleave(BLOCK // 8, 0)[: rows // 8] for _, scale in (gate, up)]
    return _pack_fp8(values, torch.stack(halves, 1).flatten(0, 1), 2 * rows, columns)


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate.unflatten(0, (-1, 8)), up.unflatten(0, (-1, 8))), 1).flatten(0, 2)


def split_gate_up(both: Tensor) -> tuple[Tensor, Tensor]:
    """Undo the order of rows of `pack_gate_up`. both: [2 * I, C]; returns gate and up [I, C]."""
    gate, up = both.unflatten(0, (-1, 2, 8)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


def unpack(weights: PackedWeights, group: int, dtype: torch.dtype) -> Tensor:
    """One matrix [rows, columns] of `dtype`: the definition of what a packed matrix is worth."""
    codes, scales = weights.codes[group], weights.scales[group]
    if weights.format is Format.FP4:
        words = codes.view(torch.int32).unflatten(-1, (4, 8, 4, 4)).permute(0, 3, 1, 2, 4, 5)  # [tiles, g, blocks, q, t, j]
        nibbles = torch.stack([torch.stack([_gather_nibble(words, half, i) for i in range(4)], -1) for half in range(2)], 1)
        flat = nibbles.flatten(3).flatten(0, 2)
        stored = (flat[:, 0::2] | flat[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
        bytes_ = scales.unflatten(-1, (8, 2, 2, 4)).permute(0, 4, 2, 1, 5, 3).flatten(3).flatten(0, 2) - Format.FP4.bias
        full = decode_fp4_rows(stored, bytes_, dtype)
    else:
        spread = codes.unflatten(-1, (4, 8, 4, 2, 2, 4))[..., [1, 3, 0, 2]]  # [tiles, blocks, q, g, t, s, half, i]
        stored = spread.permute(0, 6, 3, 1, 2, 4, 5, 7).flatten(3).flatten(0, 2).view(torch.float8_e4m3fn)
        bytes_ = scales.unflatten(-1, (2, 4)).transpose(1, 2).flatten(2).flatten(0, 1) - Format.FP8.bias
        # Row halves of a tile may come from different 32x32 blocks: every eight rows have their own line of scales.
        full = decode_fp8_blocks(stored, bytes_.repeat_interleave(8, 0), dtype, block_rows=1)
    return full[: weights.rows, : weights.columns]


def _fields(scale: Tensor, format: Format) -> Tensor:
    largest = int(scale.max()) if scale.numel() else 0
    if largest + format.bias > 254:
        raise ConfigError(
            f"a weight scale of 2^{largest - 127} is above 2^{127 - format.bias}, the largest that packed weights hold",
            hint="run with the reference of the op: engine.ops",
        )
    return scale + format.bias


def _padded(values: Tensor, format: Format) -> Tensor:
    rows, columns = values.shape
    return pad(values, (0, -columns % format.block_columns, 0, -rows % TILE_ROWS))


def _as_bytes(words: Tensor) -> Tensor:
    """[tiles, blocks, q, g, t, j] int64 words of 32 bits -> [tiles, blocks, 2048] uint8."""
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return signed.contiguous().view(torch.uint8).flatten(2)


# Where the four bits (sign, two exponent bits, mantissa) of element i of row half h stand in the lane's word. Elements 0 and 1 of half 0
# are used as they are, those of half 1 after a shift by 6, elements 2 and 3 of half 0 after a rotation by 10, of half 1 in two pieces.
_BITS = (
    ((15, 8, 7, 6), (31, 24, 23, 22), (5, 30, 29, 28), (21, 14, 13, 12)),
    ((9, 2, 1, 0), (25, 18, 17, 16), (11, 4, 3, 10), (27, 20, 19, 26)),
)


@lru_cache(maxsize=4)
def _spread_nibbles(device: torch.device) -> Tensor:
    """[2, 4, 16] int64: what each code adds to the word."""
    table = torch.zeros(2, 4, 16, dtype=torch.int64)
    for half in range(2):
        for i in range(4):
            for code in range(16):
                table[half, i, code] = sum(1 << place for bit, place in zip((8, 4, 2, 1), _BITS[half][i], strict=True) if code & bit)
    return table.to(device)


def _gather_nibble(words: Tensor, half: int, i: int) -> Tensor:
    sign, high, low, mantissa = _BITS[half][i]
    return (words >> sign & 1) << 3 | (words >> high & 1) << 2 | (words >> low & 1) << 1 | (words >> mantissa & 1)
