"""The KV geometry of a loaded model, found by observing one forward pass instead of by names.

A probe pass records every `update` and every attention call. Names in the config are used only to refuse what a short
pass cannot show: windows that are not passed to attention, chunked layers, RoPE that changes with the length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.errors import ConfigError, ModelRefused
from rekindle.model.adapter import AttentionCall, run_model
from rekindle.model.fingerprint import CHANGING_ROPE
from rekindle.model.recurrent import ObservedStates, Recurrent, observed_states
from rekindle.model.refusals import WITHOUT_ATTENTION, text_config
from rekindle.spec import StateSpec

LONG_FACTORS = "longrope with its long factors"
K_NAMES = re.compile(r"(^|_)(k|kv|qkv)(_|\d|$)|key|qkv|c_attn", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer that caches KV. `window` None: full attention; `k_bias`: its K projection adds a bias; `latent`: K is a
    latent, V its rotary key."""

    index: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    has_sinks: bool
    k_bias: bool
    latent: bool = False


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV layers in order, the dtype of K and V, the width of the logits, and the recurrent layers."""

    layers: tuple[LayerGeometry, ...]
    dtype: torch.dtype
    vocab_size: int
    recurrent: tuple[Recurrent, ...] = ()

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """What the recurrent layers keep."""
        return tuple(each.state for each in self.recurrent)


class ProbeStep:
    """Records shapes and arguments; returns zeros for every attention call."""

    states = None

    def __init__(self, recurrent: ObservedStates) -> None:
        self.recurrent = recurrent
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.calls: list[AttentionCall] = []
        self.dtypes: set[torch.dtype] = set()

    def write(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Record (heads, k_dim, v_dim) of the layer."""
        if layer_index in self.shapes:
            raise ModelRefused(f"layer {layer_index} caches KV twice in one pass")
        self.shapes[layer_index] = (k.shape[1], k.shape[2], v.shape[2])
        self.dtypes |= {k.dtype, v.dtype}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Record the call; return zeros of the right shape."""
        self.calls.append(call)
        rows, heads, _ = call.q.shape
        _, k_dim, v_dim = self.shapes[call.kv_index]
        return call.expanded(call.q.new_zeros(rows, heads, k_dim if call.latent else v_dim))


def probe(model: Any) -> Geometry:
    """Run four tokens through the model and read off its KV layers; ModelRefused if they cannot be served."""
    rows = torch.arange(4, device=model.device)
    with torch.inference_mode(), observed_states(model) as recurrent:
        step = ProbeStep(recurrent)
        logits = run_model(model, step, rows[None], rows[None], rows)
    if not step.calls or not step.shapes:
        raise ModelRefused(f"{type(model).__name__} does not call attention through the interface of transformers")
    if len(step.dtypes) != 1:
        raise ModelRefused(f"K and V come in several dtypes: {sorted(map(str, step.dtypes))}")
    _check_every_layer(model, step)
    layers = tuple(_layer(step, index) for index in sorted(step.shapes))
    _check_windows(model.config, step)
    return Geometry(layers, step.dtypes.pop(), int(logits.shape[-1]), recurrent.found())


def _check_every_layer(model: Any, step: ProbeStep) -> None:
    """Refuse a model unless every layer that the config counts has attended or kept a state, or need do neither."""
    text = text_config(model.config)
    kinds = getattr(text, "layer_types", None) or ()
    neither = {index for index, kind in enumerate(kinds) if kind in WITHOUT_ATTENTION}
    seen = {call.layer_index for call in step.calls} | step.recurrent.calls.keys()
    missing = sorted(set(range(int(text.num_hidden_layers))) - seen - neither)
    if missing:
        raise ModelRefused(
            f"layers {missing[:4]} of {type(model).__name__} neither attend through a KV cache nor keep a state in it"
        )


def _layer(step: ProbeStep, index: int) -> LayerGeometry:
    """Describe one KV layer; everything that attends to its KV must agree on the window."""
    calls = [call for call in step.calls if call.kv_index == index]
    windows, latent = {call.window for call in calls}, any(call.latent is not None for call in calls)
    if len(windows) != 1:
        raise ModelRefused(f"the KV of layer {index} is attended to with windows {sorted(map(str, windows))}")
    heads, k_dim, v_dim = step.shapes[index]
    q_dim = k_dim + v_dim if latent else k_dim
    if any(call.q.shape[-1] != q_dim or call.q.shape[1] % heads for call in calls):
        raise ModelRefused(f"layer {index}: queries of shape {tuple(calls[0].q.shape)} do not fit its {heads} KV heads")
    owner = next((call for call in calls if call.layer_index == index), calls[0])
    return LayerGeometry(
        index=index,
        num_kv_heads=heads,
        k_dim=k_dim,
        v_dim=v_dim,
        window=windows.pop(),
        has_sinks=any(call.sinks is not None for call in calls),
        # A norm follows the projection of latents, so a bias of that is not in them.
        k_bias=not latent and has_k_bias(owner.module, heads, k_dim, v_dim, owner.q.shape[1]),
        latent=latent,
    )


def has_k_bias(attention: Any, num_kv_heads: int, k_dim: int, v_dim: int, num_heads: int) -> bool:
    """Whether a K projection inside `attention` adds a bias; found by name, or by output size if no name matches."""
    k_size, v_size = num_kv_heads * k_dim, num_kv_heads * v_dim
    sizes = {k_size, k_size + v_size, num_heads * k_dim + k_size + v_size}
    projections = list(_biases(attention))
    named = [bias for name, bias in projections if K_NAMES.search(name)]
    if named:
        return any(bias is not None for bias in named)
    return any(bias is not None and bias.shape[-1] in sizes for _, bias in projections)


def _biases(attention: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Child projections by name with their bias; norms (weights of one dimension, no bias) are not projections."""
    for name, child in attention.named_modules():
        if name and hasattr(child, "bias") and "norm" not in type(child).__name__.lower():
            bias = child.bias
            yield name.rsplit(".", 1)[-1], bias if isinstance(bias, torch.Tensor) else None


