"""Decoder layers of Llama's form, and of Gemma's, computed by the kernels in one call each.

Owns which layers fit the kernels, and how one is called. Bits depend on no number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rekindle.compute.cpu.fused_attention import FusedAttention
from rekindle.compute.cpu.fused_modules import is_packed, linear, mlp_kernel, mlp_layer, norm_kernel, norm_layer
from rekindle.compute.cpu.kernels import decoder as kernels
from rekindle.compute.cpu.kernels.attention import Scoring
from rekindle.compute.cpu.kernels.decoder import DecoderKernel, DecoderLayer, Norms, Projections
from rekindle.compute.cpu.kernels.experts import MixtureLayer
from rekindle.compute.cpu.mixtures import mixture_layer
from rekindle.model.fused_layers import LayerCall, ModuleKernel
from rekindle.model.layer_parts import LayerParts, MixtureParts, MlpParts, NormParts
from rekindle.spec import LayerSpec


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoder:
    """A layer by the kernels, as `LayerKernel`."""

    kernel: DecoderKernel
    layer: DecoderLayer
    until_mlp: DecoderLayer  # the same up to its second norm
    spec: LayerSpec
    size: int  # of a row
    scoring: Scoring
    sinks: torch.Tensor | None  # kept alive

    def output(self, call: LayerCall) -> torch.Tensor | None:
        """As `LayerKernel.output`."""
        return self._run(call, self.layer)

    def attended(self, call: LayerCall) -> torch.Tensor | None:
        """As `LayerKernel.attended`."""
        return self._run(call, self.until_mlp)

    def _run(self, call: LayerCall, layer: DecoderLayer) -> torch.Tensor | None:
        paged, plan, window = call.step.paged, call.step.plan, self.spec.window
        if not isinstance(paged, FusedAttention):
            return None
        blocks, layout, (hidden, cos, sin) = (
            paged.layer_blocks(self.spec.index),
            plan.layout,
            (call.hidden, call.cos, call.sin),
        )
        if 2 * cos.shape[-1] == self.spec.k_dim:  # both halves of a head have the same
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        if blocks is None or hidden.shape[-1] != self.size or cos.shape[-1] != self.spec.k_dim:
            return None
        if hidden.dtype is not torch.bfloat16:
            return None
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        output = torch.empty_like(hidden)
        self.kernel.layer(
            layer,
            blocks,
            kernels.Step(
                layout.row_blocks(window), layout.row_offsets, plan.worst.data_ptr(), paged.spans_of(plan, window)
            ),
            kernels.Activations(hidden.data_ptr(), output.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            self.scoring,
            threads=torch.get_num_threads(),
        )
        return output


@dataclass(frozen=True, slots=True)
class DecoderKernels:
    """The kernels for the layers of a model whose linear layers are packed, as `LayerKernels`."""

    kernel: DecoderKernel

    @property
    def dtype(self) -> torch.dtype:
        """As `LayerKernels.dtype`."""
        return torch.bfloat16

    def is_linear(self, module: object) -> bool:
        """As `LayerKernels.is_linear`."""
        return is_packed(module)

    def norm(self, parts: NormParts) -> ModuleKernel | None:
        """As `LayerKernels.norm`."""
        norm = norm_layer(parts, self.kernel)
        return None if norm is None else norm_kernel(norm, self.kernel)

    def mlp(self, parts: MlpParts) -> ModuleKernel | None:
        """As `LayerKernels.mlp`."""
        mlp = mlp_layer(parts, self.kernel)
        return None if mlp is None else mlp_kernel(mlp, self.kernel)

    def layers(self, parts: LayerParts, spec: LayerSpec) -> Iterator[FusedDecoder]:
        """As `LayerKernels.layers`."""
        projections = Projections(*map(linear, parts.projections))
        if not projections.fit(parts.size, parts.heads, spec):
            return
        norms = {part: norm_layer(norm, self.kernel) for part, norm in parts.norms.items()}
        known = {part: norm for part, norm in norms.items() if norm is not None}
        mlp = self._mlp(parts.mlp)
        if mlp is None or known.keys() != norms.keys():
            return
        layer, until_mlp = (DecoderLayer(Norms(**known), projections, each, parts.heads) for each in (mlp, None))
        sinks = None if parts.sinks is None else parts.sinks.float().contiguous()
        scoring = Scoring(parts.scaling, parts.window, parts.softcap, None if sinks is None else sinks.data_ptr())
        yield FusedDecoder(self.kernel, layer, until_mlp, spec, parts.size, scoring, sinks)

    def _mlp(self, parts: MlpParts | MixtureParts | None) -> kernels.MlpLayer | MixtureLayer | None:
        if parts is None:
            return None
        return (
            mlp_layer(parts, self.kernel) if isinstance(parts, MlpParts) else mixture_layer(parts, self.kernel.library)
        )
