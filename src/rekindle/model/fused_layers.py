"""Layers, norms and MLPs that a device computes by kernels of its own in place of their own code: `fuse_layers`.

Owns which are: those whose parts are known (`layer_parts`) and fit the device's kernels. A layer's output for a few
sequences, at the first positions and at the last ones, must then be that of its own code, which stays and computes
whatever is no step over blocks that the kernels know, such as the eager attention of the trial forward. Any number of
rows goes the same way. In layers of another form, norms and MLPs are fused by themselves, where the kernels give the
same results for random rows; such a module keeps all its attributes, and its own code for whatever is not rows of the
model's dtype alone. Modules with hooks are left alone; hooks that are registered later, on parts of what is fused, are
not called.

Knows no kernels: a device has them as `LayerKernels`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rekindle.model.adapter import STEP_KEYWORD
from rekindle.model.compare import same_results
from rekindle.model.layer_parts import (
    LayerParts,
    MlpParts,
    NormParts,
    is_changed,
    layer_parts,
    may_be_layer,
    mlp_parts,
    norm_parts,
    own_result,
)
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
class LayerCall:
    """A layer's rows in a step over blocks: hidden [1, rows, size]; the cos and sin of their positions [1, rows, dims].

    All of one dtype, with as many rows as the step has.
    """

    step: PagedStep
    hidden: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, hidden: Tensor, keywords: dict[str, Any]) -> LayerCall | None:
        """What a layer was called with; None where that is something else."""
        step, positions = getattr(keywords.get(STEP_KEYWORD), "step", None), keywords.get("position_embeddings")
        if type(step) is not PagedStep or keywords.get("attention_mask") is not None:
            return None
        if not isinstance(positions, tuple) or len(positions) != 2:
            return None
        (cos, sin), rows = positions, (1, step.plan.layout.num_rows)
        if any(x.dim() != 3 or x.shape[:2] != rows for x in (hidden, cos, sin)) or cos.shape != sin.shape:
            return None
        return cls(step, hidden, cos, sin) if hidden.dtype is cos.dtype is sin.dtype else None


class LayerKernel(Protocol):
    """A layer by kernels."""

    def output(self, call: LayerCall) -> Tensor | None:
        """As the layer's `forward`, [1, rows, size]; None where the kernels cannot compute it."""

    def attended(self, call: LayerCall) -> Tensor | None:
        """The rows to which the layer adds what its MLP gives, [1, rows, size]; None where they cannot."""


class ModuleKernel(NamedTuple):
    """What computes rows of so many values, [..., columns] in the model's dtype, as a module does."""

    columns: int
    computed: Callable[[Tensor], Tensor]

    def agrees(self, module: Any, rows: Tensor, same: Callable[[Tensor, Any], bool] = same_results) -> bool:
        """Whether it gives what the module's own code gives for `random_rows`."""
        return same(self.computed(rows), own_result(partial(type(module).forward, module), rows))


class LayerKernels(Protocol):
    """The kernels of a device for the layers of one model."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows which they compute."""

    def is_linear(self, module: Any) -> bool:
        """Whether they multiply by a module."""

    def layers(self, parts: LayerParts, spec: LayerSpec) -> Iterable[LayerKernel]:
        """A layer in the forms that it may have, the likeliest first; none if one of its parts is not for them."""

    def norm(self, parts: NormParts) -> ModuleKernel | None:
        """A norm, if they give what its own code gives."""

    def mlp(self, parts: MlpParts) -> ModuleKernel | None:
        """An MLP, if they give what its own code gives."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """Computes a layer by kernels where they can, and by the layer's own code elsewhere."""

    own: Callable[..., Tensor]
    kernel: LayerKernel

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the layer's `forward`: [1, rows, size] -> the same."""
        others = kwargs.keys() - KEYWORDS
        is_plain = not args and (not others or (others == {ROUTED} and not kwargs[ROUTED]))
        call = LayerCall.of(hidden_states, kwargs) if is_plain else None
        fused = None if call is None else self.kernel.output(call)
        return self.own(hidden_states, *args, **kwargs) if fused is None else fused


