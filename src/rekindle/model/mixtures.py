"""Mixtures whose experts are computed by one call of our kernels, and the routers before them.

Owns which layers are, and which routers are known. One is taken for its structure, never for its model's name: two
packed projections for each expert, a gate, no norm after them. What its gate computes is found by comparison with the
layer's own code on random rows of several magnitudes, which must give the same bits but for a few roundings; experts
that round to 8 bits are compared as in `fused_modules`. Whatever is not bf16 rows is left to that code. A router is
known if its logits are near ours, and if of its own logits the kernels choose the same experts with the same shares: a
rounding of logits may change a choice, so both at once could not be compared.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.kernels.experts import (
    GATE_ACTIVATIONS,
    Choice,
    ExpertsKernel,
    ExpertsLayer,
    Gate,
    MixtureLayer,
    RouterLayer,
    ShareFormat,
    Shares,
)
from rekindle.kernels.library import KernelLibrary
from rekindle.kernels.linear import Linear, LinearKernel
from rekindle.model.compare import random_rows, same_in_8_bits, same_products, same_results
from rekindle.model.experts import FUSED_NAME, PACKED_NAME, PackedExperts, each_padded, mixtures
from rekindle.model.fused_modules import (
    SMALL,
    is_changed,
    own_result,
    small_linear,
)
from rekindle.model.packed import is_bf16, pack, packed_linear
from rekindle.model.packed_modules import multiply

log = logging.getLogger(__name__)
UP, DOWN = "gate_up_proj", "down_proj"
LIMITS, ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
LEAST_SHARE = 1e-30  # below, shares may be 0 or anything as small, and any expert may have them
CHOSEN, STEP = 4, 7  # experts of each compared row, and how far they lie apart
SMALL_EXPERTS = 8  # of a mixture over small weights
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
    if all(each.format == "bf16" for each in packed[DOWN].weights):
        return _same_experts(module, kernel, _gates(module), same_results)
    small = _over_small_weights(module, packed[UP].kernel)
    known = _same_experts(small, kernel, _gates(module), same_results)
    return None if known is None else _same_experts(module, kernel, [known.layer.gate], same_in_8_bits)


def _same_experts(
    module: Any,
    kernel: ExpertsKernel,
    gates: Iterable[Gate],
    same: Callable[[torch.Tensor, Any], bool],
) -> FusedExperts | None:
    """The experts with one of these gates that give the same outputs for random rows, or None."""
    up, down = (_linears(module, name) for name in (UP, DOWN))
    if up is None or down is None:
        return None
    rows = random_rows(up[0].packed.depth)
    count = min(CHOSEN, len(up))
    chosen = torch.arange(len(rows) * count).reshape(len(rows), count) * STEP % len(up)
    shares = random_rows(count)[: len(rows)].abs().softmax(-1)
    theirs = each_padded(module, rows, chosen, shares)
    for gate in gates:
        try:
            found = FusedExperts(kernel, ExpertsLayer(up, down, gate))
        except ValueError:
            return None
        ours = found(rows, chosen, shares)
        if ours is not None and same(ours, theirs):
            return found
    return None


def _over_small_weights(module: Any, kernel: LinearKernel) -> Any:
    """A copy of a mixture that computes with few random bf16 weights, without biases, in place of the module's."""
    small, generator = copy.copy(module), torch.Generator().manual_seed(1)
    small.has_bias = False
    made = {}
    for name, columns in ((UP, 2 * SMALL), (DOWN, SMALL)):
        linears = [packed_linear(small_linear(columns, generator), kernel, "bf16") for _ in range(SMALL_EXPERTS)]
        made[name] = PackedExperts(kernel, tuple(each.packed for each in linears))
    setattr(small, PACKED_NAME, made)
    return small


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


def mixture_layer(module: Any, library: KernelLibrary) -> MixtureLayer | None:
    """What computes a module that has a router and fused experts, and nothing else, as its own code does, or None."""
    children: dict[str, Any] = dict(module._modules)
    experts = children.pop("experts", None)
    fused = getattr(experts, FUSED_NAME, None)
    if not isinstance(fused, FusedExperts) or len(children) != 1 or module._parameters:
        return None
    (router,) = children.values()
    if any(is_changed(each) for each in (module, experts, router)):
        return None
    rows = random_rows(fused.layer.size)
    own = own_result(router, rows)
    known = _router_layer(router, rows, own, library)
    if known is None:
        return None
    theirs = own_result(module, rows[None])
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    _, shares, chosen = own
    if type(theirs) is not torch.Tensor or not torch.equal(theirs, experts(rows, chosen, shares)[None]):
        return None
    try:
        return MixtureLayer(known, fused.layer)
    except ValueError:
        return None


def _router_layer(module: Any, rows: torch.Tensor, own: Any, library: KernelLibrary) -> RouterLayer | None:
    """What gives the logits, shares and choices, `own`, of a router for these rows, or None."""
    parameters: dict[str, Any] = module._parameters
    weight, bias, count = parameters.get("weight"), parameters.get("bias"), getattr(module, "top_k", None)
    held = [each for each in parameters.values() if each is not None]
    if (
        weight is None
        or weight.dim() != 2
        or not parameters.keys() <= {"weight", "bias"}
        or not all(map(is_bf16, held))
    ):
        return None
    if module._modules or module._buffers or not isinstance(count, int) or not _is_routed(own):
        return None
    logits, shares, chosen = own
    linears, kernel = LinearKernel(library), ExpertsKernel(library)
    packed = pack(linears, weight, "columns first")
    ours = multiply(linears, packed, rows, bias)
    if ours.shape != logits.shape or chosen.shape[1] != count or not same_products(ours, logits, rows, weight, bias):
        return None
    linear = Linear(packed, None if bias is None else bias.data_ptr())
    for chosen_only in (True, False):
        router = RouterLayer(linear, count, Shares(chosen_only, SHARE_FORMATS[shares.dtype]))
        if _chooses(kernel, router, logits, shares, chosen):
            return router
    return None


def _is_routed(own: Any) -> bool:
    """Whether a router gave logits, shares and experts, in this order, in formats that the kernels know."""
    if not isinstance(own, tuple) or len(own) != 3 or not all(type(x) is torch.Tensor and x.dim() == 2 for x in own):
        return False
    logits, shares, chosen = own
    formats = logits.dtype, chosen.dtype
    return formats == (torch.bfloat16, torch.int64) and shares.dtype in SHARE_FORMATS and shares.shape == chosen.shape


def _chooses(
    kernel: ExpertsKernel, router: RouterLayer, logits: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor
) -> bool:
    """Whether the kernels choose from these logits experts with the same ones, and shares that are alike."""
    logits, found, our_shares = logits.contiguous(), torch.empty_like(chosen), torch.empty_like(shares)
    addresses = (x.data_ptr() for x in (logits, found, our_shares))
    kernel.choose(router, *addresses, rows=len(logits), threads=1)
    same = logits.gather(1, found) == logits.gather(1, chosen)
    ours, theirs = (x.where(x >= LEAST_SHARE, 0.0).bfloat16() for x in (our_shares, shares))
    return bool((same | (shares < LEAST_SHARE)).all()) and same_results(ours, theirs)
