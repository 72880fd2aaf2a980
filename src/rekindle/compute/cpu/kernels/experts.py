"""The experts of a mixture on raw addresses: every token's chosen ones in one call.

Describes a layer's experts once, so that a call passes only addresses and numbers. Knows packed weights, no modules:
callers keep what they point to alive, and guarantee dtypes, shapes and that indices are those of experts. A token's
result depends on its row, its choice and its shares alone, to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.cpu.kernels.linear import BF16, FP32, Linear, WeightsStruct, described
from rekindle.layer_forms import Gate, GateActivation, ShareFormat, Shares

GATE_ACTIVATIONS: tuple[GateActivation, ...] = ("silu", "gelu_tanh", "swish")  # RK_SILU, ... of native/rekindle.h
_I32, _I64, _POINTER, _F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Experts(ctypes.Structure):
    """`rk_experts` of native/rekindle.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("up", "down")),
        *((name, _I64) for name in ("experts", "inner")),
        *((name, _I32) for name in ("activation", "interleaved")),
        *((name, _F32) for name in ("limit", "alpha")),
    )


class _Call(ctypes.Structure):
    """`rk_experts_call` of native/rekindle.h."""

    _fields_ = (
        *((name, _I64) for name in ("tokens", "chosen")),
        *((name, _POINTER) for name in ("input", "indices", "shares")),
        ("share_format", _I32),
        ("output", _POINTER),
    )


class ExpertsLayer:
    """down(gate(up(x))) of every expert; `up` has gates and other values, as `gate` says.

    ValueError if sizes do not fit together, or experts differ in sizes or formats.
    """

    def __init__(self, up: Sequence[Linear], down: Sequence[Linear], gate: Gate) -> None:
        forms = [{(x.packed.columns, x.packed.depth, x.packed.format) for x in linears} for linears in (up, down)]
        if len(up) != len(down) or any(len(form) != 1 for form in forms):
            raise ValueError(f"these are not the experts of one layer: {forms}, {len(up)} and {len(down)} of them")
        ((columns, self.size, _),), ((out, inner, _),) = forms
        if columns != 2 * inner or out != self.size:
            raise ValueError(f"experts of {up[0].packed} and {down[0].packed} do not fit together")
        self.experts, self.gate = len(up), gate
        self._linears = tuple(up), tuple(down)  # kept alive, as the arrays are
        self._arrays = [(WeightsStruct * self.experts)(*map(described, linears)) for linears in self._linears]
        self.described = _Experts(
            *map(ctypes.addressof, self._arrays),
            *(self.experts, inner),
            *(GATE_ACTIVATIONS.index(gate.activation), gate.interleaved),
            *(float("inf") if gate.limit is None else gate.limit, gate.alpha),
        )
        self.reference = ctypes.byref(self.described)


class _Router(ctypes.Structure):
    """`rk_router` of native/rekindle.h."""

    _fields_ = (
        ("weights", WeightsStruct),
        ("chosen", _I64),
        *((name, _I32) for name in ("chosen_only", "share_format")),
    )


class _Mixture(ctypes.Structure):
    """`rk_mixture` of native/rekindle.h."""

    _fields_ = (("router", _Router), ("experts", _Experts))


class RouterLayer:
    """Gives every token the `num_chosen` experts with the largest logits, and shares.

    ValueError if there are not as many.
    """

    def __init__(self, logits: Linear, num_chosen: int, shares: Shares) -> None:
        self.experts, self.size = logits.packed.columns, logits.packed.depth
        if not 1 <= num_chosen <= self.experts:
            raise ValueError(f"{num_chosen} of {self.experts} experts cannot be chosen")
        self._logits = logits  # kept alive
        kind = FP32 if shares.share_format == "fp32" else BF16
        self.described = _Router(described(logits), num_chosen, shares.chosen_only, kind)
        self.reference = ctypes.byref(self.described)


class MixtureLayer:
    """A router and its experts; ValueError if they are not those of one layer."""

    def __init__(self, router: RouterLayer, experts: ExpertsLayer) -> None:
        if (router.experts, router.size) != (experts.experts, experts.size):
            raise ValueError(f"a router of {router.experts} experts is none of {experts.experts}")
        self.router, self.experts = router, experts
        self.size = experts.size
        self.described = _Mixture(router.described, experts.described)


class Choice(NamedTuple):
    """Addresses of what tokens chose: experts, int64 [tokens, num_chosen], and their shares, the same."""

    num_chosen: int
    indices: int
    shares: int
    share_format: ShareFormat


class ExpertsKernel:
    """`rk_mix` and `rk_choose` of one library."""

    def __init__(self, library: KernelLibrary) -> None:
        self._mix = library.function("rk_mix", [_POINTER, _POINTER, _I32])
        self._choose = library.function("rk_choose", [_POINTER, _POINTER, _I64, _POINTER, _POINTER, _I32])

    def mix(self, layer: ExpertsLayer, source: int, choice: Choice, target: int, *, tokens: int, threads: int) -> None:
        """Write the sum of each token's experts to `target` [tokens, size]; `source` has the same shape, in bf16.

        Everything is rounded to bf16 where modules do it; with shares in fp32 only the sum is, of what they multiply.
        """
        kind = FP32 if choice.share_format == "fp32" else BF16
        call = _Call(tokens, choice.num_chosen, source, choice.indices, choice.shares, kind, target)
        self._mix(layer.reference, ctypes.byref(call), threads)

    def choose(self, router: RouterLayer, logits: int, indices: int, shares: int, *, rows: int, threads: int) -> None:
        """Write to the addresses `indices` (int64) and `shares`, [rows, num_chosen], what bf16 `logits` give."""
        self._choose(router.reference, logits, rows, indices, shares, threads)
