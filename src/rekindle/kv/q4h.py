"""Q4H: the 4-bit format of the KV cache. Owns rotation, scales, codes and their packing.

Knows no blocks. A vector of a head is rotated in sub-blocks of b dimensions, cut into groups, and every group stored
as one scale byte and one code per value; nothing looks at a neighbouring token, so a token is final when written.

    y     = H_b(sign * x) * fp32(1/sqrt(b))     fp32 butterflies, distance 1, 2, 4, ... b/2, (first + second,
                                                first - second); sign i of a sub-block is -1 where bit i of
                                                BLAKE2b-512(SIGN_SEED) is set, bit i = bit i % 8 of byte i // 8
    scale = fp16(byte << 7), rounded up from the group's largest |y|, byte 0 for a group of zeros
    code  = clamp(floor(y * fp32(8 / scale)) + 8, 0, 15);   value = scale / 16 * (2 * code - 15)

A value has at most 8 significant bits: exact in bf16, fp32 and fp64, so every kernel sees the same numbers. Eight codes
make a little-endian word in the order 0 2 4 6 1 3 5 7 from the low nibble; each byte then holds code i low and i + 2
high. The multiplication by fp32(1/sqrt(b)) is specified because some devices turn a division into one.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rekindle.spec import CODES_PER_WORD, rotation_size

SIGN_SEED = b"rekindle q4h signs 1"
MAX_ROTATION = 512
SMALLEST_BYTE, LARGEST_BYTE = 8, 0xF7  # scales 2^-14 and 61,440; beyond them fp16 is subnormal or infinite
MAX_PREPARED = 256
_UNPACK_ORDER = (0, 4, 1, 5)  # dimension of the low nibble of bytes 0..3 of a word; the high nibble's is 2 further


class _Stage(NamedTuple):
    first: Tensor
    second: Tensor
    total: Tensor
    difference: Tensor
    result: Tensor


def rotate(x: Tensor) -> Tensor:
    """Rotate the last axis in fp32, the same bits on every device; [..., dim] -> fp32 [..., dim]."""
    size = rotation_size(x.shape[-1])
    signed = x.to(torch.float32).reshape(-1, size) * _signs(size, x.device)
    return _butterflies(signed).view(x.shape)


def unrotate(y: Tensor) -> Tensor:
    """Undo `rotate` in the precision of `y`, which must be fp32 or fp64."""
    size = rotation_size(y.shape[-1])
    signs = _signs(size, y.device).to(y.dtype)
    return (_butterflies(y.reshape(-1, size).clone()) * signs).view(y.shape)


class Rotator:
    """`rotate` with cached views of every stage, 2.5 times as fast for a few vectors.

    The result of a call is overwritten by the next one; one thread at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._prepared: dict[tuple[int, int], tuple[Tensor, list[_Stage]]] = {}

    def rotate(self, x: Tensor) -> Tensor:
        size = rotation_size(x.shape[-1])
        num_vectors = x.numel() // size
        if num_vectors > MAX_PREPARED:
            return rotate(x)
        source, stages = self._prepare(num_vectors, size)
        torch.mul(x.reshape(-1, size), _signs(size, self._device), out=source)
        return _run(source, stages).view(x.shape)

    def _prepare(self, num_vectors: int, size: int) -> tuple[Tensor, list[_Stage]]:
        key = (num_vectors, size)
        if key not in self._prepared:
            with torch.inference_mode(False):
                source = torch.empty(num_vectors, size, dtype=torch.float32, device=self._device)
                self._prepared[key] = (source, _stages(source, torch.empty_like(source)))
        return self._prepared[key]