def _check_windows(config: Any, step: ProbeStep) -> None:
    """Refuse a model unless the layers that the config calls sliding, and only these, pass a window to attention."""
    kinds = getattr(text_config(config), "layer_types", None)
    if not kinds:
        return
    for call in step.calls:
        kind = kinds[call.layer_index]
        if (kind == "sliding_attention") != (call.window is not None):
            raise ModelRefused(f"layer {call.layer_index} is {kind} but asks attention for window {call.window}")


def rope_regime(config: Any, max_context: int | None) -> tuple[str, int]:
    """Fix the RoPE of a config that no model was built from yet; return the types in use and the longest context.

    `longrope` and `dynamic` change with the length of the prompt, so K cached at one length is wrong at another. Of
    `longrope` one set of factors is taken for all lengths: the long ones, or the short ones if `max_context` is within
    the length that those are for. `dynamic` is served only within the context below which it does not change, and only
    if `max_context` is set to fit it. ConfigError if `max_context` is more than the model has.
    """
    text = text_config(config)
    longest = int(getattr(text, "max_position_embeddings", None) or 0)
    if longest <= 0:
        raise ModelRefused("config.json has no max_position_embeddings, so the longest context is not known")
    kinds = []
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        kind = str(rope.get("rope_type", "default"))
        kinds.append(kind)
        if kind in CHANGING_ROPE and not _is_steady(rope):
            steady = int(rope.get("original_max_position_embeddings") or longest)
            if (max_context is None or max_context > steady) and kind == "longrope" and "long_factor" in rope:
                rope["short_factor"] = rope["long_factor"]
                kinds[-1] = LONG_FACTORS
                continue
            if max_context is None or max_context > steady:
                raise ModelRefused(
                    f"RoPE of type {kind} changes with the length of the prompt, so cached K would be wrong at another "
                    f"length; max_context={steady} serves the model where it does not change"
                )
            longest = min(longest, steady)
    if max_context is not None and max_context > longest:
        raise ConfigError(f"max_context={max_context} is more than the {longest} tokens that the model was made for")
    return ",".join(sorted(set(kinds))) or "none", max_context or longest


def _is_steady(rope: dict[str, Any]) -> bool:
    """Whether short and long prompts have the same factors."""
    return "long_factor" in rope and rope["long_factor"] == rope.get("short_factor")


def rope_notes(rope: str) -> list[str]:
    """What is to be said of the RoPE types of `rope_regime`."""
    if LONG_FACTORS not in rope:
        return []
    return ["RoPE has its long factors for prompts of every length; max_context within its short ones takes those"]


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """The RoPE settings, one or one per layer type."""
    if isinstance(parameters, dict) and parameters:
        nested = [value for value in parameters.values() if isinstance(value, dict) and "rope_theta" in value]
        yield from nested or [parameters]
