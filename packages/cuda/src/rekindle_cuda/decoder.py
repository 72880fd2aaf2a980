"""Decoder layers of Llama's form, and of Gemma's, on a card: a few kernels around the products and the attention.

    rows ──norm──▶ q, k, v ──norms of heads, rotary embedding──▶ written, attended to ──▶ o ──┐
      └──────────────────────────────── + (after a norm) ◀────────────────────────────────────┘
                                        └──norm──▶ MLP ──▶ + (after a norm) ──▶ rows of the next layer

Owns which layers, norms and MLPs the kernels compute. An MLP of another form, such as a mixture, computes itself. No
call waits for the card or copies from the host, apart from what the attention of a step does once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rekindle.layer_forms import Activation
from rekindle.model.compare import random_rows, same_but_for_sums, same_in_8_bits
from rekindle.model.fused_layers import LayerCall, ModuleKernel
from rekindle.model.layer_parts import LayerParts, MlpParts, NormParts
from rekindle.spec import LayerSpec
from rekindle_cuda.attention import Scoring, TritonAttention
from rekindle_cuda.linears import Products, is_linear, is_rounded, product
from rekindle_cuda.rows import Norm, added, added_and_normalised, gated, normalised, turned

# What is rotated of a head: its halves against each other, the halves of as many first dimensions as positions have
# numbers, or the neighbours in these.
Rotary = Literal["whole", "first", "pairs"]
ROTARY: tuple[Rotary, ...] = ("whole", "first", "pairs")


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """down(activation(gate(x)) * up(x)) of rows [..., size]."""

    gate_and_up: Products
    down: Any
    activation: Activation

    @classmethod
    def of(cls, parts: MlpParts) -> Mlp:
        gate_and_up = (parts.gate,) if parts.up is None else (parts.gate, parts.up)
        return cls(Products.of(*gate_and_up), parts.down, parts.activation)

    def __call__(self, rows: Tensor) -> Tensor:
        found = self.gate_and_up(rows.reshape(-1, rows.shape[-1]))
        gates, others = found[0].chunk(2, -1) if len(found) == 1 else found
        output = product(self.down, gated(gates, others, self.activation))
        return output.reshape(*rows.shape[:-1], output.shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoder:
    """A layer by the kernels, as `LayerKernel`."""

    parts: LayerParts
    spec: LayerSpec
    norms: dict[str, Norm]
    qkv: Products
    mlp: Callable[[Tensor], Tensor]
    rotary: Rotary
    dtype: torch.dtype

    def output(self, call: LayerCall) -> Tensor | None:
        """As `LayerKernel.output`."""
        if not self._takes(call):
            return None
        rows, normed = self._until_mlp(call)
        return added(self.mlp(normed), rows, self.norms.get("mlp_output"), into=rows)[None]

    def attended(self, call: LayerCall) -> Tensor | None:
        """As `LayerKernel.attended`."""
        return self._until_mlp(call)[0][None] if self._takes(call) else None

    def _takes(self, call: LayerCall) -> bool:
        dims, k_dim = call.cos.shape[-1], self.spec.k_dim
        fits = dims in (k_dim, k_dim // 2) if self.rotary == "whole" else dims < k_dim
        rows = call.hidden.dtype is self.dtype and call.hidden.shape[-1] == self.parts.size
        return fits and rows and isinstance(call.step.paged, TritonAttention)

    def _until_mlp(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """The rows to which the MLP's output is added, and their norm."""
        spec, parts, norms = self.spec, self.parts, self.norms
        rows = call.hidden[0].contiguous()
        q, k, v = self.qkv(normalised(rows, norms["input"]))
        q, k = q.unflatten(-1, (parts.heads, spec.k_dim)), k.unflatten(-1, (spec.num_kv_heads, spec.k_dim))
        rotated = spec.k_dim if self.rotary == "whole" else call.cos.shape[-1]
        through = turned(
            (parts.heads, spec.num_kv_heads),
            (norms.get("q"), norms.get("k")),
            (call.cos[0], call.sin[0]),
            spec.k_dim,
            rotated,
            paired=self.rotary == "pairs",
        )
        paged, plan = call.step.paged, call.step.plan
        assert isinstance(paged, TritonAttention)  # as `_takes` found
        queries = paged.place(spec.index, q, k, v.unflatten(-1, (spec.num_kv_heads, spec.v_dim)), plan, through)
        scoring = Scoring(parts.scaling, parts.softcap, parts.window, parts.sinks)
        attended = paged.attend_placed(spec.index, queries, plan, scoring)
        given = product(parts.projections[3], attended.flatten(1))
        return added_and_normalised(given, rows, norms.get("attention_output"), norms["mlp"])


@dataclass(frozen=True, slots=True)
class CardKernels:
    """The kernels for the layers of a model of one dtype on one device, as `LayerKernels`."""

    dtype: torch.dtype
    device: torch.device

    def is_linear(self, module: Any) -> bool:
        """As `LayerKernels.is_linear`."""
        return is_linear(module, self.dtype)

    def norm(self, parts: NormParts) -> ModuleKernel | None:
        """As `LayerKernels.norm`."""
        found = ModuleKernel(parts.columns, partial(normalised, norm=Norm.of(parts)))
        return found if found.agrees(parts.module, self._rows(parts.columns)) else None

    def mlp(self, parts: MlpParts) -> ModuleKernel | None:
        """As `LayerKernels.mlp`."""
        found = ModuleKernel(parts.gate.in_features, Mlp.of(parts))
        same = same_in_8_bits if is_rounded(parts.down) else same_but_for_sums
        return found if found.agrees(parts.module, self._rows(found.columns), same) else None

    def _rows(self, columns: int) -> Tensor:
        return random_rows(columns, self.dtype).to(self.device)

    def layers(self, parts: LayerParts, spec: LayerSpec) -> Iterator[FusedDecoder]:
        """As `LayerKernels.layers`."""
        norms = {part: Norm.of(each) for part, each in parts.norms.items() if self.norm(each) is not None}
        mlp = (
            self.mlp(parts.mlp) if isinstance(parts.mlp, MlpParts) else ModuleKernel(parts.size, _itself(parts.module))
        )
        if mlp is None or norms.keys() != parts.norms.keys() or not _fit(parts, spec):
            return
        qkv = Products.of(*parts.projections[:3])
        for rotary in ROTARY:
            yield FusedDecoder(parts, spec, norms, qkv, mlp.computed, rotary, self.dtype)


def _fit(parts: LayerParts, spec: LayerSpec) -> bool:
    """Whether the products around attention are those of its heads, whose dimensions are halves."""
    columns, depths = ([getattr(each, name) for each in parts.projections] for name in ("out_features", "in_features"))
    of_q, of_k, of_v = parts.heads * spec.k_dim, spec.num_kv_heads * spec.k_dim, spec.num_kv_heads * spec.v_dim
    expected = [of_q, of_k, of_v, parts.size], [parts.size] * 3 + [parts.heads * spec.v_dim]
    return (columns, depths) == expected and spec.k_dim % 2 == 0 and not spec.latent


def _itself(layer: Any) -> Callable[[Tensor], Tensor]:
    """What the MLP of a layer gives for rows [rows, size] by its own code, or the first of several things."""

    def computed(rows: Tensor) -> Tensor:
        output = layer.mlp(rows[None])
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first[0]

    return computed
