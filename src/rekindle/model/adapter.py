"""The seam to `transformers`: one attention function, registered by name, and one `Cache` facade.

The facade carries the step through the model's forward pass: its `update()` passes K and V to the step and returns its
inputs. It is passed as the cache and as the keyword `rekindle_step`, which reaches the attention function. Attention
finds the layer whose KV it uses by the identity of the tensors it receives: a model that changes K or V after
`update()` is refused, unless `latent` can leave them as they are; one whose later layers share the KV of earlier ones
works.

Nothing is dropped silently: a model is refused for a keyword that is neither implemented nor known to be harmless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from rekindle.errors import ModelRefused
from rekindle.kv.states import StepStates
from rekindle.model.latent import LatentMap

ATTENTION_NAME = "rekindle"
STEP_KEYWORD = "rekindle_step"
HARMLESS = frozenset(
    "position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits return_dict "
    "logits_to_keep position_embeddings".split()
)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """A call by one attention layer: rows q [rows, heads, dim] over the KV of layer `kv_index`.

    `latent`: where K is a latent, V the rotary key, and q is of both (see `spec.LayerSpec`), the map to their values.
    """

    layer_index: int
    kv_index: int
    q: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]
    module: Any
    latent: LatentMap | None = None

    def expanded(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention to K and V gives, the values [rows, heads, v_dim]: of latents [rows, heads, k_dim], mapped."""
        return attended if self.latent is None else self.latent.expand(attended)


class Step(Protocol):
    """One pass through the model: what happens to the K and V of each layer, and how rows attend."""

    @property
    def states(self) -> StepStates | None:
        """The states of recurrent layers, of several sequences; None if the pass is one sequence in one piece."""

    @property
    def recurrent(self) -> States | None:
        """The states of recurrent layers where the pass is one sequence in one piece."""

    def write(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take K and V, both [rows, kv_heads, dim], of one layer."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output of one layer, `expanded`: [rows, heads, v_dim]."""


class States(Protocol):
    """The states of one sequence."""

    def of(self, layer_index: int) -> Any:
        """The state of a layer, as caches of `transformers` keep it."""


class StepCache(Cache):
    """The cache the model sees during one step: it stores nothing itself and passes K and V to the step."""

    def __init__(self, step: Step) -> None:
        super().__init__(layers=[])
        self.step = step
        self.written: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}  # by id(k): layer, k, v (kept alive)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass K and V [1, kv_heads, rows, dim] of one layer to the step; return them unchanged."""
        shapes = key_states.shape, value_states.shape
        if any(len(shape) != 4 or shape[0] != 1 for shape in shapes) or shapes[0][1:3] != shapes[1][1:3]:
            raise ModelRefused(f"layer {layer_idx} caches tensors of shapes {shapes}, not K and V per head")
        self.step.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        self.written[id(key_states)] = (layer_idx, key_states, value_states)
        return key_states, value_states

    def kv_layer(self, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """The layer that wrote exactly these tensors in this step, or None."""
        found = self.written.get(id(key))
        return found[0] if found is not None and found[1] is key and found[2] is value else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are passed to the model, never counted by it."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0, as `get_seq_length` does."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Refuse a model that builds masks itself: it bypasses our attention."""
        raise ModelRefused("the model builds its own attention masks, which our attention would not see")

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state of a convolution in a pass of one sequence; None before its first tokens."""
        layer = self._recurrent(layer_idx)
        return layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent state in a pass of one sequence; None before its first tokens."""
        layer = self._recurrent(layer_idx)
        return layer.recurrent_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """Keep the last inputs of a convolution in a pass of one sequence; return all it needs."""
        return self._recurrent(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Keep a recurrent state in a pass of one sequence."""
        return self._recurrent(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False: models ask this to prepare masks of padded batches, and nothing is padded here."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are never cropped."""
        return False

    def _recurrent(self, layer_idx: int) -> Any:
        if self.step.recurrent is None:
            raise ModelRefused(f"layer {layer_idx} asks for a state elsewhere than in the pass that showed its layers")
        return self.step.recurrent.of(layer_idx)

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a model whose layers choose by an index what they attend to."""
        raise ModelRefused("the model chooses what it attends to by an index, which is not stored yet")


def passed_step(keywords: dict[str, Any]) -> Any:
    """Take what carries this forward out of the keywords of an attention call; ModelRefused if it is not there."""
    found = keywords.pop(STEP_KEYWORD, None)
    if found is None:
        raise ModelRefused("the model does not pass keywords on to its attention, so no step can reach it")
    return found


def rekindle_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend through the step in `kwargs`: query [1, heads, rows, dim] -> [1, rows, heads, v_dim]."""
    cache = passed_step(kwargs)
    if attention_mask is not None:
        raise ModelRefused("the model adds its own mask or bias to attention scores")
    call = read_call(module, query, kwargs, cache.kv_layer(key, value))
    expand = getattr(module, "expand_kv", None)
    if isinstance(expand, LatentMap):
        call = replace(call, q=expand.absorb(query[0]).transpose(0, 1), latent=expand)
    return cache.step.attend(call)[None], None


def read_call(module: Any, query: torch.Tensor, kwargs: dict[str, Any], kv_index: int | None) -> AttentionCall:
    """Check every argument of an attention call; raise ModelRefused for one that would be dropped."""
    layer_index = getattr(module, "layer_idx", None)
    if layer_index is None:
        raise ModelRefused(f"{type(module).__name__} does not say which layer it is")
    if kv_index is None:
        raise ModelRefused(
            f"layer {layer_index} attends to other tensors than it caches; models that cache K and V per head are "
            "served, and those with latent attention (MLA) as DeepSeek V3 has it"
        )
    scaling, window = kwargs.pop("scaling", None), kwargs.pop("sliding_window", None)
    softcap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    if kwargs.pop("dropout", 0.0) or kwargs.pop("is_causal", True) is False:
        raise ModelRefused(f"layer {layer_index} asks for dropout or for attention that is not causal")
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise ModelRefused(f"layer {layer_index} passes {', '.join(unknown)} to attention, which is not implemented")
    return AttentionCall(
        layer_index=int(layer_index),
        kv_index=kv_index,
        q=query[0].transpose(0, 1),
        scaling=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=int(window) if window else None,
        softcap=float(softcap) if softcap else None,
        sinks=sinks,
        module=module,
    )


def register_attention() -> None:
    """Register `attn_implementation="rekindle"` with transformers; call before loading. Safe to repeat."""
    AttentionInterface.register(ATTENTION_NAME, rekindle_attention)


def run_model(
    model: Any,
    step: Step,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logit_rows: torch.Tensor,
    embedded: torch.Tensor | None = None,
) -> torch.Tensor:
    """One packed pass: ids and positions [1, rows] -> logits [len(logit_rows), vocab] of the requested rows.

    `embedded` [1, rows, hidden]: the inputs of the first layer, in place of those of the ids.
    """
    cache = StepCache(step)
    output = model(
        **({"input_ids": input_ids} if embedded is None else {"inputs_embeds": embedded}),
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=logit_rows,
        **{STEP_KEYWORD: cache},
    )
    logits: torch.Tensor = output.logits[0]
    if len(logits) != len(logit_rows):  # a head without `logits_to_keep` returns every row
        logits = logits[logit_rows]
    return logits
