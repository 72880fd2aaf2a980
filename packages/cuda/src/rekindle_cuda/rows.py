"""A step's rows between products: launches of the kernels in `elementwise`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from rekindle.layer_forms import Activation
from rekindle.model.layer_parts import NormParts
from rekindle_cuda.attention import EXACT
from rekindle_cuda.elementwise import (
    ACTIVATIONS,
    ROUNDINGS,
    Lines,
    Weights,
    Width,
    add_norm_kernel,
    gate_kernel,
)
from rekindle_cuda.places import DTYPES
from rekindle_cuda.placing import Turn, Turned

TILE = 1024  # values of a row that a program gates
LEAST_VALUES = 1024  # of a program that norms: short rows are taken several at a time
VALUES_OF_A_WARP, MOST_WARPS = 512, 16


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm as the kernels take it."""

    weights: Weights
    rounding: int

    @classmethod
    def of(cls, parts: NormParts) -> Norm:
        return cls(Weights(parts.weight.contiguous(), parts.epsilon), ROUNDINGS[parts.rounding])


def normalised(x: Tensor, norm: Norm) -> Tensor:
    """The norm of rows [..., columns], contiguous."""
    rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _add_norm(rows, None, None, None, norm, out)
    return out


def added(x: Tensor, base: Tensor, inner: Norm | None, *, into: Tensor | None = None) -> Tensor:
    """base + x, after the `inner` norm of x: both [rows, columns], written `into` this, which may be `base`."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if into is None else into
    _add_norm(_rows(x), base, total, inner, None, None)
    return total


def added_and_normalised(x: Tensor, base: Tensor, inner: Norm | None, outer: Norm) -> tuple[Tensor, Tensor]:
    """base + x, after the `inner` norm of x, and the `outer` norm of that sum: all [rows, columns]."""
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _add_norm(_rows(x), base, total, inner, outer, normed)
    return total, normed


def _rows(x: Tensor) -> Tensor:
    """Rows [..., columns] as [rows, columns] whose values lie next to each other."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _add_norm(
    x: Tensor, base: Tensor | None, total: Tensor | None, inner: Norm | None, outer: Norm | None, normed: Tensor | None
) -> None:
    num_rows, columns = x.shape
    if not num_rows:
        return
    padded = triton.next_power_of_2(columns)
    rows = max(1, LEAST_VALUES // padded)
    roundings = [0 if norm is None else norm.rounding for norm in (inner, outer)]
    width = Width(columns, padded, rows, roundings[0], base is not None, roundings[1], DTYPES[x.dtype])
    add_norm_kernel[(triton.cdiv(num_rows, rows),)](
        Lines(x, x.stride(0)),
        None if base is None else Lines(base, base.stride(0)),
        total,
        normed,
        None if inner is None else inner.weights,
        None if outer is None else outer.weights,
        num_rows,
        WIDTH=width,
        **_warps(rows * padded),
        **EXACT,
    )


def _warps(values: int) -> dict[str, Any]:
    return {"num_warps": min(max(4, values // VALUES_OF_A_WARP), MOST_WARPS)}


def gated(gates: Tensor, others: Tensor, activation: Activation) -> Tensor:
    """activation(gates) * others of rows [rows, columns] whose values lie next to each other."""
    num_rows, columns = gates.shape
    out = gates.new_empty(num_rows, columns)
    if num_rows:
        gate_kernel[(num_rows, triton.cdiv(columns, TILE))](
            Lines(gates, gates.stride(0)),
            Lines(others, others.stride(0)),
            out,
            columns,
            TILE=TILE,
            ACTIVATION=ACTIVATIONS[activation],
            DTYPE=DTYPES[gates.dtype],
            **EXACT,
        )
    return out


def turned(
    heads: tuple[int, int],
    norms: tuple[Norm | None, Norm | None],
    positions: tuple[Tensor, Tensor],
    dim: int,
    rotated: int,
    *,
    paired: bool,
) -> Turned:
    """What so many heads of q and of k, `dim` values each, go through: their norms, cos and sin [rows, dims].

    `rotated`: how many dimensions are, the first ones, as halves or as pairs of neighbours; cos and sin have as many
    numbers, or half of them.
    """
    (cos, sin), (q, k) = positions, norms
    whole, cos_dims = triton.next_power_of_2(dim), cos.shape[1]
    roundings = (0 if q is None else q.rounding, 0 if k is None else k.rounding)
    turn = Turn(*heads, dim, whole, rotated, paired, cos_dims, *roundings, DTYPES[cos.dtype])
    of_q, of_k = (None if each is None else each.weights for each in norms)
    return Turned(of_q, of_k, cos.contiguous(), sin.contiguous(), turn)
