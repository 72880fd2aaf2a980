"""Modules of transformers that are computed by one call of our kernels: RMSNorm and gated MLPs.

Owns which modules are fused: those whose parts are known (`layer_parts`) and of which the kernels give the same bits
but for a few roundings. Where an MLP's last product rounds its inputs to 8 bits, one such rounding moves many outputs:
there its outputs may differ by what 8 bits allow. The module stays where it is with all its attributes; only its
`forward` is ours, which leaves to its own code whatever is not bf16 rows alone. Modules with hooks are left alone;
hooks that are registered later, on parts of a fused module, are not called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from rekindle.compute.cpu.kernels.decoder import DecoderKernel, MlpLayer, NormLayer
from rekindle.compute.cpu.kernels.linear import Linear
from rekindle.compute.cpu.packed_modules import PackedLinear
from rekindle.model.compare import random_rows, same_in_8_bits, same_results
from rekindle.model.layer_parts import MlpParts, NormParts, is_changed, mlp_parts, norm_parts, own_result

log = logging.getLogger(__name__)


def fuse_modules(modules: Iterable[Any], kernel: DecoderKernel) -> None:
    """Fuse what can be fused of modules whose linear layers are packed."""
    counts = {"norms": 0, "MLPs": 0}
    for module in modules:
        if is_changed(module):
            continue
        of_norm, of_mlp = norm_parts(module), mlp_parts(module, is_packed)
        norm = None if of_norm is None else norm_layer(of_norm, kernel)
        mlp = None if of_mlp is None else mlp_layer(of_mlp, kernel)
        if norm is not None:
            module.forward = _forward(module, norm.columns, partial(_normalised, kernel, norm))
        elif mlp is not None:
            module.forward = _forward(module, mlp.depth, partial(_gated, kernel, mlp))
        counts["norms"] += norm is not None
        counts["MLPs"] += mlp is not None
    log.info("%s are fused", ", ".join(f"{count} {name}" for name, count in counts.items()))


def norm_layer(parts: NormParts, kernel: DecoderKernel) -> NormLayer | None:
    """What computes a norm as its module's own code does, or None."""
    rows = random_rows(parts.columns)
    norm = NormLayer(parts.weight.numpy(), parts.epsilon, parts.rounding)
    theirs = own_result(partial(type(parts.module).forward, parts.module), rows)
    return norm if same_results(_normalised(kernel, norm, rows), theirs) else None


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
    rows = random_rows(mlp.depth)
    theirs = own_result(partial(type(parts.module).forward, parts.module), rows)
    same = same_results if parts.down.packed.format == "bf16" else same_in_8_bits
    return mlp if same(_gated(kernel, mlp, rows), theirs) else None


def _gated(kernel: DecoderKernel, mlp: MlpLayer, x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], mlp.columns)
    kernel.mlp(mlp, x.data_ptr(), out.data_ptr(), rows=x.numel() // mlp.depth, threads=torch.get_num_threads())
    return out


def _forward(module: Any, size: int, computed: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """What computes bf16 rows of this size so, and leaves anything else to the module's own code."""
    own = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = None if kwargs or len(args) != 1 else args[0]
        if not isinstance(x, torch.Tensor) or x.dtype is not torch.bfloat16 or x.shape[-1] != size:
            return own(module, *args, **kwargs)
        return computed(x)

    return forward


def linear(module: PackedLinear) -> Linear:
    """A packed layer as other kernels call it; it must outlive that."""
    return Linear(module.packed, None if module.bias is None else module.bias.data_ptr())


def is_packed(*modules: Any) -> bool:
    """Whether all are packed linear layers without hooks."""
    return all(type(module) is PackedLinear and not is_changed(module) for module in modules)
