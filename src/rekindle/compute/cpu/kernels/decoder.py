"""Decoder layers and their parts on raw addresses: RMSNorm, gated MLPs, whole layers of Llama's and Gemma's form in
one call.

Describes them once, so that a call passes only addresses and a number of rows. Knows packed weights and blocks, no
modules: callers keep what they point to alive, and guarantee dtypes and shapes: bf16, rows without gaps unless a stride
is given. A row's result depends on that row and on what its sequence has stored, to the bit.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from rekindle.compute.cpu.kernels.attention import AttendCall, LayerBlocks, RowsStruct, Scoring, Spans, WriteCall
from rekindle.compute.cpu.kernels.experts import MixtureLayer
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.cpu.kernels.linear import Linear, WeightsStruct, described
from rekindle.layer_forms import Activation, Rounding
from rekindle.spec import LayerSpec

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")  # RK_SILU and RK_GELU_TANH of native/rekindle.h
HEAD_MULTIPLE = 32  # of the size of heads in a decoder layer
_MOST_LANES = 16
_I32, _I64, _POINTER, _F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_NOWHERE = RowsStruct(None, 0, 0)


class _Norm(ctypes.Structure):
    """`rk_norm` of native/rekindle.h."""

    _fields_ = (("weight", _POINTER), ("columns", _I64), ("epsilon", _F32), ("rounds_first", _I32))


class _Mlp(ctypes.Structure):
    """`rk_mlp` of native/rekindle.h."""

    _fields_ = (*((name, WeightsStruct) for name in ("gate", "up", "down")), ("inner", _I64), ("activation", _I32))


class _Decoder(ctypes.Structure):
    """`rk_decoder` of native/rekindle.h."""

    _fields_ = (
        *((f"{name}_norm", _Norm) for name in ("input", "mlp", "q", "k", "attention_output", "mlp_output")),
        *((name, WeightsStruct) for name in "qkvo"),
        ("mlp", _Mlp),
        ("mixture", _POINTER),
    )


class _DecoderCall(ctypes.Structure):
    """`rk_decoder_call` of native/rekindle.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("input", "output", "cos", "sin")),
        *(("write", WriteCall), ("attend", AttendCall)),
    )


class NormLayer:
    """RMSNorm with these weights, fp32 [columns]: the quotient is rounded to bf16 before or after they multiply it."""

    def __init__(self, weight: np.ndarray, epsilon: float, rounding: Rounding) -> None:
        assert weight.dtype == np.float32 and weight.ndim == 1, weight
        self.columns = len(weight)
        self._weight = np.zeros(-(-len(weight) // _MOST_LANES) * _MOST_LANES, np.float32)  # kept alive
        self._weight[: self.columns] = weight
        self.described = _Norm(self._weight.ctypes.data, self.columns, epsilon, rounding == "before the weight")
        self.reference = ctypes.byref(self.described)


class MlpLayer:
    """down(activation(gate(x)) * up(x)); without `up`, its columns follow those of `gate`.

    ValueError if the sizes do not fit together.
    """

    def __init__(self, gate: Linear, up: Linear | None, down: Linear, activation: Activation) -> None:
        self._linears = gate, up, down  # kept alive
        self.activation = activation
        self.depth, self.columns = gate.packed.depth, down.packed.columns
        inner = down.packed.depth
        of_gate = 2 * inner if up is None else inner
        if gate.packed.columns != of_gate or (
            up is not None and (up.packed.columns, up.packed.depth) != (inner, self.depth)
        ):
            raise ValueError(f"gate {gate.packed}, up {up} and down {down.packed} are not those of one MLP")
        self.described = _Mlp(*map(described, self._linears), inner, ACTIVATIONS.index(activation))
        self.reference = ctypes.byref(self.described)


class Projections(NamedTuple):
    """The products around the attention of a decoder layer."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear

    def fit(self, size: int, heads: int, spec: LayerSpec) -> bool:
        """Whether rows of `size` values go through all of them, and the kernels know heads of this size."""
        columns, depths = [each.packed.columns for each in self], [each.packed.depth for each in self]
        of_q, of_k, of_v = heads * spec.k_dim, spec.num_kv_heads * spec.k_dim, spec.num_kv_heads * spec.v_dim
        return (
            columns == [of_q, of_k, of_v, size]
            and depths == [size, size, size, heads * spec.v_dim]
            and spec.k_dim % HEAD_MULTIPLE == 0
        )


class Norms(NamedTuple):
    """The norms of a decoder layer: of its input and of its MLP's; where it has them, of each head of q and k, and of
    what attention and MLP give, before that is added."""

    input: NormLayer
    mlp: NormLayer
    q: NormLayer | None = None
    k: NormLayer | None = None
    attention_output: NormLayer | None = None
    mlp_output: NormLayer | None = None


class DecoderLayer:
    """A layer in the form that the kernels read; `heads` is the number of query heads.

    Without an MLP or a mixture it ends after its attention, before the second norm.
    """

    def __init__(self, norms: Norms, projections: Projections, mlp: MlpLayer | MixtureLayer | None, heads: int) -> None:
        self._parts = norms, projections, mlp  # kept alive
        self.heads = heads
        self.described = _Decoder(
            *(_Norm(None, 0, 0.0, 0) if norm is None else norm.described for norm in norms),
            *map(described, projections),
            mlp.described if isinstance(mlp, MlpLayer) else _Mlp(),
            ctypes.addressof(mlp.described) if isinstance(mlp, MixtureLayer) else None,
        )
        self.reference = ctypes.byref(self.described)


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
    """`rk_normalise`, `rk_gated_mlp` and `rk_decoder_layer` of one library."""

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library
        self._normalise = library.function("rk_normalise", [_POINTER, _POINTER, _I64, _POINTER, _I64, _I32])
        self._mlp = library.function("rk_gated_mlp", [_POINTER, _POINTER, _POINTER, _I64, _I32])
        self._layer = library.function("rk_decoder_layer", [_POINTER, _POINTER, _POINTER, _I32])

    def normalise(self, norm: NormLayer, source: int, stride: int, target: int, *, rows: int, threads: int) -> None:
        """Write the norm of rows at the address `source`, `stride` values apart, to `target`, which may be the same."""
        self._normalise(norm.reference, source, stride, target, rows, threads)

    def mlp(self, mlp: MlpLayer, source: int, target: int, *, rows: int, threads: int) -> None:
        """Write the MLP of rows [rows, depth] to `target` [rows, columns]."""
        self._mlp(mlp.reference, source, target, rows, threads)

    def layer(
        self, decoder: DecoderLayer, blocks: LayerBlocks, step: Step, at: Activations, scoring: Scoring, *, threads: int
    ) -> None:
        """Compute a layer for all rows of a step; K and V are stored as `AttentionKernel.write` does."""
        write = WriteCall(
            *(len(step.blocks), step.blocks.ctypes.data, step.offsets.ctypes.data),
            *(_NOWHERE, _NOWHERE, step.worst),
        )
        spans = step.spans.described
        attend = AttendCall(
            *(ctypes.addressof(spans), len(spans), decoder.heads, scoring.window or 0),
            *(_NOWHERE, None, scoring.sinks, scoring.scaling, scoring.softcap or 0.0),
        )
        call = _DecoderCall(*at, write, attend)
        self._layer(decoder.reference, blocks.reference, ctypes.byref(call), threads)
