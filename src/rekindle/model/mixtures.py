"""Mixtures whose experts are computed by one call of our kernels.

Owns which layers are. One is taken for its structure, never for its model's name: two packed projections for each
expert, a gate, no norm after them. What its gate computes is found by comparison with the layer's own code on random
rows of several magnitudes, which must give the same bits but for a few roundings. Whatever is not bf16 rows is left to
that code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.kernels.experts import GATE_ACTIVATIONS, Choice, ExpertsKernel, ExpertsLayer, Gate, ShareFormat
from rekindle.kernels.linear import Linear
from rekindle.model.experts import FUSED_NAME, PACKED_NAME, each_padded, mixtures
from rekindle.model.fused_modules import alike, is_changed, random_rows
from rekindle.model.packed import is_bf16

log = logging.getLogger(__name__)
UP, DOWN = "gate_up_proj", "down_proj"
LIMITS, ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
CHOSEN, STEP = 4, 7  # experts of each compared row, and how far they lie apart
SHARE_FORMATS: dict[torch.dtype, ShareFormat] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


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
    up, down = (_linears(module, name) for name in (UP, DOWN))
    if up is None or down is None:
        return None
    rows = random_rows(packed[UP].weights[0].depth)
    count, number = min(CHOSEN, len(packed[UP].weights)), len(packed[UP].weights)
    chosen = torch.arange(len(rows) * count).reshape(len(rows), count) * STEP % number
    shares = random_rows(count)[: len(rows)].abs().softmax(-1)
    theirs = each_padded(module, rows, chosen, shares)
    for gate in _gates(module):
        try:
            found = FusedExperts(kernel, ExpertsLayer(up, down, gate))
        except ValueError:
            return None
        ours = found(rows, chosen, shares)
        if ours is not None and alike(ours, theirs):
            return found
    return None


def _linears(module: Any, name: str) -> list[Linear] | None:
    """One projection of every expert; None if its biases are no bf16 values."""
    weights = getattr(module, PACKED_NAME)[name].weights
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if bias is None:
        return [Linear(each, None) for each in weights]
    if not is_bf16(bias) or bias.shape != (len(weights), weights[0].columns):
        return None
    return [Linear(each, row.data_ptr()) for each, row in zip(weights, bias, strict=True)]


def _gates(module: Any) -> Iterator[Gate]:
    """Gates that a layer may have, by its attributes."""
    limit, alpha = (_number(module, names) for names in (LIMITS, ALPHAS))
    for activation in GATE_ACTIVATIONS:
        yield Gate(activation, not module.is_concatenated, limit, 1.0 if alpha is None else alpha)


def _number(module: Any, names: tuple[str, ...]) -> float | None:
    values = (getattr(module, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, int | float)), None)
