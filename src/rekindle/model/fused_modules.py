"""Modules of transformers that are computed by one call of our kernels: RMSNorm and gated MLPs.

Owns which modules are fused. A module is recognised by what it holds, never by its name in a model: a weight and an
epsilon; packed projections and an activation. What it computes is found by comparison with its own code on random rows
of several magnitudes: fused is what gives the same bits but for a few roundings. Where the last product rounds its
inputs to 8 bits, one such rounding moves many outputs: there the code is compared over small bf16 weights, and the
module's own outputs within what 8 bits allow. The module stays where it is with all its attributes; only its `forward`
is ours, which leaves to its own code whatever is not bf16 rows alone. Modules with hooks are left alone; hooks that are
registered later, on parts of a fused module, are not called.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rekindle.kernels.decoder import ACTIVATIONS, ROUNDINGS, Activation, DecoderKernel, MlpLayer, NormLayer
from rekindle.kernels.linear import Linear, LinearKernel
from rekindle.model.compare import random_rows, same_in_8_bits, same_results
from rekindle.model.packed import HOOKS, is_bf16, packed_linear
from rekindle.model.packed_modules import PackedLinear

log = logging.getLogger(__name__)
EPSILONS = ("variance_epsilon", "eps")
GATES, UPS, DOWNS = ("gate_proj", "gate_up_proj"), "up_proj", "down_proj"
ACTIVATION_NAMES = ("act_fn", "activation_fn")
SMALL = 64  # inputs and inner values of an MLP over small weights
Forward = Callable[..., Any]


def fuse_modules(modules: Iterable[Any], kernel: DecoderKernel) -> None:
    """Fuse what can be fused of modules whose linear layers are packed."""
    counts = {"norms": 0, "MLPs": 0}
    for module in modules:
        if is_changed(module):
            continue
        norm, mlp = norm_layer(module, kernel), mlp_layer(module, kernel)
        if norm is not None:
            module.forward = _norm_forward(module, kernel, norm)
        elif mlp is not None:
            module.forward = _mlp_forward(module, kernel, mlp)
        counts["norms"] += norm is not None
        counts["MLPs"] += mlp is not None
    log.info("%s are fused", ", ".join(f"{count} {name}" for name, count in counts.items()))


def norm_layer(module: Any, kernel: DecoderKernel) -> NormLayer | None:
    """What computes a module that holds one weight and an epsilon as its own code does, or None."""
    weight = module._parameters.get("weight")
    epsilon = next((getattr(module, name) for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)
    alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    if epsilon is None or not alone or weight is None or weight.dim() != 1 or not is_bf16(weight):
        return None
    rows = random_rows(len(weight))
    theirs = own_result(module, rows)
    for offset in (0.0, 1.0):
        for rounding in ROUNDINGS:
            norm = NormLayer((weight.detach().float() + offset).numpy(), epsilon, rounding)
            if same_results(_normalised(kernel, norm, rows), theirs):
                return norm
    return None


def _normalised(kernel: DecoderKernel, norm: NormLayer, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape)
    rows = x if x.dim() == 2 else x.reshape(-1, norm.columns)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    threads = torch.get_num_threads()
    kernel.normalise(norm, rows.data_ptr(), rows.stride(0), out.data_ptr(), rows=rows.shape[0], threads=threads)
    return out


def _norm_forward(module: Any, kernel: DecoderKernel, norm: NormLayer) -> Forward:
    own: Forward = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not _is_rows(args[0], norm.columns):
            return own(module, *args, **kwargs)
        return _normalised(kernel, norm, args[0])

    return forward


def mlp_layer(module: Any, kernel: DecoderKernel) -> MlpLayer | None:
    """What computes a module of packed gate, up and down projections as its own code does, or None."""
    children: dict[str, Any] = dict(module._modules)
    gate: Any = next((children.pop(name) for name in GATES if name in children), None)
    up: Any = children.pop(UPS, None)
    down: Any = children.pop(DOWNS, None)
    for name in ACTIVATION_NAMES:
        children.pop(name, None)
    if children or module._parameters or any(is_changed(each) for each in module._modules.values()):
        return None
    if not is_packed(gate, down) or not (up is None or is_packed(up)):
        return None
    if down.packed.format == "bf16":
        return _same_mlp(module, kernel, ACTIVATIONS, same_results)
    small = _same_mlp(_over_small_weights(module, LinearKernel(kernel.library)), kernel, ACTIVATIONS, same_results)
    return None if small is None else _same_mlp(module, kernel, (small.activation,), same_in_8_bits)


def _same_mlp(
    module: Any,
    kernel: DecoderKernel,
    activations: Iterable[Activation],
    same: Callable[[torch.Tensor, Any], bool],
) -> MlpLayer | None:
    """The MLP with one of these activations that gives the same outputs for random rows, or None."""
    gate, up, down = _projections(module)
    rows = random_rows(gate.in_features)
    theirs = own_result(module, rows)
    for activation in activations:
        try:
            mlp = MlpLayer(linear(gate), None if up is None else linear(up), linear(down), activation)
        except ValueError:
            return None
        if same(_gated(kernel, mlp, rows), theirs):
            return mlp
    return None


def _projections(module: Any) -> tuple[PackedLinear, PackedLinear | None, PackedLinear]:
    children = module._modules
    return next(children[name] for name in GATES if name in children), children.get(UPS), children[DOWNS]


def _over_small_weights(module: Any, kernel: LinearKernel) -> Any:
    """A copy of an MLP that computes with few random bf16 weights in place of the module's."""
    small = copy.copy(module)
    small._modules = dict(module._modules)
    generator = torch.Generator().manual_seed(1)
    for name in (*GATES, UPS, DOWNS):
        if name in module._modules:
            columns = 2 * SMALL if name in GATES and UPS not in module._modules else SMALL
            small._modules[name] = packed_linear(small_linear(columns, generator), kernel, "bf16")
    return small


