"""Decoder layers of Llama's form, and of Gemma's, computed by the kernels in one call each.

Owns which layers are computed so: those whose parts are known (`layer_parts`) and fit the kernels. A layer's output for
a few sequences, at the first positions and at the last ones, must then be that of its own code, which stays and
computes whatever is no step over blocks that the kernels know, such as the eager attention of the trial forward. Any
number of rows goes the same way, so bits do not depend on it. In layers of another form, norms and MLPs are fused by
themselves. Hooks that are registered later, on parts of a fused layer, are not called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.fused_attention import FusedAttention
from rekindle.compute.cpu.fused_modules import fuse_modules, is_packed, linear, mlp_layer, norm_layer
from rekindle.compute.cpu.kernels import decoder as kernels
from rekindle.compute.cpu.kernels.attention import Scoring
from rekindle.compute.cpu.kernels.decoder import DecoderKernel, DecoderLayer, Norms, Projections
from rekindle.compute.cpu.kernels.experts import ExpertsKernel, MixtureLayer
from rekindle.compute.cpu.mixtures import fuse_experts, mixture_layer
from rekindle.model.adapter import STEP_KEYWORD
from rekindle.model.layer_parts import LayerParts, MlpParts, layer_parts, may_be_layer
from rekindle.model.loaded import LoadedModel
from rekindle.model.observation import Observation, observed
from rekindle.model.runner import PagedStep
from rekindle.spec import LayerSpec

log = logging.getLogger(__name__)
KEYWORDS = {
    *("attention_mask", "position_embeddings", "position_ids", "past_key_values", "use_cache", STEP_KEYWORD),
}
ROUTED = "output_router_logits"  # asks for what a router gives; not where it is false


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoder:
    """Computes a layer by the kernels where it can, and by the layer's own code elsewhere."""

    own: Callable[..., torch.Tensor]
    kernel: DecoderKernel
    layer: DecoderLayer
    spec: LayerSpec
    size: int  # of a row
    scoring: Scoring
    sinks: torch.Tensor | None  # kept alive
    attention: DecoderLayer | None = None  # of a mixture: the layer up to its second norm, by which it is compared

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's `forward`: [1, rows, size] -> the same."""
        others = kwargs.keys() - KEYWORDS
        is_plain = not args and (not others or (others == {ROUTED} and not kwargs[ROUTED]))
        fused = self.run(hidden_states, kwargs) if is_plain else None
        return self.own(hidden_states, *args, **kwargs) if fused is None else fused

    def run(
        self, hidden: torch.Tensor, keywords: dict[str, Any], layer: DecoderLayer | None = None
    ) -> torch.Tensor | None:
        """Compute the layer, or another form of it, by the kernels; None where they cannot."""
        step, positions = getattr(keywords.get(STEP_KEYWORD), "step", None), keywords.get("position_embeddings")
        if type(step) is not PagedStep or not isinstance(step.paged, FusedAttention):
            return None
        if not isinstance(positions, tuple) or len(positions) != 2 or keywords.get("attention_mask") is not None:
            return None
        blocks, plan, window = step.paged.layer_blocks(self.spec.index), step.plan, self.spec.window
        layout, (cos, sin) = plan.layout, positions
        if 2 * cos.shape[-1] == 2 * sin.shape[-1] == self.spec.k_dim:  # both halves of a head have the same
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        rotated = (1, layout.num_rows, self.spec.k_dim)
        if blocks is None or hidden.shape != (1, layout.num_rows, self.size) or not cos.shape == sin.shape == rotated:
            return None
        if not hidden.dtype is cos.dtype is sin.dtype is torch.bfloat16:
            return None
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        output = torch.empty_like(hidden)
        self.kernel.layer(
            self.layer if layer is None else layer,
            blocks,
            kernels.Step(
                layout.row_blocks(window), layout.row_offsets, plan.worst.data_ptr(), step.paged.spans_of(plan, window)
            ),
            kernels.Activations(hidden.data_ptr(), output.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            self.scoring,
            threads=torch.get_num_threads(),
        )
        return output


def fuse_layers(loaded: LoadedModel) -> int:
    """Let the kernels compute the layers for which they give the same outputs; return how many.

    Norms and MLPs elsewhere in the model are fused by themselves.
    """
    library = loaded.compute.library if isinstance(loaded.compute, KernelCompute) else None
    if library is None:
        return 0
    kernel, fused = DecoderKernel(library), list[FusedDecoder]()
    fuse_experts(loaded.model, ExpertsKernel(library))
    modules = [module for module in loaded.model.modules() if may_be_layer(module, is_packed)]
    inside = set[int]()
    with torch.inference_mode():
        for module, seen in observed(loaded, modules).items():
            found = _agreeing(seen, loaded, kernel)
            if found is not None:
                fused.append(found)
                inside |= {id(each) for each in module.modules()}
                module.forward = found
        fuse_modules((module for module in loaded.model.modules() if id(module) not in inside), kernel)
    log.info("%d decoder layers are computed by the kernels in one call each", len(fused))
    return len(fused)


def _agreeing(seen: tuple[Observation, ...], loaded: LoadedModel, kernel: DecoderKernel) -> FusedDecoder | None:
    """The kernels' form of a layer, if it gives the outputs that were observed, and with smaller rows, too."""
    module, call = seen[0].module, seen[0].call
    spec = next((layer for layer in loaded.spec.layout.layers if layer.index == call.layer_index), None)
    parts = None if spec is None else layer_parts(module, call, spec, is_packed)
    fused = None if spec is None or parts is None else _fused(parts, spec, kernel)
    if fused is None or not all(_agrees(fused, each) for each in (*seen, *(each.smaller() for each in seen))):
        return None
    return fused


def _agrees(fused: FusedDecoder, seen: Observation) -> bool:
    """Whether the kernels give a layer's own output but for roundings.

    Of a mixture, whether they give what it adds its experts to, as a rounding may send a row to another expert; router
    and experts were compared by themselves.
    """
    if fused.attention is None:
        return seen.agrees(fused.run(seen.hidden, seen.keywords))
    return seen.agrees_between(fused.run(seen.hidden, seen.keywords, fused.attention))


def _fused(parts: LayerParts, spec: LayerSpec, kernel: DecoderKernel) -> FusedDecoder | None:
    """The kernels' form of a layer; None if a part of it or their sizes are not for the kernels."""
    projections = Projections(*map(linear, parts.projections))
    if not projections.fit(parts.size, parts.heads, spec):
        return None
    norms = {part: norm_layer(norm, kernel) for part, norm in parts.norms.items()}
    known = {part: norm for part, norm in norms.items() if norm is not None}
    mlp = mlp_layer(parts.mlp, kernel) if isinstance(parts.mlp, MlpParts) else mixture_layer(parts.mlp, kernel.library)
    if mlp is None or known.keys() != norms.keys():
        return None
    layer = DecoderLayer(Norms(**known), projections, mlp, parts.heads)
    attention = DecoderLayer(Norms(**known), projections, None, parts.heads) if isinstance(mlp, MixtureLayer) else None
    sinks = None if parts.sinks is None else parts.sinks.float().contiguous()
    scoring = Scoring(parts.scaling, parts.window, parts.softcap, None if sinks is None else sinks.data_ptr())
    return FusedDecoder(parts.module.forward, kernel, layer, spec, parts.size, scoring, sinks, attention)
