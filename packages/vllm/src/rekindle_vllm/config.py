"""What vLLM's configs say of an engine: the geometry of its KV, what computes it, and what cannot be stored.

Reads objects of vLLM by their attributes and imports nothing of it. All heads are those of all workers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.errors import ModelRefused
from rekindle.parts import STATE, Part, WindowPart, attention_part
from rekindle.spec import KVLayout
from rekindle_vllm.groups import Group, Groups
from rekindle_vllm.names import Computation, HeadShape, StateShape, record_layout
from rekindle_vllm.refusals import EngineFacts
from rekindle_vllm.settings import BridgeSettings

GROUP_KINDS = {"FullAttentionSpec": "full", "SlidingWindowSpec": "window", "MambaSpec": "state"}


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """A layer of the engine: its name, what its KV or its state is, and the number of its KV cache group."""

    name: str
    spec: Any
    group: int

    @property
    def kind(self) -> Part:
        """What the engine keeps of it."""
        kind = kind_of(self.spec)
        return STATE if kind == "state" else attention_part(int(self.spec.sliding_window) if kind == "window" else None)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layers of the engine in order, its KV cache groups, and the layout of records of all heads."""

    layers: tuple[EngineLayer, ...]
    groups: Groups
    dtype: torch.dtype
    layout: KVLayout

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, settings: BridgeSettings) -> Geometry:
        """What vLLM's two configs say; ModelRefused where layers differ in what records cannot have."""
        layers = layers_of(kv_cache_config)
        attending = [layer.spec for layer in layers if layer.kind != STATE]
        dtypes = {spec.dtype for spec in attending}
        if len(dtypes) != 1:
            raise ModelRefused(f"layers keep KV in {dtypes}, and may not differ in this")
        dtype = dtypes.pop()
        sizes = [_block_tokens(layers, number) for number in range(len(kv_cache_config.kv_cache_groups))]
        kinds = [next(layer.kind for layer in layers if layer.group == number) for number in range(len(sizes))]
        each = list(zip(sizes, kinds, strict=True))
        record_tokens = settings.record_tokens(
            [size for size, kind in each if kind != STATE],
            [size for size, kind in each if kind == STATE],
            [(size, kind.window) for size, kind in each if isinstance(kind, WindowPart)],
        )
        shapes = [_shape(layer, vllm_config) for layer in layers]
        layout = record_layout(shapes, dtype, settings.format, record_tokens)
        parts = {part.kind: part.index for part in layout.parts}
        groups = [Group(parts[kind], size, kind) for size, kind in each]
        return cls(layers, Groups(groups, record_tokens), dtype, layout)

    def of_part(self, part: int) -> list[EngineLayer]:
        """The layers whose KV or states a part of a record holds, in the layout's order."""
        return [layer for layer in self.layers if layer.kind == self.layout.parts[part].kind]


def _shape(layer: EngineLayer, vllm_config: Any) -> HeadShape | StateShape:
    spec, workers = layer.spec, vllm_config.parallel_config.tensor_parallel_size
    if layer.kind == STATE:
        return StateShape(tuple(zip((tuple(shape) for shape in spec.shapes), spec.dtypes, strict=True)))
    total = int(spec.num_kv_heads) if workers == 1 else total_heads(vllm_config)
    if spec.num_kv_heads != max(1, total // workers):
        raise ModelRefused(
            f"layer {layer.name} has other K/V heads than the model says, which several workers cannot share here: set "
            "--tensor-parallel-size 1"
        )
    return HeadShape(
        total, spec.head_size, spec.head_size_v, layer.kind.window if isinstance(layer.kind, WindowPart) else None
    )


def _block_tokens(layers: Sequence[EngineLayer], group: int) -> int:
    sizes = {int(layer.spec.block_size) for layer in layers if layer.group == group}
    kinds = {layer.kind.name for layer in layers if layer.group == group}
    if len(sizes) != 1 or len(kinds) != 1:
        raise ModelRefused(f"layers of one KV cache group have blocks of {sizes} tokens and parts {kinds}")
    return sizes.pop()


def facts(vllm_config: Any, kv_cache_config: Any, settings: BridgeSettings) -> EngineFacts:
    """The settings of vLLM that decide whether its KV can be stored."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    speculation = vllm_config.speculative_config
    return EngineFacts(
        groups=[kind_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups],
        kv_role=str(transfer.kv_role),
        load_failure_policy=transfer.kv_load_failure_policy,
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
        data_parallel=parallel.data_parallel_size,
        has_own_directory="{dp_rank}" in settings.dir,
        drafts=None if speculation is None else str(speculation.method),
        load_format=str(vllm_config.load_config.load_format),
        tensor_parallel=parallel.tensor_parallel_size,
        keeps_states=str(vllm_config.cache_config.mamba_cache_mode) == "align",
    )


def kind_of(spec: Any) -> str:
    """What a KV cache group is: full attention that is kept, a window or a recurrent state, else in vLLM's words."""
    if hasattr(spec, "kv_cache_specs"):
        kinds = {kind_of(one) for one in spec.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else " and ".join(sorted(kinds))
    name = type(spec).__name__
    if name == "FullAttentionSpec" and spec.sliding_window is not None:
        return f"window of {spec.sliding_window} tokens among full attention"
    if name == "FullAttentionSpec" and spec.attention_chunk_size is not None:
        return f"chunks of {spec.attention_chunk_size} tokens"
    return GROUP_KINDS.get(name, name.removesuffix("Spec"))


def layers_of(kv_cache_config: Any) -> tuple[EngineLayer, ...]:
    """The layers of all groups, in the order of the numbers in their names."""
    found = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        each = spec.kv_cache_specs if hasattr(spec, "kv_cache_specs") else dict.fromkeys(group.layer_names, spec)
        found += [EngineLayer(name, own, number) for name, own in each.items()]
    return tuple(sorted(found, key=lambda layer: _numbered(layer.name)))


def _numbered(name: str) -> list[tuple[bool, int, str]]:
    """A layer's name with its numbers as numbers."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def total_heads(vllm_config: Any) -> int:
    """K/V heads of a layer over all tensor-parallel workers."""
    return int(vllm_config.model_config.get_total_num_kv_heads())


def computation(model: Any) -> Computation:
    """What vLLM computes with, as its model config says; ModelRefused if that has no name."""
    if callable(model.hf_overrides):
        raise ModelRefused("hf_overrides is a function, so that what computes KV has no name: give a dictionary")
    overrides = {**(model.hf_overrides or {})}
    if model.hf_config_path is not None:
        overrides["hf_config_path"] = str(model.hf_config_path)
    return Computation("vllm", model.dtype, model.max_model_len, model.quantization, overrides)
