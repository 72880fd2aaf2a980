"""Attention over blocks by our kernels, for layers and dtypes that they know; by torch for the others.

Has the interface of `PagedAttention`, whose bytes it writes, to the bit. A row's result is the same, bit for bit,
whatever else is in the step and however the context was split into steps: see `kernels.attention`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rekindle.compute.cpu.kernels.attention import (
    MOST_DIMS,
    AttentionKernel,
    LayerBlocks,
    Rows,
    Scoring,
    Span,
    Spans,
    fits,
)
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.kv import q4h
from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan


class FusedAttention(PagedAttention):
    """Attention of one model over one arena in the CPU's memory, on the thread that owns both."""

    def __init__(self, arena: KVArena, kernels: KernelLibrary) -> None:
        super().__init__(arena)
        self._kernel = AttentionKernel(kernels)
        self._layers: dict[int, LayerBlocks] = {}
        self._plan: AttentionPlan | None = None
        self._spans: dict[int | None, Spans] = {}  # of this plan, by window
        signs = q4h.sign_values(MOST_DIMS).astype(np.float32)
        for part, rows in zip(arena.layout.parts, arena.parts, strict=True):
            for spec, sections in zip(part.layers, part.sections, strict=True):
                if fits(spec):
                    self._layers[spec.index] = LayerBlocks(
                        spec, sections, rows.data_ptr(), block_bytes=part.payload_bytes, signs=signs
                    )

    def write(self, layer_index: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """As `PagedAttention.write`."""
        layer = self._layers.get(layer_index)
        if layer is None or not k.dtype == v.dtype == torch.bfloat16:
            super().write(layer_index, k, v, plan)
            return
        self._refuse_misshapen(layer_index, k, v, plan)
        k, v = _dense(k), _dense(v)
        self._kernel.write(
            layer,
            _rows(k),
            _rows(v),
            blocks=plan.layout.row_blocks(self.arena.layer(layer_index).spec.window),
            offsets=plan.layout.row_offsets,
            worst=plan.worst.data_ptr(),
            threads=torch.get_num_threads(),
        )

    def attend(
        self,
        layer_index: int,
        q: Tensor,
        plan: AttentionPlan,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `PagedAttention.attend`."""
        layer = self._layers.get(layer_index)
        if layer is None or q.dtype != torch.bfloat16:
            return super().attend(layer_index, q, plan, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        self._refuse_misfit(layer_index, q, plan, window=window, sinks=sinks)
        q, wide_sinks = _dense(q), None if sinks is None else sinks.float().contiguous()
        outputs = q.new_empty(*q.shape[:2], layer.out_dim)
        outputs[plan.layout.num_used :].zero_()
        self._kernel.attend(
            layer,
            self.spans_of(plan, window),
            _rows(q),
            heads=q.shape[1],
            output=outputs.data_ptr(),
            scoring=Scoring(scaling, window, softcap, None if wide_sinks is None else wide_sinks.data_ptr()),
            threads=torch.get_num_threads(),
        )
        return outputs

    def layer_blocks(self, layer_index: int) -> LayerBlocks | None:
        """Where the kernels find a layer's K and V; None for a layer that they do not know."""
        return self._layers.get(layer_index)

    def spans_of(self, plan: AttentionPlan, window: int | None) -> Spans:
        """The plan's spans for the kernels, made once a step for all layers of a window."""
        if self._plan is not plan:
            self._plan, self._spans = plan, {}
        if window not in self._spans:
            row, spans = 0, []
            for span in plan.layout.spans:
                blocks = plan.layout.context(window, span)
                spans.append(Span(blocks, span.start, span.num_rows, row, span.seen()))
                row += span.num_rows
            self._spans[window] = Spans(spans)
        return self._spans[window]


def _dense(rows: Tensor) -> Tensor:
    """Rows whose values lie next to each other."""
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _rows(rows: Tensor) -> Rows:
    return Rows(rows.data_ptr(), rows.stride(0), rows.stride(1))
