"""The formats that are rotated and coded, by name: what differs between Q4H and Q8H, for code that has either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rekindle.kv import q4h, q8h
from rekindle.kv.q4h import rotate, unrotate
from rekindle.spec import Format, group_size


class Codec(NamedTuple):
    """One format; its functions are those of the same names in `q4h` and `q8h`."""

    encode: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    step_table: Callable[[int, torch.dtype, torch.device], Tensor]
    query_rotation: Callable[[int, float, torch.dtype, torch.device], Tensor]
    output_rotation: Callable[[int, torch.dtype, torch.device], Tensor]
    scale_bytes: range  # that an encoder writes; a group of zeros may have 0 as well


CODECS: dict[Format, Codec] = {
    "q4h": Codec(
        *(q4h.encode, q4h.decode, q4h.step_table, q4h.query_rotation, q4h.output_rotation),
        range(q4h.SMALLEST_BYTE, q4h.LARGEST_BYTE + 1),
    ),
    "q8h": Codec(
        *(q8h.encode, q8h.decode, q8h.step_table, q8h.query_rotation, q8h.output_rotation),
        range(q8h.SMALLEST_BYTE, q8h.LARGEST_BYTE + 1),
    ),
}


def round_trip(x: Tensor, kind: Literal["k", "v"], fmt: Format = "q4h") -> Tensor:
    """Encode, decode and rotate back K or V vectors [..., dim], as attention sees them after storing; fp32."""
    codec = CODECS[fmt]
    codes, scale_bytes, _ = codec.encode(rotate(x), group_size(kind, x.shape[-1], fmt))
    return unrotate(codec.decode(codes, scale_bytes, torch.float32))
