"""What decoder layers are made of: modules of transformers read as values of their parts, for any device to build from.

Owns which modules are norms, gated MLPs, gates of experts, routers, mixtures and layers. One is recognised for its
structure, never for its name or its model's: it holds what its kind holds and nothing else, and has no hooks. What its
structure does not show, such as when a norm rounds or by what an MLP is activated, is found by comparing the module's
own code on random rows of several magnitudes with torch's result for each form: the first that gives the same bits but
for a few roundings is taken. MLPs and gates are compared over few small weights, whatever theirs are.

A device compares what it builds with a part's `module` by itself, and says which modules are linear layers to it. Knows
no kernels and no packed weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from rekindle.layer_forms import Activation, Gate, GateActivation, Rounding, ShareFormat, Shares
from rekindle.model.adapter import AttentionCall
from rekindle.model.compare import random_rows, same_choices, same_products, same_results
from rekindle.spec import LayerSpec

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_hf_hook", "forward")
LAYER = {"self_attn", "mlp"}
NORMS: tuple[dict[str, str], ...] = (  # names of a layer's norms by what they are to a device: in Llama, in Gemma
    {"input": "input_layernorm", "mlp": "post_attention_layernorm"},
    {
        "input": "input_layernorm",
        "attention_output": "post_attention_layernorm",
        "mlp": "pre_feedforward_layernorm",
        "mlp_output": "post_feedforward_layernorm",
    },
)
ATTENTION, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
EPSILONS = ("variance_epsilon", "eps")
GATES, UP, DOWN = ("gate_proj", "gate_up_proj"), "up_proj", "down_proj"
ACTIVATION_NAMES = ("act_fn", "activation_fn")
LIMITS, ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
ROUNDINGS: tuple[Rounding, ...] = ("before the weight", "after the weight")
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
}
GATE_ACTIVATIONS: tuple[GateActivation, ...] = (*ACTIVATIONS, "swish")
SHARE_FORMATS: dict[torch.dtype, ShareFormat] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
SMALL = 64  # inputs and inner values of an MLP over small weights
IsLinear = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, eq=False)
class NormParts:
    """RMSNorm: the quotient is rounded to the rows' dtype before or after the weights, fp32 [columns], multiply it."""

    module: Any
    weight: torch.Tensor
    epsilon: float
    rounding: Rounding

    @property
    def columns(self) -> int:
        """Values of a row."""
        return len(self.weight)

    def computed(self, rows: torch.Tensor) -> torch.Tensor:
        """The norm by torch."""
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        if self.rounding == "before the weight":
            wide = wide.to(rows.dtype).float()
        return (wide * self.weight).to(rows.dtype)


def norm_parts(module: Any, dtype: torch.dtype) -> NormParts | None:
    """The parts of a module that holds one weight of this dtype and an epsilon, and is RMSNorm; None for any other."""
    weight = module._parameters.get("weight")
    epsilon = next((getattr(module, name) for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)
    alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    if epsilon is None or not alone or weight is None or weight.dim() != 1 or not holds(weight, dtype):
        return None
    rows = random_rows(len(weight), dtype).to(weight.device)
    theirs = own_result(partial(type(module).forward, module), rows)
    for offset in (0.0, 1.0):
        for rounding in ROUNDINGS:
            found = NormParts(module, weight.detach().float() + offset, epsilon, rounding)
            if same_results(found.computed(rows), theirs):
                return found
    return None


@dataclass(frozen=True, slots=True, eq=False)
class MlpParts:
    """down(activation(gate(x)) * up(x)) of linear layers; without `up`, its outputs follow those of `gate`."""

    module: Any
    gate: Any
    up: Any | None
    down: Any
    activation: Activation

    @classmethod
    def of(cls, module: Any, activation: Activation) -> MlpParts:
        """The parts of a module that has the projections of an MLP."""
        children = module._modules
        gate = next(children[name] for name in GATES if name in children)
        return cls(module, gate, children.get(UP), children[DOWN], activation)

    @property
    def sizes(self) -> set[int]:
        """Values of a row before and after it."""
        return {self.gate.in_features, self.down.out_features}

    def computed(self, rows: torch.Tensor) -> Any:
        """The MLP by its linear layers and by torch."""
        gates, others = self.gate(rows).chunk(2, -1) if self.up is None else (self.gate(rows), self.up(rows))
        return self.down(ACTIVATIONS[self.activation](gates) * others)


def mlp_parts(module: Any, is_linear: IsLinear, dtype: torch.dtype) -> MlpParts | None:
    """The parts of a module that holds gate, up and down projections, and is a gated MLP; None for any other."""
    children: dict[str, Any] = dict(module._modules)
    linears = [children.pop(name) for name in (*GATES, UP, DOWN) if name in children]
    for name in ACTIVATION_NAMES:
        children.pop(name, None)
    if children or module._parameters or any(is_changed(each) for each in module._modules.values()):
        return None
    if DOWN not in module._modules or all(name not in module._modules for name in GATES):
        return None
    if not all(map(is_linear, linears)):
        return None
    small, rows = _over_small_weights(module, dtype), random_rows(SMALL, dtype)
    theirs = own_result(partial(type(module).forward, small), rows)
    forms = (each for each in ACTIVATIONS if same_results(MlpParts.of(small, each).computed(rows), theirs))
    return next((MlpParts.of(module, activation) for activation in forms), None)


def _over_small_weights(module: Any, dtype: torch.dtype) -> Any:
    """A copy of an MLP that computes with few random weights in place of the module's."""
    small = copy.copy(module)
    small._modules = dict(module._modules)
    generator = torch.Generator().manual_seed(1)
    for name in (*GATES, UP, DOWN):
        if name in module._modules:
            columns = 2 * SMALL if name in GATES and UP not in module._modules else SMALL
            linear = nn.Linear(SMALL, columns, bias=False, dtype=dtype)
            weight = torch.randn(columns, SMALL, generator=generator) / SMALL**0.5  # outputs as large as inputs
            linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            small._modules[name] = linear
    return small


def gate_of(experts: Any) -> Gate | None:
    """What a module of experts does between its two projections; None if that is of no known form."""
    rows = random_rows(2 * SMALL)
    theirs = own_result(experts._apply_gate, rows)
    return next((gate for gate in _gates(experts) if same_results(gated(gate, rows), theirs)), None)


def _gates(experts: Any) -> Iterator[Gate]:
    """Gates that experts may have, by their attributes."""
    limit, alpha = (_number(experts, names) for names in (LIMITS, ALPHAS))
    for activation in GATE_ACTIVATIONS:
        yield Gate(activation, not experts.is_concatenated, limit, 1.0 if alpha is None else alpha)


def _number(module: Any, names: tuple[str, ...]) -> float | None:
    values = (getattr(module, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, int | float)), None)


