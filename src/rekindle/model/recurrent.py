"""Recurrent layers: modules that keep a state of all tokens before, such as short convolutions and Gated DeltaNet.

Owns how their code of `transformers` runs on packed sequences. Such a module takes all rows of a pass for one sequence,
so its `forward` is called once for each segment of rows that goes on from one state, and once for all single rows of
decoding sequences, as a batch. It is found by what it does in the probe pass, never by its model's name: it is the
innermost module with a layer index that asks the cache for a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from rekindle.errors import ModelRefused
from rekindle.model.adapter import STEP_KEYWORD, StepCache
from rekindle.spec import Format, StateKind, StateSpec, StateTensor

MOST_STATES = 8  # of one kind in a layer
# How far a row may be from that of one piece, as a share of it. In bf16, rows after a block are equal and single rows
# differ by up to 0.02; without the state before them they differ by more than half.
MOST_DIFFERENCE = 0.1
FORMATS: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
KINDS: tuple[StateKind, ...] = ("conv", "recurrent")


@dataclass(slots=True)
class RecurrentLayers:
    """States of one sequence that is run in one piece, by layer: what a cache of `transformers` would keep."""

    layers: dict[int, LinearAttentionLayer] = field(default_factory=dict)

    def of(self, layer_index: int) -> LinearAttentionLayer:
        """The state of a layer, nothing at first."""
        return self.layers.setdefault(layer_index, LinearAttentionLayer(number_of_states=MOST_STATES))


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A module that runs, and what it was called with."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Recurrent:
    """A recurrent module of a model as it was called, the state that it keeps, and its own `forward`."""

    call: Call
    state: StateSpec
    own: Callable[..., Any]

    @property
    def module(self) -> Any:
        """The module."""
        return self.call.module

    def check(self, block_tokens: int) -> None:
        """Refuse a module that does not go on from its state as it would in one piece: at the end of a block, with many
        rows and with one."""
        hidden, args, kwargs = _hidden_states(self.call.args, self.call.kwargs)
        generator = torch.Generator().manual_seed(0)
        shape = (1, 2 * block_tokens + 1, hidden.shape[-1])
        rows = torch.randn(shape, generator=generator).to(hidden)

        def run(chosen: torch.Tensor, cache: _StateCache) -> torch.Tensor:
            own_args, own_kwargs = _with_cache(cache, args, kwargs)
            result: torch.Tensor = self.own(chosen, *own_args, **own_kwargs)
            return result

        with torch.inference_mode():
            whole, pieces = run(rows, _StateCache(self.state, None)), []
            cache = _StateCache(self.state, None)
            for piece in rows.split((block_tokens, block_tokens, 1), dim=1):
                pieces.append(run(piece, cache))
                cache = _StateCache(self.state, cache.tensors())
        difference = (torch.cat(pieces, dim=1) - whole).float().norm(dim=-1) / whole.float().norm(dim=-1)
        if not float(difference.max()) <= MOST_DIFFERENCE:
            raise ModelRefused(
                f"{type(self.module).__name__} does not go on from its state: after the end of a block its rows differ "
                f"by {float(difference.max()):.2g} of their size from those of one piece, so a prompt could not be "
                "resumed"
            )


class ObservedStates(RecurrentLayers):
    """As `RecurrentLayers`; notes which module was running when a layer's state was first asked for."""

    def __init__(self, running: list[Call]) -> None:
        super().__init__()
        self._running = running
        self.calls: dict[int, Call] = {}

    def of(self, layer_index: int) -> LinearAttentionLayer:
        """As in `RecurrentLayers`."""
        own = [call for call in self._running if call.module.layer_idx == layer_index]
        if not own:
            raise ModelRefused(f"layer {layer_index} keeps a state outside any module that says which layer it is")
        if self.calls.setdefault(layer_index, own[-1]) is not own[-1]:
            raise ModelRefused(f"layer {layer_index} keeps states in two modules, or runs twice in a pass")
        return RecurrentLayers.of(self, layer_index)

    def found(self) -> tuple[Recurrent, ...]:
        """The recurrent modules, in the order of their layers."""
        return tuple(
            Recurrent(
                self.calls[index],
                StateSpec(index, tuple(_tensors(index, self.layers[index]))),
                self.calls[index].module.forward,
            )
            for index in sorted(self.calls)
        )


def _tensors(layer_index: int, layer: LinearAttentionLayer) -> Iterator[StateTensor]:
    """Describe what a layer keeps after a pass of one sequence."""
    for kind in KINDS:
        for number, tensor in _states(layer, kind).items():
            if tensor is None:
                continue
            if tensor.dtype not in FORMATS or tensor.shape[0] != 1:
                raise ModelRefused(f"layer {layer_index} keeps a state of {tensor.dtype} {tuple(tensor.shape)}")
            yield StateTensor(kind, number, tuple(tensor.shape[1:]), FORMATS[tensor.dtype])


