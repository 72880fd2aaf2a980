"""The CPU by our kernels, where there are any, and by torch; torch alone also computes on its other devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rekindle.cache.blocks.windows import WindowSlots
from rekindle.compute.cpu.decoder import DecoderKernels
from rekindle.compute.cpu.fused_attention import FusedAttention
from rekindle.compute.cpu.kernels import thread_pool
from rekindle.compute.cpu.kernels.decoder import DecoderKernel
from rekindle.compute.cpu.kernels.experts import ExpertsKernel
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.cpu.memory import memory_of
from rekindle.compute.cpu.mixtures import fuse_experts
from rekindle.compute.cpu.packer import KernelPacker, Packer
from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.model.device import Memory
from rekindle.model.fused_layers import fuse_layers
from rekindle.model.loaded import BY_TORCH, LoadedModel
from rekindle.model.runner import ModelRunner
from rekindle.spec import KVLayout


class TorchCompute:
    """What computes, as `Compute`, with torch's tensors for hot memory and a model's own modules around attention."""

    __slots__ = ()

    @property
    def computes_ahead(self) -> bool:
        """As `Compute.computes_ahead`: the host is what computes."""
        return False

    def memory(self, device: str) -> Memory:
        """As `Compute.memory`."""
        return memory_of(device)

    def arena(
        self, layout: KVLayout, num_blocks: int, device: torch.device | str, windows: Sequence[WindowSlots] = ()
    ) -> KVArena:
        """As `Compute.arena`."""
        return KVArena(layout, num_blocks, device, windows)

    def runner(self, loaded: LoadedModel, arena: KVArena) -> ModelRunner:
        """As `Compute.runner`."""
        return ModelRunner(loaded, arena)


@dataclass(frozen=True, slots=True)
class KernelCompute(TorchCompute):
    """The kernels of one library, and torch for what they do not know: for everything without a library."""

    library: KernelLibrary | None

    @property
    def level(self) -> str:
        """That of the library."""
        return BY_TORCH if self.library is None else self.library.level

    @property
    def digest(self) -> str | None:
        """That of the library."""
        return None if self.library is None else self.library.digest

    def packer(self, device: str) -> Packer | None:
        """What packs weights; None without a library, and so on other devices than the processor."""
        return None if self.library is None else KernelPacker.of(self.library)

    def attention(self, arena: KVArena) -> PagedAttention:
        """As `Compute.attention`."""
        return PagedAttention(arena) if self.library is None else FusedAttention(arena, self.library)

    def fuse(self, loaded: LoadedModel) -> int:
        """As `Compute.fuse`."""
        if self.library is None:
            return 0
        fuse_experts(loaded.model, ExpertsKernel(self.library))
        return fuse_layers(loaded, DecoderKernels(DecoderKernel(self.library)))

    def rest(self) -> None:
        """End the pool of threads that the calling thread computed with."""
        thread_pool.release()
