"""One worker of vLLM: its layers' blocks, the codecs of their parts, and its way to the owner of the store.

Reads objects of vLLM by their attributes and imports nothing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rekindle.compute.cpu.kernels import library
from rekindle.parts import STATE
from rekindle.spec import PartLayout
from rekindle_vllm.codec import Codec, PartCodec, alone
from rekindle_vllm.config import EngineLayer, Geometry, total_heads
from rekindle_vllm.packing import BlockShape, LayerValues, learn
from rekindle_vllm.ports import port_to
from rekindle_vllm.settings import BridgeSettings
from rekindle_vllm.shares import HeadShare
from rekindle_vllm.states import StateCodec
from rekindle_vllm.steps import StepPlan
from rekindle_vllm.transfers import Port, Transfers

logger = logging.getLogger("vllm.rekindle")  # below "vllm" its handlers show it
BUFFER_BYTES = 64 << 20  # of payloads that a worker encodes or decodes at a time
DEVICE_BUFFER_BYTES = 256 << 20  # on a device, where each piece costs launches, and more of it are read at once


class EngineWorker:
    """The heads of one worker."""

    def __init__(self, vllm_config: Any, settings: BridgeSettings, geometry: Geometry) -> None:
        parallel = vllm_config.parallel_config
        workers = parallel.tensor_parallel_size
        self._share = HeadShare.of(total_heads(vllm_config), parallel.rank % workers, workers)
        self._layers = vllm_config.compilation_config.static_forward_context
        self._geometry, self._settings = geometry, settings
        self._port: Port | None = None
        self.transfers: Transfers

    def close(self) -> None:
        """End the connection to the owner of the store."""
        if self._port is not None:
            self._port.close()

    def register(self, kv_caches: Mapping[str, Any], num_blocks: int) -> None:
        """Learn the packing of each layer, and make the buffers of each part."""
        with torch.inference_mode():
            codecs = [self._codec(part, kv_caches, num_blocks) for part in self._geometry.layout.parts]
        self.transfers = Transfers(codecs, self._settings.patience_ms / 1000)

    def _codec(self, part: PartLayout, kv_caches: Mapping[str, Any], num_blocks: int) -> PartCodec:
        geometry, layout = self._geometry, self._share.layout(self._geometry.layout)
        layers = geometry.of_part(part.index)
        columns = [geometry.groups.columns(layer.group) for layer in layers]
        device = kv_caches[layers[0].name].device
        buffer_bytes = BUFFER_BYTES if device.type == "cpu" else DEVICE_BUFFER_BYTES
        num_records = max(2, min(256, buffer_bytes // layout.parts[part.index].payload_bytes))
        if part.kind == STATE:
            tensors = [self._layers[layer.name].kv_cache for layer in layers]  # of which vLLM gives us bytes alone
            return StateCodec(layout, tensors, columns, num_records=num_records, device=device)
        values = [self._learn(layer, kv_caches[layer.name], num_blocks) for layer in layers]
        strided = all(each.k.is_strided and each.v.is_strided for each in values)
        form = "in strides" if strided else "in an order of their own (slower)"
        logger.info("blocks of the part %s hold keys and values %s", part.kind.name, form)
        return Codec(
            alone(layout, layout.parts[part.index]),
            values,
            columns,
            num_records=num_records,
            dtype=geometry.dtype,
            device=device,
            kernels=library.load("auto").library if device.type == "cpu" else None,
        )

    def load(self, plan: StepPlan) -> None:
        """Read the records of a step into its blocks."""
        if plan.loads:
            with torch.inference_mode():
                self.transfers.load(plan, self._way(plan))

    def save(self, plan: StepPlan) -> None:
        """Hand over the records of a step."""
        if plan.saves:
            with torch.inference_mode():
                self.transfers.save(plan, self._way(plan))

    def _way(self, plan: StepPlan) -> Port:
        """The way to the owner of the store, whose process there may not be when workers are made."""
        if self._port is None:
            self._port = port_to(plan.owner, self._share)
        return self._port

    def _learn(self, layer: EngineLayer, cache: Tensor, num_blocks: int) -> LayerValues:
        """Ask a layer's own operator; the first block is vLLM's null block, which no request has."""
        module, spec, groups = self._layers[layer.name], layer.spec, self._geometry.groups
        tokens = groups.block_tokens(layer.group)

        def write(k: Tensor, v: Tensor, block: int) -> None:
            slots = torch.arange(block * tokens, (block + 1) * tokens, device=cache.device)
            module.impl.do_kv_cache_update(module, k, v, cache, slots)

        grouped = cache if len(cache) == num_blocks else cache.unflatten(0, (num_blocks, -1))
        shape = BlockShape(tokens, spec.num_kv_heads, spec.head_size, spec.head_size_v)
        return learn(grouped, shape, write, pieces=groups.pieces_per_block(layer.group))
