"""What KV of another engine is called: the fingerprint of its model and the roots of its chains, without any weights.

Owns what has to agree before an engine may reuse stored KV. A name covers what computes K and V and the canonical
layout of the heads of all workers together, never how one engine packs or divides them: engines with other
tensor-parallel sizes share records, and none reads a worker's part as a whole one. Our own engine's names differ.
Reads the small files of a model, and its weight files once for their digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rekindle.cache.blocks.hashing import BlockHash, root_hash
from rekindle.errors import ModelRefused
from rekindle.model.checkpoint import adapter_files, weight_files
from rekindle.model.fingerprint import CHANGING_ROPE, DigestCache, fingerprint, model_identity, model_inputs
from rekindle.spec import Format, KVLayout, LayerSpec, StateSpec, StateTensor

RecordFormat = Literal["native", "q4h"]
NATIVE: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class HeadShape:
    """One attention layer: its K/V heads over all tensor-parallel workers, their sizes, and the window, if any."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class StateShape:
    """One recurrent layer: the shape and the dtype of each tensor of its state."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]


def record_layout(
    layers: Sequence[HeadShape | StateShape], dtype: torch.dtype, record_format: RecordFormat, block_tokens: int
) -> KVLayout:
    """The layout of records of `block_tokens` tokens; ModelRefused where the format does not fit the model.

    States are kept as they are in any format.
    """
    chosen: Format = _native(dtype) if record_format == "native" else "q4h"
    try:
        specs = [
            LayerSpec(index, layer.num_kv_heads, layer.k_dim, layer.v_dim, layer.window, chosen, chosen)
            for index, layer in enumerate(layers)
            if isinstance(layer, HeadShape)
        ]
        states = [_state(index, layer) for index, layer in enumerate(layers) if isinstance(layer, StateShape)]
        return KVLayout(block_tokens, tuple(specs), tuple(states))
    except ValueError as error:
        raise ModelRefused(f"{error}; format native fits every head size" if chosen == "q4h" else str(error)) from error


def _state(index: int, layer: StateShape) -> StateSpec:
    tensors = enumerate(layer.tensors)
    return StateSpec(
        index, tuple(StateTensor("recurrent", number, shape, _native(dtype)) for number, (shape, dtype) in tensors)
    )


def _native(dtype: torch.dtype) -> Format:
    if dtype not in NATIVE:
        raise ModelRefused(f"KV in {dtype} has no format here: let the engine keep KV in bf16, fp16 or fp32")
    return NATIVE[dtype]


@dataclass(frozen=True, slots=True)
class Computation:
    """What another engine computes K and V with, in addition to the files of the model.

    `quantization` is its own name of how weights are kept, `overrides` are changes of config.json, and `max_context`
    matters to RoPE that changes with the length alone.
    """

    engine: str
    dtype: torch.dtype
    max_context: int
    quantization: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)


def model_fingerprint(directory: Path, computed: Computation, layout: KVLayout, digests: DigestCache) -> bytes:
    """32 bytes that identify a model directory, what computes with it, and how its KV is stored.

    ModelRefused if config.json or weights are missing. Costs the reading of new weight files, about 2 GB/s.
    """
    config = _config(directory) | dict(computed.overrides)
    files = [*weight_files(directory), *adapter_files(directory)]
    rope = sorted(set(_rope_kinds(config)))
    changes = CHANGING_ROPE.intersection(rope)
    inputs = model_inputs(
        weights=[digests.digest(file) for file in files],
        config=_ConfigFile(config),
        dtype=computed.dtype,
        rope=",".join(rope) + (f" within {computed.max_context}" if changes else ""),
        tokenizer="",  # chains are named by token ids
        weight_format=f"{computed.engine} {computed.quantization or 'native'}",
    )
    return fingerprint(model_identity(inputs), layout)


def adapter_digest(directory: Path, digests: DigestCache) -> str:
    """What identifies an adapter (LoRA) by its files, whatever it is called; ModelRefused if it has none here."""
    files = adapter_files(directory)
    if not files:
        raise ModelRefused(f"{directory} has no files of an adapter (adapter_config.json and its weights)")
    return json.dumps(sorted((file.name, digests.digest(file)) for file in files))


@dataclass(frozen=True, slots=True)
class Scope:
    """Who may share KV: requests of one namespace, with one salt and one adapter (by its digest), if any."""

    namespace: str
    cache_salt: str | None = None
    adapter: str | None = None

    def root(self, fingerprint: bytes, secret: bytes) -> BlockHash:
        """The parent of the first blocks; without salt and adapter that of the namespace."""
        plain = self.cache_salt is None and self.adapter is None
        salt = "" if plain else json.dumps([self.cache_salt, self.adapter])
        return root_hash(fingerprint=fingerprint, namespace=self.namespace, cache_salt=salt, secret=secret)


@dataclass(frozen=True, slots=True)
class _ConfigFile:
    """A config as `model_identity` takes it."""

    values: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.values


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be read, so KV of this model has no name: {error}") from error
    if not isinstance(found, dict):
        raise ModelRefused(f"{path} is not an object, so KV of this model has no name")
    return found


def _rope_kinds(value: Any, *, in_rope: bool = False) -> list[str]:
    """The types of RoPE anywhere in a config, in the old words and the new ones."""
    if not isinstance(value, dict):
        return []
    kinds = [str(kind) for key in ("rope_type", "type") if in_rope and (kind := value.get(key))]
    for key, item in value.items():
        kinds += _rope_kinds(item, in_rope=in_rope or key in ("rope_parameters", "rope_scaling"))
    return kinds
