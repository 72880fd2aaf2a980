"""What vLLM's configs say of an engine: the geometry of its KV, what computes it, and what cannot be stored.

Reads objects of vLLM by their attributes and imports nothing of it. All heads are those of all workers together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rekindle.bridge.names import Computation, HeadShape, record_layout
from rekindle.bridge.refusals import EngineFacts
from rekindle.bridge.settings import BridgeSettings
from rekindle.errors import ModelRefused
from rekindle.spec import KVLayout


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layers of the engine in order, by name, and the layout of records of all their heads."""

    specs: dict[str, Any]
    block_tokens: int
    dtype: torch.dtype
    layout: KVLayout

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, settings: BridgeSettings) -> Geometry:
        """What vLLM's two configs say; ModelRefused where layers differ in what records cannot have."""
        specs = specs_of(kv_cache_config)
        workers, total = vllm_config.parallel_config.tensor_parallel_size, total_heads(vllm_config)
        shapes = []
        for name, spec in specs.items():
            if spec.num_kv_heads != max(1, total // workers):
                raise ModelRefused(f"layer {name} has other K/V heads than the model says: it cannot be stored")
            shapes.append(HeadShape(total, spec.head_size, spec.head_size_v))
        sizes, dtypes = {spec.block_size for spec in specs.values()}, {spec.dtype for spec in specs.values()}
        if len(sizes) != 1 or len(dtypes) != 1:
            raise ModelRefused(
                f"layers keep KV in blocks of {sizes} tokens and in {dtypes}, and may not differ in these"
            )
        block_tokens, dtype = sizes.pop(), dtypes.pop()
        layout = record_layout(shapes, dtype, settings.format, settings.record_tokens(block_tokens))
        return cls(specs, block_tokens, dtype, layout)


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
    )


def kind_of(spec: Any) -> str:
    """What a KV cache group is: "full" for full attention that is kept, else in vLLM's words."""
    if hasattr(spec, "kv_cache_specs"):
        kinds = {kind_of(one) for one in spec.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else " and ".join(sorted(kinds))
    name = type(spec).__name__
    if name != "FullAttentionSpec":
        return name.removesuffix("Spec")
    if spec.sliding_window is not None:
        return f"window of {spec.sliding_window} tokens"
    return "full" if spec.attention_chunk_size is None else f"chunks of {spec.attention_chunk_size} tokens"


def specs_of(kv_cache_config: Any) -> dict[str, Any]:
    """Layer name -> what its KV is, in the order of the layers."""
    found: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        each = spec.kv_cache_specs if hasattr(spec, "kv_cache_specs") else dict.fromkeys(group.layer_names, spec)
        found |= each
    return dict(sorted(found.items(), key=lambda item: _numbered(item[0])))


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
