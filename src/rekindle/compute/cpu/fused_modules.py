"""RMSNorm and gated MLPs by one call of our kernels.

Owns which the kernels compute: those that give the bits of the module's own code but for a few roundings. Where an
MLP's last product rounds its inputs to 8 bits, one such rounding moves many outputs: there its outputs may differ by
what 8 bits allow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rekindle.compute.cpu.kernels.decoder import DecoderKernel, MlpLayer, NormLayer
from rekindle.compute.cpu.kernels.linear import Linear, PackedWeights
from rekindle.compute.cpu.packed_modules import PackedLinear
from rekindle.model.compare import random_rows, same_in_8_bits, same_results
from rekindle.model.fused_layers import ModuleKernel
from rekindle.model.layer_parts import MlpParts, NormParts, is_changed


def norm_layer(parts: NormParts, kernel: DecoderKernel) -> NormLayer | None:
    """What computes a norm as its module's own code does, or None."""
    norm = NormLayer(parts.weight.numpy(), parts.epsilon, parts.rounding)
    return norm if norm_kernel(norm, kernel).agrees(parts.module, random_rows(norm.columns)) else None


def norm_kernel(norm: NormLayer, kernel: DecoderKernel) -> ModuleKernel:
    """A norm of rows of any shape."""
    return ModuleKernel(norm.columns, partial(_normalised, kernel, norm))


def _normalised(kernel: DecoderKernel, norm: NormLayer, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape)
    rows = x if x.dim() == 2 else x.reshape(-1, norm.columns)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    threads = torch.get_num_threads()
    kernel.normalise(norm, rows.data_ptr(), rows.stride(0), out.data_ptr(), rows=rows.shape[0], threads=threads)
    return out


def mlp_layer(parts: MlpParts, kernel: DecoderKernel) -> MlpLayer | None:
    """What computes an MLP of packed linear layers as its module's own code does, or None."""
    up = None if parts.up is None else linear(parts.up)
    try:
        mlp = MlpLayer(linear(parts.gate), up, linear(parts.down), parts.activation)
    except ValueError:
        return None
    same = same_results if parts.down.packed.format == "bf16" else same_in_8_bits
    return mlp if mlp_kernel(mlp, kernel).agrees(parts.module, random_rows(mlp.depth), same) else None


def mlp_kernel(mlp: MlpLayer, kernel: DecoderKernel) -> ModuleKernel:
    """An MLP of rows of any shape."""
    return ModuleKernel(mlp.depth, partial(_gated, kernel, mlp))


def _gated(kernel: DecoderKernel, mlp: MlpLayer, x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], mlp.columns)
    kernel.mlp(mlp, x.data_ptr(), out.data_ptr(), rows=x.numel() // mlp.depth, threads=torch.get_num_threads())
    return out


def linear(module: PackedLinear) -> Linear:
    """A packed layer as other kernels call it; it must outlive that."""
    assert isinstance(module.packed, PackedWeights), module
    return Linear(module.packed, None if module.bias is None else module.bias.data_ptr())


def is_packed(*modules: Any) -> bool:
    """Whether all are packed linear layers without hooks."""
    return all(type(module) is PackedLinear and not is_changed(module) for module in modules)
