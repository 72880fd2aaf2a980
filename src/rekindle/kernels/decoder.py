"""Decoder layers of Llama's form on raw addresses, each in one call: norms, products, attention, residuals.

Knows addresses, packed weights and blocks, no modules: callers keep what they point to alive, and guarantee dtypes and
shapes. A row's output depends on that row and on what its sequence has stored, to the bit.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from rekindle.kernels.attention import AttendCall, LayerBlocks, RowsStruct, Scoring, Spans, WriteCall
from rekindle.kernels.library import KernelLibrary
from rekindle.kernels.linear import FORMATS, PackedWeights
from rekindle.spec import LayerSpec

HEAD_MULTIPLE, SIZE_MULTIPLE = 32, 16  # of the size of heads, and of all others
_POINTER, _NOWHERE = ctypes.c_void_p, RowsStruct(None, 0, 0)


class Norm(NamedTuple):
    """RMSNorm with the bf16 weights at an address; None: there is no norm."""

    weight: int | None
    epsilon: float


NO_NORM = Norm(None, 0.0)


class Linear(NamedTuple):
    """Packed weights, and the address of a bf16 bias or None."""

    packed: PackedWeights
    bias: int | None


class Projections(NamedTuple):
    """The linear layers of a decoder layer."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    up: Linear
    down: Linear

    def fit(self, size: int, heads: int, spec: LayerSpec) -> bool:
        """Whether rows of `size` values go through all layers, and the kernels know sizes like these."""
        columns, depths = ([each.packed.columns for each in self], [each.packed.depth for each in self])
        of_q, of_k, of_v = heads * spec.k_dim, spec.num_kv_heads * spec.k_dim, spec.num_kv_heads * spec.v_dim
        inner, of_heads = self.down.packed.depth, heads * spec.v_dim
        return (
            columns == [of_q, of_k, of_v, size, inner, inner, size]
            and depths == [size, size, size, of_heads, size, size, inner]
            and spec.k_dim % HEAD_MULTIPLE == 0
            and all(each % SIZE_MULTIPLE == 0 for each in (size, inner, of_v, of_heads))
        )


class Norms(NamedTuple):
    """The norms of a decoder layer: of its input, before its MLP, and of each head of q and k."""

    input: Norm
    post_attention: Norm
    q: Norm
    k: Norm


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("epsilon", ctypes.c_float))


class _Weights(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("packed", "bias")),
        *(("columns", ctypes.c_int64), ("depth", ctypes.c_int64), ("format", ctypes.c_int32)),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (*((name, _Norm) for name in Norms._fields), *((f"{name}_", _Weights) for name in Projections._fields))


class _Call(ctypes.Structure):
    """`rk_decoder_call` of native/rekindle.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("input", "output", "cos", "sin")),
        *(("write", WriteCall), ("attend", AttendCall)),
    )


class DecoderLayer:
    """Norms and weights of one layer in the form that the kernels read; `heads` is the number of query heads."""

    def __init__(self, norms: Norms, projections: Projections, heads: int) -> None:
        self._projections = projections  # kept alive
        self.heads = heads
        self.described = _Decoder(
            *(_Norm(*norm) for norm in norms),
            *(_described(*each) for each in projections),
        )
        self.reference = ctypes.byref(self.described)


def _described(packed: PackedWeights, bias: int | None) -> _Weights:
    return _Weights(packed.address, bias, packed.columns, packed.depth, FORMATS[packed.format])


class Step(NamedTuple):
    """The rows of a step: where K and V go (int32 [rows] each, fp32 [rows] at the address `worst`), and the spans."""

    blocks: np.ndarray
    offsets: np.ndarray
    worst: int
    spans: Spans


class Activations(NamedTuple):
    """Addresses of bf16 values: rows in and out [rows, size], cosines and sines [rows, size of heads]."""

    input: int
    output: int
    cos: int
    sin: int


class DecoderKernel:
    """`rk_decoder_layer` of one library."""

    def __init__(self, library: KernelLibrary) -> None:
        self._run = library.function("rk_decoder_layer", [_POINTER, _POINTER, _POINTER, ctypes.c_int32])

    def run(
        self, decoder: DecoderLayer, layer: LayerBlocks, step: Step, at: Activations, scoring: Scoring, *, threads: int
    ) -> None:
        """Compute a layer for all rows of a step; K and V are stored as `AttentionKernel.write` does."""
        blocks, spans = step.blocks, step.spans.described
        write = WriteCall(len(blocks), blocks.ctypes.data, step.offsets.ctypes.data, _NOWHERE, _NOWHERE, step.worst)
        attend = AttendCall(
            *(ctypes.addressof(spans), len(spans), decoder.heads, scoring.window or 0),
            *(_NOWHERE, None, scoring.sinks, scoring.scaling, scoring.softcap or 0.0),
        )
        self._run(decoder.reference, layer.reference, ctypes.byref(_Call(*at, write, attend)), threads)