def _states(layer: LinearAttentionLayer, kind: StateKind) -> dict[int, torch.Tensor | None]:
    states: dict[int, torch.Tensor | None] = layer.conv_states if kind == "conv" else layer.recurrent_states
    return states


@contextmanager
def observed_states(model: Any) -> Iterator[ObservedStates]:
    """Observe which modules of a model keep states, for one pass."""
    running: list[Call] = []
    handles = []

    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(Call(module, args, kwargs))

    def end(*_: Any) -> None:
        running.pop()

    for module in model.modules():
        if hasattr(module, "layer_idx"):
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(end))
    try:
        yield ObservedStates(running)
    finally:
        for handle in handles:
            handle.remove()


def split_sequences(found: tuple[Recurrent, ...], block_tokens: int) -> None:
    """Let these modules run each sequence of a packed pass from its own state.

    Those that compute in chunks longer than a block take chunks of a block, so that bits do not depend on the block at
    which a prompt goes on (Mamba 2; those of Gated DeltaNet have 64 tokens).
    """
    for each in found:
        if getattr(each.module, "chunk_size", 0) > block_tokens:
            each.module.chunk_size = block_tokens
        each.module.forward = SplitForward(each.own, each.state)


def check_that_they_go_on(found: tuple[Recurrent, ...], block_tokens: int) -> None:
    """Check one module of each class (see `Recurrent.check`)."""
    for each in {type(each.module): each for each in found}.values():
        each.check(block_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class SplitForward:
    """A recurrent module's `forward` for packed sequences; `own` is the module's own code for one."""

    own: Callable[..., Any]
    state: StateSpec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's `forward`: hidden states [1, rows, size] -> the same."""
        caches = [each for each in (*args, *kwargs.values()) if isinstance(each, StepCache)]
        states = caches[0].step.states if caches else None
        if states is None:
            return self.own(*args, **kwargs)
        hidden, args, kwargs = _hidden_states(args, kwargs)
        out = hidden.new_zeros(hidden.shape)
        for group in states.plan.groups:
            rows, count = group.rows, len(group.segments)
            cache = _StateCache(self.state, states.load(self.state.index, group) if group.continues else None)
            own_args, own_kwargs = _with_cache(cache, args, kwargs)
            chosen = hidden[0, rows].unflatten(0, (count, -1))
            result = self.own(chosen, *own_args, **own_kwargs)
            if not isinstance(result, torch.Tensor) or result.shape != chosen.shape:
                raise ModelRefused(f"layer {self.state.index} is recurrent and does not give one tensor of its rows")
            out[0, rows] = result.flatten(0, 1)
            states.keep(self.state.index, group, cache.tensors())
        return out


def _hidden_states(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """Take the hidden states out of a call; ModelRefused if it has other tensors, which would belong to all rows."""
    rest = {name: value for name, value in kwargs.items() if name != STEP_KEYWORD}
    hidden, *others = (rest.pop("hidden_states"), *args) if "hidden_states" in rest else args
    extra = [name for name, value in rest.items() if isinstance(value, torch.Tensor)]
    if extra or any(isinstance(value, torch.Tensor) for value in others):
        raise ModelRefused(f"a recurrent layer takes more than its hidden states: {', '.join(extra) or 'a tensor'}")
    return hidden, tuple(others), rest


def _with_cache(
    cache: Cache, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another cache."""
    return (
        tuple(cache if isinstance(each, StepCache) else each for each in args),
        {name: cache if isinstance(each, StepCache) else each for name, each in kwargs.items()},
    )


class _StateCache(Cache):
    """What a recurrent module sees as its cache while it runs one group of segments; `before`: the states to go on
    from, one for each tensor of `state`."""

    def __init__(self, state: StateSpec, before: tuple[torch.Tensor, ...] | None) -> None:
        self._state = state
        self._layer = LinearAttentionLayer(number_of_states=1 + max(tensor.number for tensor in state.tensors))
        super().__init__(layers=[self._layer] * (state.index + 1))
        for tensor, value in zip(state.tensors, before or (), strict=before is not None):
            _states(self._layer, tensor.kind)[tensor.number] = value
            self._layer.has_previous_state[tensor.number] = True
            if tensor.kind == "conv":
                self._layer.conv_kernel_size[tensor.number] = value.shape[-1]
                self._layer.is_conv_states_initialized[tensor.number] = True
            else:
                self._layer.is_recurrent_states_initialized[tensor.number] = True

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The state after the call, one for each tensor of the state."""
        found = [_states(self._layer, tensor.kind)[tensor.number] for tensor in self._state.tensors]
        if any(tensor is None for tensor in found):
            raise ModelRefused(f"layer {self._state.index} does not keep its whole state in every pass")
        return tuple(tensor for tensor in found if tensor is not None)