def _gated(kernel: DecoderKernel, mlp: MlpLayer, x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], mlp.columns)
    kernel.mlp(mlp, x.data_ptr(), out.data_ptr(), rows=x.numel() // mlp.depth, threads=torch.get_num_threads())
    return out


def _mlp_forward(module: Any, kernel: DecoderKernel, mlp: MlpLayer) -> Forward:
    own: Forward = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not _is_rows(args[0], mlp.depth):
            return own(module, *args, **kwargs)
        return _gated(kernel, mlp, args[0])

    return forward


def small_linear(columns: int, generator: torch.Generator) -> nn.Linear:
    """A layer of `SMALL` inputs whose outputs are about as large as they are."""
    layer = nn.Linear(SMALL, columns, bias=False, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(
        (torch.randn(columns, SMALL, generator=generator) / SMALL**0.5).to(torch.bfloat16), requires_grad=False
    )
    return layer


def _is_rows(x: Any, columns: int) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 and x.shape[-1] == columns


def linear(module: PackedLinear) -> Linear:
    """A packed layer as other kernels call it; it must outlive that."""
    return Linear(module.packed, None if module.bias is None else module.bias.data_ptr())


def is_changed(module: nn.Module) -> bool:
    """Whether something may see or change what a module computes, or computes it in its place."""
    return any(module.__dict__.get(name) for name in HOOKS)


def is_packed(*modules: Any) -> bool:
    """Whether all are packed linear layers without hooks."""
    return all(type(module) is PackedLinear and not is_changed(module) for module in modules)


def own_result(module: Any, rows: torch.Tensor) -> Any:
    """What a module's own code gives for these rows; None if it wants something else."""
    try:
        with torch.inference_mode():
            return type(module).forward(module, rows)
    except (TypeError, RuntimeError, ValueError, AttributeError, LookupError):
        return None