def _butterflies(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the rows of x [n, size], which is overwritten; scaled by 1/sqrt(size)."""
    return _run(x, _stages(x, torch.empty_like(x)))


def _stages(x: Tensor, other: Tensor) -> list[_Stage]:
    """Views of the two buffers for each distance in turn: where pairs are read, where sums and differences go."""
    stages, half = [], 1
    while half < x.shape[1]:
        source, target = x.view(-1, 2, half), other.view(-1, 2, half)
        stages.append(_Stage(source[:, 0], source[:, 1], target[:, 0], target[:, 1], other))
        x, other = other, x
        half *= 2
    return stages


def _run(x: Tensor, stages: list[_Stage]) -> Tensor:
    for stage in stages:
        torch.add(stage.first, stage.second, out=stage.total)
        torch.sub(stage.first, stage.second, out=stage.difference)
        x = stage.result
    factor = 1 / math.sqrt(x.shape[1])
    return x.mul_(float(np.float32(factor)) if x.dtype == torch.float32 else factor)


def encode(y: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise rotated fp32 vectors [..., dim].

    Returns words int32 [..., dim/8], scale bytes uint8 [..., dim/group] and the groups' largest magnitudes fp32
    [..., dim/group]. If one of those is not finite, the group's codes are meaningless (but decode to finite values)
    and the caller must fail the request.
    """
    groups = y.unflatten(-1, (-1, group))
    absmax = groups.abs().amax(-1)
    # A NaN may have its sign bit set: its index then counts from the table's end, where the entries of NaNs are.
    half_bits = absmax.to(torch.float16).view(torch.int16).to(torch.int64)
    scale_bytes, inverse_scales = _encoding_tables(y.device)
    codes = (groups * inverse_scales.take(half_bits).unsqueeze(-1)).floor_().add_(8).clamp_(0, 15)
    # A magnitude that fp16 rounds to zero is not zero: only a group of zeros has byte 0.
    return pack(codes.flatten(-2)), scale_bytes.take(half_bits).mul_(absmax != 0), absmax


def pack(codes: Tensor) -> Tensor:
    """Pack whole numbers 0..15 of any dtype [..., dim] into int32 words [..., dim/8]."""
    halves = codes.unflatten(-1, (-1, 2, 2, 2))  # [..., word, dim bit 2, dim bit 1, dim bit 0]
    in_bytes = torch.add(halves[..., 0, :], halves[..., 1, :], alpha=16)
    in_order = in_bytes.transpose(-1, -2).to(torch.uint8, memory_format=torch.contiguous_format)
    return in_order.flatten(-3).view(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Codes of int32 words [..., dim/8] as uint8 [..., dim]; the simple way, for tests and the reference."""
    in_bytes = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 2, 2)).transpose(-1, -2)
    return torch.stack((in_bytes & 15, in_bytes >> 4), dim=-2).flatten(-4)


def decode(words: Tensor, scale_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotated values [..., dim] of words [..., dim/8] and scale bytes [..., dim/group]; exact in `dtype`."""
    levels = unpack(words).to(dtype).mul_(2).sub_(15)
    group = levels.shape[-1] // scale_bytes.shape[-1]
    steps = step_table(1, dtype, words.device)[scale_bytes.to(torch.int64)]  # [..., dim/group, 1]
    return (levels.view(*scale_bytes.shape, group) * steps).flatten(-2)


@lru_cache(maxsize=64)
def step_table(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """scale/16 of each byte, repeated: [256, width]. Bytes that no encoder writes map to 0, so all are finite."""
    steps = np.zeros(256)
    steps[: LARGEST_BYTE + 1] = _scales()[: LARGEST_BYTE + 1] / 16
    return constant(np.repeat(steps[:, None], width, axis=1), dtype, device)


@lru_cache(maxsize=64)
def query_rotation(dim: int, scaling: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Matrix [dim, dim] that rotates and scales queries from the right, dimensions in unpacking order."""
    return constant(rotation_matrix(dim)[:, unpacking_order(dim)] * scaling, dtype, device)


@lru_cache(maxsize=64)
def output_rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Matrix [dim, dim] that rotates back, from the right, sums of rotated V in unpacking order."""
    return constant(rotation_matrix(dim)[:, unpacking_order(dim)].T, dtype, device)


def unpacking_order(dim: int) -> np.ndarray:
    """Dimension at each place of a vector unpacked 16 codes at a time: eight low nibbles, then eight high ones."""
    low = np.array([CODES_PER_WORD * word + i for word in (0, 1) for i in _UNPACK_ORDER])
    order: np.ndarray = np.add.outer(np.arange(0, dim, 16), np.concatenate([low, low + 2]))
    return order.ravel()


def rotation_matrix(dim: int) -> np.ndarray:
    """fp64 [dim, dim]: x @ matrix is the rotation of x."""
    size = rotation_size(dim)
    hadamard = np.ones((1, 1))
    while hadamard.shape[0] < size:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return np.kron(np.eye(dim // size), sign_values(size)[:, None] * hadamard / math.sqrt(size))


def _scales() -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (np.arange(256, dtype=np.uint16) << 7).view(np.float16).astype(np.float64)


@lru_cache(maxsize=8)
def _encoding_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale byte and fp32(8 / scale) of every non-negative fp16 bit pattern, infinities and NaN included."""
    half_bits = np.arange(1 << 15, dtype=np.int64)
    scale_bytes = np.clip((half_bits + 127) >> 7, SMALLEST_BYTE, LARGEST_BYTE)
    inverse_scales = inverse_scales_by_byte()[scale_bytes]
    return constant(scale_bytes, torch.uint8, device), constant(inverse_scales, torch.float32, device)


def inverse_scales_by_byte() -> np.ndarray:
    """fp64 [256]: 8 / scale of each scale byte that an encoder writes; 0 for the others."""
    found = np.zeros(256)
    written = slice(SMALLEST_BYTE, LARGEST_BYTE + 1)
    found[written] = 8 / _scales()[written]
    return found


def sign_values(size: int) -> np.ndarray:
    """The signs applied first in the rotation of `size` dimensions."""
    if size > MAX_ROTATION:
        raise ValueError(f"q4h rotates at most {MAX_ROTATION} dimensions together, not {size}")
    digest = np.frombuffer(hashlib.blake2b(SIGN_SEED).digest(), np.uint8)
    return 1.0 - 2.0 * np.unpackbits(digest, bitorder="little")[:size]


@lru_cache(maxsize=64)
def _signs(size: int, device: torch.device) -> Tensor:
    return constant(sign_values(size), torch.float32, device)


def constant(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make an ordinary tensor, also in inference mode: it is cached for all callers."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)