def gated(gate: Gate, values: torch.Tensor) -> torch.Tensor:
    """What a gate makes of values [rows, 2 * inner] by torch: [rows, inner]."""
    gates, others = (values[..., ::2], values[..., 1::2]) if gate.interleaved else values.chunk(2, -1)
    if gate.limit is not None:
        gates, others = gates.clamp(max=gate.limit), others.clamp(-gate.limit, gate.limit)
    if gate.activation == "swish":
        return gates * torch.sigmoid(gates * gate.alpha) * (others + 1)
    return ACTIVATIONS[gate.activation](gates) * others


class Routed(NamedTuple):
    """What a router gives for some rows: logits [rows, experts]; shares and experts [rows, number of choices]."""

    logits: torch.Tensor
    shares: torch.Tensor
    chosen: torch.Tensor

    @classmethod
    def by(cls, router: Any, rows: torch.Tensor) -> Routed | None:
        """What a router's own code gives; None if that is something else, or in formats of no router."""
        own = own_result(partial(type(router).forward, router), rows)
        if not isinstance(own, tuple) or len(own) != 3:
            return None
        if not all(type(x) is torch.Tensor and x.dim() == 2 for x in own):
            return None
        found = cls(*own)
        formats = found.logits.dtype, found.chosen.dtype
        known = formats == (torch.bfloat16, torch.int64) and found.shares.dtype in SHARE_FORMATS
        return found if known and found.shares.shape == found.chosen.shape else None


