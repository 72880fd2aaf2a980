"""Mixtures whose experts are computed by one call of our kernels, and the routers before them.

Owns which layers are: two packed projections for each expert, a gate that is known (`layer_parts`), no norm after them,
and outputs that the kernels give, too, on random rows of several magnitudes: the same bits but for a few roundings, in
8 bits as in `fused_modules`. Whatever is not bf16 rows is left to their own code. Of a router the kernels must give
near logits, and of its own logits choose the same experts with the same shares: a rounding of logits may change a
choice, so both at once could not be compared.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.compute.cpu.kernels.experts import Choice, ExpertsKernel, ExpertsLayer, MixtureLayer, RouterLayer
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.cpu.kernels.linear import Linear
from rekindle.compute.cpu.packed import is_bf16
from rekindle.compute.cpu.packer import KernelPacker
from rekindle.model.compare import random_rows, same_choices, same_in_8_bits, same_products, same_results
from rekindle.model.layer_parts import SHARE_FORMATS, MixtureParts, Routed, RouterParts, gate_of, is_changed
from rekindle.model.padded_experts import FUSED_NAME, PACKED_NAME, each_padded, mixtures

log = logging.getLogger(__name__)
UP, DOWN = "gate_up_proj", "down_proj"
CHOSEN, STEP = 4, 7  # experts of each compared row, and how far they lie apart


@dataclass(frozen=True, slots=True, eq=False)
class FusedExperts:
    """Computes the experts of a layer by the kernels."""

    kernel: ExpertsKernel
    layer: ExpertsLayer

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor | None:
        """As `padded_experts`: the weighted sum of each token's experts; None where the kernels cannot compute it.

        IndexError if there is no such expert.
        """
        share_format = SHARE_FORMATS.get(shares.dtype)
        if hidden.dtype is not torch.bfloat16 or chosen.dtype is not torch.int64 or share_format is None:
            return None
        if hidden.dim() != 2 or hidden.shape[1] != self.layer.size or chosen.shape != shares.shape:
            return None
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.layer.experts:
            raise IndexError(f"experts must lie between 0 and {self.layer.experts - 1}")
        hidden, chosen, shares = hidden.contiguous(), chosen.contiguous(), shares.contiguous()
        output = torch.empty_like(hidden)
        choice = Choice(chosen.shape[1], chosen.data_ptr(), shares.data_ptr(), share_format)
        threads = torch.get_num_threads()
        self.kernel.mix(self.layer, hidden.data_ptr(), choice, output.data_ptr(), tokens=len(hidden), threads=threads)
        return output


def fuse_experts(model: Any, kernel: ExpertsKernel) -> int:
    """Let the kernels compute the mixtures for which they give the same outputs; return how many."""
    count = 0
    with torch.inference_mode():
        for path, module in mixtures(model):
            fused = fused_experts(module, kernel)
            if fused is None:
                log.info("%s: experts are computed one by one", path)
            else:
                setattr(module, FUSED_NAME, fused)
                count += 1
    return count


def fused_experts(module: Any, kernel: ExpertsKernel) -> FusedExperts | None:
    """What computes a layer's experts as its own code does, or None."""
    packed = getattr(module, PACKED_NAME, {})
    if not module.has_gate or module.has_post_expert_norm or is_changed(module) or packed.keys() != {UP, DOWN}:
        return None
    gate, up, down = gate_of(module), _linears(module, UP), _linears(module, DOWN)
    if gate is None or up is None or down is None:
        return None
    try:
        found = FusedExperts(kernel, ExpertsLayer(up, down, gate))
    except ValueError:
        return None
    rows, count = random_rows(up[0].packed.depth), min(CHOSEN, len(up))
    chosen = torch.arange(len(rows) * count).reshape(len(rows), count) * STEP % len(up)
    shares = random_rows(count)[: len(rows)].abs().softmax(-1)
    ours, theirs = found(rows, chosen, shares), each_padded(module, rows, chosen, shares)
    same = same_results if all(each.format == "bf16" for each in packed[DOWN].weights) else same_in_8_bits
    return found if ours is not None and same(ours, theirs) else None


def _linears(module: Any, name: str) -> list[Linear] | None:
    """One projection of every expert; None if its biases are no bf16 values."""
    weights = getattr(module, PACKED_NAME)[name].weights
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if bias is None:
        return [Linear(each, None) for each in weights]
    if not is_bf16(bias) or bias.shape != (len(weights), weights[0].columns):
        return None
    return [Linear(each, row.data_ptr()) for each, row in zip(weights, bias, strict=True)]


def mixture_layer(parts: MixtureParts, library: KernelLibrary) -> MixtureLayer | None:
    """What computes a router and its experts, if these are fused, as their own code does, or None."""
    fused = getattr(parts.experts, FUSED_NAME, None)
    if not isinstance(fused, FusedExperts):
        return None
    router = _router_layer(parts.router, library)
    if router is None:
        return None
    try:
        return MixtureLayer(router, fused.layer)
    except ValueError:
        return None


def _router_layer(parts: RouterParts, library: KernelLibrary) -> RouterLayer | None:
    """What gives the logits, shares and choices of a router, or None."""
    weight, bias, packer = parts.weight, parts.bias, KernelPacker.of(library)
    rows = random_rows(weight.shape[1])
    own, packed = Routed.by(parts.module, rows), packer.pack(weight, "columns first", "bf16")
    if own is None or not same_products(packer.multiply(packed, rows, bias), own.logits, rows, weight, bias):
        return None
    linear = Linear(packed, None if bias is None else bias.data_ptr())
    router = RouterLayer(linear, parts.num_chosen, parts.shares)
    logits, found, shares = own.logits.contiguous(), torch.empty_like(own.chosen), torch.empty_like(own.shares)
    addresses = (x.data_ptr() for x in (logits, found, shares))
    ExpertsKernel(library).choose(router, *addresses, rows=len(logits), threads=1)
    return router if same_choices(logits, (found, shares), (own.chosen, own.shares)) else None
