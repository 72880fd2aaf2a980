"""Q8H: the 8-bit format of the KV cache. Owns its scales and codes; vectors are rotated as in Q4H.

A group of 32 values (16 where 32 does not divide the head dimension) is an MXINT8 block of the Open Compute Project's
microscaling formats: one byte, the exponent of the largest magnitude, and a signed 8-bit code for each value.

    byte  = the exponent field of the group's largest |y| as fp32, at least 7
    step  = 2^(byte - 133), so that codes are at most 127.5 before they are rounded down to 127
    code  = clamp(round(y / step), -127, 127), half to even;   value = step * code

A step is a power of two and a code has seven bits: values are exact in bf16, fp32 and fp64, so every kernel sees the
same numbers, and dividing by a step is a multiplication without rounding. Codes are in the order of dimensions. Nothing
looks at a neighbouring token, so a token is final when written.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from rekindle.kv import q4h

SMALLEST_BYTE, LARGEST_BYTE = 7, 254  # steps 2^-126 and 2^121: the smallest normal number, and what fp32 can hold
LARGEST_CODE = 127
_MANTISSA_BITS = 23
_INVERSE_EXPONENT = 260  # byte - 6 is a step's exponent in fp32, and 260 - byte its inverse's


def encode(y: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise rotated fp32 vectors [..., dim].

    Returns codes int8 [..., dim], scale bytes uint8 [..., dim/group] and the groups' largest magnitudes fp32
    [..., dim/group]. If one of those is not finite, the group's codes are meaningless (but decode to finite values)
    and the caller must fail the request.
    """
    groups = y.unflatten(-1, (-1, group))
    absmax = groups.abs().amax(-1)
    exponents = (absmax.view(torch.int32) >> _MANTISSA_BITS).bitwise_and_(0xFF).clamp_(SMALLEST_BYTE, LARGEST_BYTE)
    inverse_steps = (_INVERSE_EXPONENT - exponents).bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)
    codes = (groups * inverse_steps.unsqueeze(-1)).round_().clamp_(-LARGEST_CODE, LARGEST_CODE).nan_to_num_(0.0)
    return codes.flatten(-2).to(torch.int8), exponents.to(torch.uint8), absmax


def decode(codes: Tensor, scale_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotated values [..., dim] of codes [..., dim] and scale bytes [..., dim/group]; exact in `dtype`."""
    group = codes.shape[-1] // scale_bytes.shape[-1]
    steps = step_table(1, dtype, codes.device)[scale_bytes.to(torch.int64)]  # [..., dim/group, 1]
    return (codes.to(dtype).view(*scale_bytes.shape, group) * steps).flatten(-2)


@lru_cache(maxsize=64)
def step_table(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The step of each byte, repeated: [256, width]. Bytes that no encoder writes map to 0, so all are finite."""
    steps = np.zeros(256)
    written = np.arange(SMALLEST_BYTE, LARGEST_BYTE + 1)
    steps[written] = np.ldexp(1.0, written - 133)
    return q4h.constant(np.repeat(steps[:, None], width, axis=1), dtype, device)


@lru_cache(maxsize=64)
def query_rotation(dim: int, scaling: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Matrix [dim, dim] that rotates and scales queries from the right."""
    return q4h.constant(q4h.rotation_matrix(dim) * scaling, dtype, device)


@lru_cache(maxsize=64)
def output_rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Matrix [dim, dim] that rotates sums of rotated V back, from the right."""
    return q4h.constant(q4h.rotation_matrix(dim).T, dtype, device)