@dataclass(frozen=True, slots=True, eq=False)
class RouterParts:
    """Gives each row the experts with the largest logits, products with weights [experts, size] plus a bias."""

    module: Any
    weight: torch.Tensor
    bias: torch.Tensor | None
    num_chosen: int
    shares: Shares

    def chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts that logits choose, and their shares in fp32, by torch."""
        values, chosen = logits.float().topk(self.num_chosen)
        shares = values.softmax(-1) if self.shares.chosen_only else logits.float().softmax(-1).gather(1, chosen)
        return chosen, shares


def router_parts(module: Any, rows: torch.Tensor) -> RouterParts | None:
    """The parts of a module that routes rows by one product, compared on these; None for any other."""
    parameters: dict[str, Any] = module._parameters
    weight, bias, count = parameters.get("weight"), parameters.get("bias"), getattr(module, "top_k", None)
    held = [each for each in parameters.values() if each is not None]
    if weight is None or weight.dim() != 2 or not parameters.keys() <= {"weight", "bias"}:
        return None
    if (
        not all(holds(each, torch.bfloat16) for each in held)
        or module._modules
        or module._buffers
        or not isinstance(count, int)
    ):
        return None
    own = Routed.by(module, rows) if weight.shape[1] == rows.shape[1] else None
    if own is None or own.chosen.shape[1] != count:
        return None
    ours = nn.functional.linear(rows, weight, bias)
    if ours.shape != own.logits.shape or not same_products(ours, own.logits, rows, weight, bias):
        return None
    for chosen_only in (True, False):
        found = RouterParts(module, weight, bias, count, Shares(chosen_only, SHARE_FORMATS[own.shares.dtype]))
        if same_choices(own.logits, found.chosen(own.logits), (own.chosen, own.shares)):
            return found
    return None


@dataclass(frozen=True, slots=True, eq=False)
class MixtureParts:
    """A router and a module of experts, `experts(rows, chosen, shares)`."""

    module: Any
    router: RouterParts
    experts: Any

    @property
    def sizes(self) -> set[int]:
        """Values of a row before and after it."""
        return {self.router.weight.shape[1]}


def mixture_parts(module: Any) -> MixtureParts | None:
    """The parts of a module that gives what its experts give to the choice of its router; None for any other."""
    children: dict[str, Any] = dict(module._modules)
    experts = children.pop("experts", None)
    if experts is None or len(children) != 1 or module._parameters:
        return None
    ((_, router),) = children.items()
    weight = router._parameters.get("weight")
    if weight is None or weight.dim() != 2 or any(is_changed(each) for each in (module, experts, router)):
        return None
    rows = random_rows(weight.shape[1]).to(weight.device)
    found, own = router_parts(router, rows), Routed.by(router, rows)
    if found is None or own is None:
        return None
    theirs = own_result(partial(type(module).forward, module), rows[None])
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    expected = own_result(experts, rows, own.chosen, own.shares)
    if type(theirs) is not torch.Tensor or expected is None or not torch.equal(theirs, expected[None]):
        return None
    return MixtureParts(module, found, experts)


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A decoder layer of Llama's form or Gemma's: its norms by what they are, linear layers, MLP or mixture, attention.

    `mlp`: None where it is of no known form. `scaling`, `window`, `softcap` and `sinks` are those of its calls of
    attention, by `heads` query heads.
    """

    module: Any
    norms: dict[str, NormParts]
    projections: tuple[Any, Any, Any, Any]  # of q, k, v and what attention gives
    mlp: MlpParts | MixtureParts | None
    heads: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def size(self) -> int:
        """Values of a row."""
        return self.norms["input"].columns


def layer_norms(module: Any) -> dict[str, Any]:
    """The norms of a layer that has the submodules of one of the forms, and nothing else; of any other module none."""
    children = module._modules
    names = next((names for names in NORMS if children.keys() == LAYER | {*names.values()}), {})
    return {part: children[name] for part, name in names.items()}


def may_be_layer(module: Any, is_linear: IsLinear) -> bool:
    """Whether a module has the submodules of a decoder layer of one of the forms."""
    if not layer_norms(module) or any(is_changed(each) for each in module.modules()):
        return False
    attention = module.self_attn
    return (
        ATTENTION <= attention._modules.keys() <= ATTENTION | HEAD_NORMS
        and all(is_linear(attention._modules[name]) for name in ATTENTION)
        and isinstance(getattr(attention, "layer_idx", None), int)
    )


def layer_parts(module: Any, call: AttentionCall, spec: LayerSpec, is_linear: IsLinear) -> LayerParts | None:
    """The parts of a layer that `may_be_layer` and called attention so; None if one is of no known form or size."""
    own, dtype = module.self_attn._modules, call.q.dtype
    of_heads = {name[0]: own[name] for name in HEAD_NORMS & own.keys()}
    norms = {part: norm_parts(norm, dtype) for part, norm in {**layer_norms(module), **of_heads}.items()}
    known = {part: norm for part, norm in norms.items() if norm is not None}
    mlp = mlp_parts(module.mlp, is_linear, dtype) or mixture_parts(module.mlp)
    if call.kv_index != call.layer_index or known.keys() != norms.keys():
        return None
    projections = (own["q_proj"], own["k_proj"], own["v_proj"], own["o_proj"])
    attends = (call.q.shape[1], call.scaling, call.window, call.softcap, call.sinks)
    found = LayerParts(module, known, projections, mlp, *attends)
    right = {part: spec.k_dim if part in of_heads else found.size for part in known}
    fits = (mlp is None or mlp.sizes == {found.size}) and all(
        known[part].columns == size for part, size in right.items()
    )
    return found if fits else None


def is_changed(module: nn.Module) -> bool:
    """Whether something may see or change what a module computes, or computes it in its place."""
    return any(module.__dict__.get(name) for name in HOOKS)


def holds(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a parameter is nothing but values of this dtype."""
    plain = type(tensor) is nn.Parameter and type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    return plain and tensor.dtype == dtype


def own_result(code: Callable[..., Any], *given: Any) -> Any:
    """What a module's own code gives for some tensors; None if it wants something else."""
    try:
        with torch.inference_mode():
            return code(*given)
    except (TypeError, RuntimeError, ValueError, AttributeError, LookupError):
        return None
