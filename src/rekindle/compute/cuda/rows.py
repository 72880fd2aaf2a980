"""A step's rows between products: launches of the kernels in `elementwise`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from rekindle.compute.cuda.attention import EXACT
from rekindle.compute.cuda.elementwise import (
    ACTIVATIONS,
    ROUNDINGS,
    Heads,
    Lines,
    Positions,
    Weights,
    Width,
    add_norm_kernel,
    gate_kernel,
    heads_kernel,
)
from rekindle.compute.cuda.places import DTYPES, Rows
from rekindle.layer_forms import Activation
from rekindle.model.layer_parts import NormParts

TILE = 1024  # values of a row that a program gates
LEAST_VALUES = 1024  # of a program that norms: short rows are taken several at a time
PLACED_ROWS = 4  # of a head, by a program
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


def place_heads(
    q: tuple[Tensor, Norm | None],
    k: tuple[Tensor, Norm | None],
    positions: tuple[Tensor, Tensor],
    rotated: int,
    *,
    paired: bool,
) -> None:
    """Norm and rotate q and k [rows, heads, dim] in place: their first dimensions, halves or pairs of neighbours.

    positions: cos and sin [rows, rotated], or half as many.
    """
    (of_q, q_norm), (of_k, k_norm), (cos, sin) = q, k, positions
    num_rows, q_heads, dim = of_q.shape
    half, rest = (triton.next_power_of_2(max(1, size)) for size in (rotated // 2, dim - rotated))
    q_rounding, k_rounding = (0 if norm is None else norm.rounding for norm in (q_norm, k_norm))
    cos_dims, dtype = cos.shape[1], DTYPES[of_q.dtype]
    shape = Heads(q_heads, dim, rotated, paired, cos_dims, half, rest, PLACED_ROWS, q_rounding, k_rounding, dtype)
    heads_kernel[(triton.cdiv(num_rows, PLACED_ROWS), q_heads + of_k.shape[1])](
        Rows.of(of_q),
        Rows.of(of_k),
        Positions(cos.contiguous(), sin.contiguous()),
        None if q_norm is None else q_norm.weights,
        None if k_norm is None else k_norm.weights,
        num_rows,
        HEADS=shape,
        **EXACT,
    )