def fuse_layers(loaded: LoadedModel, kernels: LayerKernels) -> int:
    """Let kernels compute the layers for which they give the same outputs; return how many.

    Norms and MLPs elsewhere in the model are fused by themselves.
    """
    modules, inside, count = list(loaded.model.modules()), set[int](), 0
    with torch.inference_mode():
        for module, seen in observed(
            loaded, [each for each in modules if may_be_layer(each, kernels.is_linear)]
        ).items():
            parts = _parts(seen, loaded, kernels)
            found = None if parts is None else _agreeing(seen, *parts, kernels)
            if parts is not None and found is not None:
                inside |= {id(each) for each in module.modules()}
                if not isinstance(parts[0].mlp, MlpParts):
                    inside -= {id(each) for each in module.mlp.modules()}
                module.forward = FusedLayer(module.forward, found)
                count += 1
        fuse_modules((each for each in modules if id(each) not in inside), kernels)
    log.info("%d decoder layers are computed by kernels in one call each", count)
    return count


def _parts(
    seen: tuple[Observation, ...], loaded: LoadedModel, kernels: LayerKernels
) -> tuple[LayerParts, LayerSpec] | None:
    module, call = seen[0].module, seen[0].call
    spec = next((layer for layer in loaded.spec.layout.layers if layer.index == call.layer_index), None)
    parts = None if spec is None else layer_parts(module, call, spec, kernels.is_linear)
    return None if spec is None or parts is None else (parts, spec)


def _agreeing(
    seen: tuple[Observation, ...], parts: LayerParts, spec: LayerSpec, kernels: LayerKernels
) -> LayerKernel | None:
    """The first form of a layer that gives the outputs which were observed, and with smaller rows, too."""
    smaller = [each.smaller() for each in seen]
    forms = kernels.layers(parts, spec)
    return next((form for form in forms if all(_agrees(form, parts, each) for each in (*seen, *smaller))), None)


def _agrees(form: LayerKernel, parts: LayerParts, seen: Observation) -> bool:
    """Whether the kernels give a layer's own output but for roundings.

    Where its MLP is a mixture or of no known form, whether they give what the layer adds that to, as a rounding may
    send a row to another expert; what is computed of router and experts was compared by itself.
    """
    call = LayerCall.of(seen.hidden, seen.keywords)
    if call is None:
        return False
    if isinstance(parts.mlp, MlpParts):
        return seen.agrees(form.output(call))
    return seen.agrees_between(form.attended(call))


def fuse_modules(modules: Iterable[Any], kernels: LayerKernels) -> None:
    """Fuse the norms and MLPs among some modules."""
    counts = {"norms": 0, "MLPs": 0}
    for module in modules:
        if is_changed(module):
            continue
        of_norm, of_mlp = norm_parts(module, kernels.dtype), mlp_parts(module, kernels.is_linear, kernels.dtype)
        norm = None if of_norm is None else kernels.norm(of_norm)
        mlp = None if of_mlp is None else kernels.mlp(of_mlp)
        found = norm or mlp
        if found is not None:
            module.forward = _forward(module, found, kernels.dtype)
        counts["norms"] += norm is not None
        counts["MLPs"] += mlp is not None
    log.info("%s are fused", ", ".join(f"{count} {name}" for name, count in counts.items()))


def _forward(module: Any, kernel: ModuleKernel, dtype: torch.dtype) -> Callable[..., Any]:
    """What computes rows of this dtype and size by the kernel, and leaves anything else to the module's own code."""
    own = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = None if kwargs or len(args) != 1 else args[0]
        if not isinstance(x, Tensor) or x.dtype is not dtype or x.shape[-1] != kernel.columns:
            return own(module, *args, **kwargs)
        return kernel.computed(x)

    return forward
