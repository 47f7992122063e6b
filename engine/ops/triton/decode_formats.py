"""Packed cache rows to bf16 inside a kernel, even and odd channels apart.

Two neighbouring channels come from one byte (E2M1) or one 16-bit word (E4M3), so splitting them by parity needs no exchange between
threads. Bits are moved to where bf16 has them, and one exact multiply by scale times a power of two does the rest; subnormals survive
because bf16 keeps them. Keys come out divided by `SHRINK`, which the caller multiplies back.
"""

from __future__ import annotations

import triton
import triton.language as tl

# An E2M1 value needs the factor scale * 2^126, which bf16 holds for all scales that occur when 2^16 is left out.
SHRINK = tl.constexpr(65536.0)


def e4m3_asm(pair: str, words: str, scale: str, *, odd: bool) -> str:
    """PTX that decodes the even or odd e4m3 bytes of two words (o1 e1, o0 e0) to a bf16 pair: magnitude to bits 4..10, sign to 15.

    pair, words, scale: operands. Registers s and m are the caller's to declare.
    """
    signs, start = (words, f"shr.u32 m, {words}, 4;\n") if odd else ("s", f"shl.b32 s, {words}, 8;\nshl.b32 m, {words}, 4;\n")
    return f"""{start}and.b32 m, m, 0x07f007f0;
lop3.b32 m, {signs}, 0x80008000, m, 0xea;
mul.rn.bf16x2 {pair}, m, {scale};
"""


def e2m1_asm(pair: str, scale: str, *, odd: bool) -> str:
    """PTX that decodes the low (even) or high (odd) nibbles of two bytes to a bf16 pair: magnitude to bits 6..8, sign to 15.

    pair, scale: operands. Register p holds the bytes, see `e2m1_bytes`; s and m are the caller's to declare.
    """
    sign, magnitude = (8, 2) if odd else (12, 6)
    return f"""shl.b32 s, p, {sign};
shl.b32 m, p, {magnitude};
and.b32 m, m, 0x01c001c0;
lop3.b32 m, s, 0x80008000, m, 0xea;
mul.rn.bf16x2 {pair}, m, {scale};
"""


def e2m1_bytes(packed: str, *, upper: bool) -> str:
    """PTX that puts two of four bytes into the halves of register p."""
    return f"prmt.b32 p, {packed}, 0, {'0x4342' if upper else '0x4140'};\n"


# Two words -> bf16 pairs (e1 e0), (o1 o0).
_E4M3_ASM = tl.constexpr("{\n.reg .b32 s, m;\n" + e4m3_asm("$0", "$2", "$3", odd=False) + e4m3_asm("$1", "$2", "$3", odd=True) + "}")
# Four bytes of E2M1 pairs -> two bf16 pairs of low nibbles, two of high nibbles.
_E2M1_ASM = tl.constexpr(
    "{\n.reg .b32 p, s, m;\n"
    + e2m1_bytes("$4", upper=False) + e2m1_asm("$0", "$5", odd=False) + e2m1_asm("$2", "$5", odd=True)
    + e2m1_bytes("$4", upper=True) + e2m1_asm("$1", "$6", odd=False) + e2m1_asm("$3", "$6", odd=True)
    + "}"
)  # fmt: skip


@triton.jit
def decode_e4m3(words, exponents, FAST: tl.constexpr):
    """words: uint16 [N, D/2], two e4m3 bytes each. exponents: uint8 [N, G] E8M0. Returns even, odd: bf16 [N, D/2].

    Groups with numbers beyond 448 * 2^23 become infinite.
    """
    # 2^120 for the bits, 2^-127 for E8M0, 2^-16 for SHRINK, and a bias of 127.
    field = tl.minimum(exponents.to(tl.int32) + 104, 255)
    if FAST:
        scale = _spread((field << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True), words)
        even, odd = tl.inline_asm_elementwise(
            _E4M3_ASM, "=r,=r,r,r", [words, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        factor = _spread((field << 23).to(tl.float32, bitcast=True), words)
        wide = words.to(tl.int32)
        even = ((((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)
        odd = ((((wide & 0x8000) << 16) | ((wide & 0x7F00) << 12)).to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)
    return even, odd


@triton.jit
def decode_e2m1(pairs, scales, E8M0: tl.constexpr, FAST: tl.constexpr):
    """pairs: uint8 [N, D/2]. scales: uint8 [N, G], E8M0 or positive E4M3. Returns even, odd: bf16 [N, D/2].

    E8M0 groups with numbers beyond 6 * 2^17 become infinite.
    """
    # The factor of an E2M1 value in bf16: scale * 2^126 / SHRINK.
    if E8M0:
        factor = (tl.minimum(scales.to(tl.int32) + 110, 255) << 23).to(tl.float32, bitcast=True)
    else:
        factor = (scales.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.0**115 * 2.0**115
    if FAST:
        even, odd = tl.inline_asm_elementwise(
            _E2M1_ASM,
            "=r,=r,=r,=r,r,r,r",
            [pairs, _spread(factor.to(tl.bfloat16), pairs)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide, factor = pairs.to(tl.int32), _spread(factor, pairs)
        even = ((((wide & 0x8) << 28) | ((wide & 0x7) << 22)).to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)
        odd = ((((wide & 0x80) << 24) | ((wide & 0x70) << 18)).to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)
    return even, odd


@triton.jit
def dot_bf16(a, b, acc, FAST: tl.constexpr):
    """acc + a @ b of bf16 tiles, fp32 inside. The interpreter multiplies the bits of bf16 numbers, so it gets fp32 ones."""
    if FAST:
        result = tl.dot(a, b, acc)
    else:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return result


@triton.jit
def _spread(groups, like):
    """[N, G] -> [N, C]: every group's number for all its members."""
    rows: tl.constexpr = like.shape[0]
    count: tl.constexpr = groups.shape[1]
    size: tl.constexpr = like.shape[1] // count
    return tl.broadcast_to(groups[:, :, None], (rows, count, size)).reshape(rows, like.shape[1])
