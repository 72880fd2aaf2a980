"""Attention over blocks on raw addresses: storing K and V, and attending to what is stored.

Knows a layer's sections and the addresses of its blocks, no tensors and no sequences. A row's bytes and outputs depend
on that row and on what its sequence has stored, to the bit: not on the other rows of a call, nor on the number of
threads. Between levels outputs differ; what is stored is the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.spec import CODES_PER_WORD, LayerSections, LayerSpec, Section, group_size

FORMATS = {"bf16": 0, "q4h": 2, "q8h": 5}  # RK_BF16, RK_Q4H and RK_Q8H of native/rekindle.h
MOST_DIMS = 512
MOST_ROTARY_DIMS, ROTARY_MULTIPLE = 128, 16
MOST_SCALES = 16  # of V of one token, in vectors of the narrowest level
_NARROWEST = 8
_I32, _I64, _POINTER, _F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class Rows(NamedTuple):
    """bf16 values [rows, heads, dim] in memory that somebody else holds; strides in values, that of `dim` is 1."""

    address: int
    row_stride: int
    head_stride: int


class Span(NamedTuple):
    """Rows start .. start + num_rows of a sequence, the step's from `row` on; its blocks, int32 [n] and contiguous.

    `ends`: the position after the last token that each row sees, int64 [num_rows] and never less than that of the row
    before; None: each row sees up to itself.
    """

    blocks: np.ndarray
    start: int
    num_rows: int
    row: int
    ends: np.ndarray | None = None


class Scoring(NamedTuple):
    """How products of queries and keys become weights; `sinks`: the address of fp32 [heads], or None."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: int | None


class RowsStruct(ctypes.Structure):
    """`rk_rows` of native/rekindle.h."""

    _fields_ = (("values", _POINTER), ("row_stride", _I64), ("head_stride", _I64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *(("blocks", _POINTER), ("signs", _POINTER)),
        *((name, _I64) for name in ("block_bytes", "block_tokens", "kv_heads")),
        *((name, _I64) for name in ("k", "k_scales", "k_dim", "v", "v_scales", "v_dim")),
        *(("k_format", _I32), ("v_format", _I32), ("latent", _I32)),
    )


class WriteCall(ctypes.Structure):
    """`rk_write_call` of native/rekindle.h."""

    _fields_ = (
        *(("rows", _I64), ("blocks", _POINTER), ("offsets", _POINTER)),
        *(("k", RowsStruct), ("v", RowsStruct), ("worst", _POINTER)),
    )


class _Span(ctypes.Structure):
    _fields_ = (("blocks", _POINTER), ("start", _I64), ("rows", _I64), ("row", _I64), ("ends", _POINTER))


class AttendCall(ctypes.Structure):
    """`rk_attend_call` of native/rekindle.h."""

    _fields_ = (
        *(("spans", _POINTER), ("num_spans", _I64), ("heads", _I64), ("window", _I64)),
        *(("q", RowsStruct), ("output", _POINTER), ("sinks", _POINTER)),
        *(("scaling", _F32), ("softcap", _F32)),
    )


class LayerBlocks:
    """Where one layer's K and V lie in blocks from `address` on, `block_bytes` apart; `signs`: fp32 [512]."""

    def __init__(
        self, spec: LayerSpec, sections: LayerSections, address: int, *, block_bytes: int, signs: np.ndarray
    ) -> None:
        assert fits(spec), spec
        assert signs.dtype == np.float32 and signs.shape == (MOST_DIMS,), signs
        k, v = sections.k, sections.v
        self._signs = signs  # kept alive
        self.out_dim = spec.out_dim
        self.described = _Layer(
            *(address, signs.ctypes.data, block_bytes, k[0].shape[1], spec.num_kv_heads),
            *(k[0].offset, _scales_offset(k), spec.k_dim, v[0].offset, _scales_offset(v), spec.v_dim),
            *(FORMATS[spec.k_format], FORMATS[spec.v_format], spec.latent),
        )
        self.reference = ctypes.byref(self.described)


def _scales_offset(sections: Sequence[Section]) -> int:
    return sections[1].offset if len(sections) == 2 else 0


def fits(spec: LayerSpec) -> bool:
    """Whether the kernels know a layer's formats and head sizes."""
    if spec.k_format not in FORMATS or spec.v_format not in FORMATS or max(spec.k_dim, spec.v_dim) > MOST_DIMS:
        return False
    if spec.latent and (spec.v_dim > MOST_ROTARY_DIMS or spec.v_dim % ROTARY_MULTIPLE):
        return False
    if spec.v_format == "q4h":
        chunks = -(-spec.v_dim // (CODES_PER_WORD * _NARROWEST))
        scales_of_chunk = CODES_PER_WORD * _NARROWEST // group_size("v", spec.v_dim)
        if (1 << (chunks - 1).bit_length()) * scales_of_chunk > MOST_SCALES:
            return False
    return spec.k_dim % 2 == 0


class Spans:
    """The spans of a step in the form the kernels read."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = tuple(spans)  # kept alive
        assert all(span.blocks.dtype == np.int32 and span.blocks.flags.c_contiguous for span in spans)
        assert all(span.ends is None or span.ends.dtype == np.int64 for span in spans)
        self.described = (_Span * len(spans))(
            *(
                _Span(span.blocks.ctypes.data, span.start, span.num_rows, span.row, _address(span.ends))
                for span in spans
            )
        )


def _address(values: np.ndarray | None) -> int | None:
    return None if values is None else int(values.ctypes.data)


class AttentionKernel:
    """`rk_write` and `rk_attend` of one library."""

    def __init__(self, library: KernelLibrary) -> None:
        self._write = library.function("rk_write", [_POINTER, _POINTER, _I32])
        self._attend = library.function("rk_attend", [_POINTER, _POINTER, _I32])

    def write(
        self,
        layer: LayerBlocks,
        k: Rows,
        v: Rows,
        *,
        blocks: np.ndarray,
        offsets: np.ndarray,
        worst: int,
        threads: int,
    ) -> None:
        """Store rows of K and V at token `offsets` of `blocks`, both int32 [rows]; a negative block: nowhere.

        fp32 [rows] at the address `worst` is raised to each row's largest magnitude, NaN and infinity included.
        """
        assert blocks.dtype == offsets.dtype == np.int32 and blocks.shape == offsets.shape
        call = WriteCall(len(blocks), blocks.ctypes.data, offsets.ctypes.data, RowsStruct(*k), RowsStruct(*v), worst)
        self._write(layer.reference, ctypes.byref(call), threads)

    def attend(
        self, layer: LayerBlocks, spans: Spans, q: Rows, *, heads: int, output: int, scoring: Scoring, threads: int
    ) -> None:
        """Attend with `heads` queries of each row of the spans; `output`: the address of bf16 [rows, heads, size]."""
        call = AttendCall(
            *(ctypes.addressof(spans.described), len(spans.described), heads, scoring.window or 0),
            *(RowsStruct(*q), output, scoring.sinks, scoring.scaling, scoring.softcap or 0.0),
        )
        self._attend(layer.reference, ctypes.byref(call), threads)
