"""Makes the golden files of Q4H and Q8H from their definitions, in plain Python with exact arithmetic, sharing no code.

    python tests/kv/golden.py         writes golden_codes.json, golden_bytes.json and golden_rotation.json here

golden_codes.json      rotated fp32 vectors (hex, little-endian) and the bytes of their words and scales, bit for bit
golden_bytes.json      the same of Q8H, whose codes are bytes
golden_rotation.json   vectors x (hex fp32) and their rotations computed by the definition in exact fractions
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from fractions import Fraction
from pathlib import Path

HERE = Path(__file__).parent
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # codes of a word from the low nibble


def fp32(x: float | Fraction) -> float:
    return struct.unpack("<f", struct.pack("<f", float(x)))[0]


def fp16_bits(x: float) -> int:
    return struct.unpack("<H", struct.pack("<e", x))[0]


def fp16_value(bits: int) -> Fraction:
    return Fraction(struct.unpack("<e", struct.pack("<H", bits))[0])


def scale_byte(absmax: float) -> int:
    if absmax == 0:
        return 0
    return max(8, (fp16_bits(min(absmax, 61440.0)) + 127) >> 7)


def code(y: float, byte: int) -> int:
    inverse = fp32(8 / fp16_value(byte << 7)) if byte else 0.0
    product = y * inverse  # two fp32 numbers: exact in fp64, so this rounds once
    return min(15, max(0, math.floor(fp32(product) if abs(product) < 1e30 else product) + 8))


def encode(y: list[float], group: int) -> tuple[bytes, bytes]:
    scales, codes = [], []
    for start in range(0, len(y), group):
        values = y[start : start + group]
        scales.append(scale_byte(max(map(abs, values))))
        codes += [code(value, scales[-1]) for value in values]
    words = b""
    for start in range(0, len(codes), 8):
        words += struct.pack("<I", sum(codes[start + i] << (4 * place) for place, i in enumerate(ORDER)))
    return words, bytes(scales)


def encode_bytes(y: list[float], group: int) -> tuple[bytes, bytes]:
    """Q8H: the exponent of each group's largest magnitude, and codes rounded half to even."""
    scales, codes = [], []
    for start in range(0, len(y), group):
        values = y[start : start + group]
        _, exponent = math.frexp(max(map(abs, values)))  # magnitude = 0.5 .. 1 times 2^exponent; 0 of 0
        byte = max(exponent + 126, 7) if any(values) else 7
        scales.append(byte)
        codes += [max(-127, min(127, round(Fraction(value) / Fraction(2) ** (byte - 133)))) for value in values]
    return struct.pack(f"<{len(codes)}b", *codes), bytes(scales)


def rotation(x: list[float]) -> list[float]:
    """By the definition: sum over i of (-1)^(bits of i and j) * sign i * x i, over the root of the sub-block's size."""
    size = len(x) & -len(x)
    digest = int.from_bytes(hashlib.blake2b(b"rekindle q4h signs 1").digest(), "little")
    rotated = []
    for start in range(0, len(x), size):
        signed = [Fraction(-x[start + i] if digest >> i & 1 else x[start + i]) for i in range(size)]
        for j in range(size):
            total = sum(-v if (i & j).bit_count() % 2 else v for i, v in enumerate(signed))
            rotated.append(float(total) / math.sqrt(size))
    return rotated


def code_cases(rng: random.Random) -> list[list[float]]:
    cases = []
    for dim in (16, 64, 80, 96, 112, 128):
        cases += [[fp32(rng.gauss(0, scale)) for _ in range(dim)] for scale in (1.0, 37.0, 3e-4)]
    grid = [fp32(0.125 * i - 4) for i in range(64)]  # every value on a border between two codes
    near = [fp32(math.copysign(math.nextafter(abs(v), 9), v)) for v in grid]
    huge = [61440.0, 61441.0, 65504.0, 65519.0, 65520.0, 1e6, 1e30, -3e38] * 4 + [1.0] * 32
    tiny = [1e-9, -1e-9, 6.1e-5, 5.9e-8, -1e-45, 0.0, -0.0, 1e-38] * 4 + [0.0] * 32
    largest = [fp32(2.0**-14 * (1 + i / 8)) for i in range(64)]
    edges = [grid, near, huge, tiny, largest, [0.0] * 64, [-0.0] * 32 + [-7.0] * 32]
    return cases + [[fp32(value) for value in edge] for edge in edges]


def write_files() -> None:
    rng = random.Random(20250101)
    codes, in_bytes = [], []
    for y in code_cases(rng):
        rotated = struct.pack(f"<{len(y)}f", *y).hex()
        wide, scales = encode_bytes(y, 32 if len(y) % 32 == 0 else 16)
        in_bytes.append({"dim": len(y), "rotated": rotated, "codes": wide.hex(), "scales": scales.hex()})
        for kind, group in (("k", 16), ("v", 32 if len(y) % 32 == 0 else 16)):
            words, scales = encode(y, group)
            codes.append(
                {"kind": kind, "dim": len(y), "rotated": rotated, "words": words.hex(), "scales": scales.hex()}
            )
    rotations = []
    for dim in (16, 64, 80, 96, 112, 128, 256):
        x = [fp32(rng.gauss(0, 1)) for _ in range(dim)]
        rotations.append({"dim": dim, "x": struct.pack(f"<{dim}f", *x).hex(), "rotated": rotation(x)})
    (HERE / "golden_codes.json").write_text(json.dumps(codes, indent=0) + "\n")
    (HERE / "golden_bytes.json").write_text(json.dumps(in_bytes, indent=0) + "\n")
    (HERE / "golden_rotation.json").write_text(json.dumps(rotations) + "\n")


if __name__ == "__main__":
    write_files()
